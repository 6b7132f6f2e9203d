"""Training calls: checked whole, made operations, carried out by the worker.

Every call goes the same way: find the adapter's queue, take note of given-up sequence ids, recognise a repetition,
validate, submit. What validation refuses uses its sequence id up, so that the next call runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence

from google.protobuf.message import Message

from opentinker_client.wire.v1 import datum_pb2, operation_pb2, policy_pb2, training_pb2
from opentinker_server.config import Config
from opentinker_server.scheduler.errors import ServiceError
from opentinker_server.scheduler.operations import Operation, OperationStore
from opentinker_server.service.adapters import ACTIVE, UNLOADED, Adapters
from opentinker_server.service.artifacts import Artifacts, name_taken
from opentinker_server.service.messages import checkpoint_message, lora_message, snapshot_message
from opentinker_server.service.sampling import Samplers, snapshot_key
from opentinker_server.service.sessions import Sessions
from opentinker_server.service.supervisor import WorkerSupervisor
from opentinker_server.service.validation import (
    ModelLimits,
    check_data,
    check_loss,
    check_metadata,
    complete_adam,
    complete_lora,
    expiry,
    refuse_unknown_fields,
)
from opentinker_server.state.database import AdapterRow, CheckpointRow, SnapshotRow, now
from opentinker_server.state.names import ADAPTER, NotAPlainName, check_name, new_id
from opentinker_server.workers.v1 import worker_pb2

logger = logging.getLogger(__name__)

Run = Callable[[Operation], Awaitable[Message]]
THREAD_BYTES = 1 << 20
"""Calls above this size are validated off the event loop."""


class TrainingService:
    """What the training calls mean. Used from the event loop only."""

    def __init__(
        self,
        *,
        config: Config,
        model: ModelLimits,
        adapters: Adapters,
        artifacts: Artifacts,
        operations: OperationStore,
        samplers: Samplers,
        sessions: Sessions,
        worker: WorkerSupervisor,
    ):
        self._config = config
        self._model = model
        self._adapters = adapters
        self._artifacts = artifacts
        self._operations = operations
        self._samplers = samplers
        self._sessions = sessions
        self._worker = worker
        self._creations: dict[str, tuple[bytes, Operation]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # Creation

    def create_adapter(self, request: training_pb2.CreateAdapterRequest, request_id: str) -> Operation:
        """Starts the creation of an adapter; repeating the client_key returns the same operation."""
        payload = _digest(request)
        known = self._creations.get(request.client_key)
        if known is not None:
            if known[0] != payload:
                raise ServiceError("SEQUENCE_CONFLICT", "client_key was used for another request", field="client_key")
            return known[1]
        earlier = self._adapters.by_client_key(request.client_key)
        if earlier is not None:
            return self._created_earlier(earlier, payload, request_id)
        self._sessions.require(request.session_id)
        if not 8 <= len(request.client_key) <= 128:
            raise ServiceError("INVALID_ARGUMENT", "client_key must have 8 to 128 characters", field="client_key")
        source, lora = self._source(request)
        metadata = check_metadata(request.user_metadata)
        limit = self._config.training.max_adapters
        pending = sum(1 for _, op in self._creations.values() if not op.ended.is_set())
        if len(self._adapters.queues) + pending >= limit:
            raise ServiceError(
                "LIMIT_EXCEEDED",
                f"{limit} adapters are live, the limit of this server; unload one, or end its session",
                limit=limit,
            )
        row = AdapterRow(
            adapter_id=new_id(ADAPTER),
            client_key=request.client_key,
            session_id=request.session_id,
            base_model=self._model.name,
            lora={field.name: value for field, value in lora.ListFields()} | _flags(lora),
            state=ACTIVE,
            user_metadata=metadata,
            created_at=now(),
            last_used_at=now(),
            step=0,
            latest_version=0,
        )

        async def run(operation: Operation) -> Message:
            command = worker_pb2.CreateAdapter(
                adapter_id=row.adapter_id, lora=lora, directory=source, with_optimizer=request.with_optimizer
            )
            reply = await self._worker.call(worker_pb2.WorkerCommand(create_adapter=command))
            try:
                self._sessions.require(request.session_id)  # it may have ended meanwhile
                row.step = reply.step
                self._adapters.add(row)
            except Exception:
                await self._drop_live(row.adapter_id)
                raise
            return self._adapters.message(row)

        return self._start_creation(row.adapter_id, request.client_key, payload, request_id, run)

    def _start_creation(self, adapter_id: str, client_key: str, payload: bytes, request_id: str, run: Run) -> Operation:
        operation = Operation(adapter_id, 0, operation_pb2.OPERATION_KIND_CREATE_ADAPTER, payload, request_id, run)
        self._creations[client_key] = (payload, self._operations.add(operation))
        task = asyncio.create_task(operation.execute())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return operation

    def _created_earlier(self, row: AdapterRow, payload: bytes, request_id: str) -> Operation:
        """The creation was done, and its operation is no longer kept or was that of a server before this one."""

        async def run(operation: Operation) -> Message:
            self._adapters.live(row.adapter_id)
            return self._adapters.message(self._adapters.row(row.adapter_id))

        return self._start_creation(row.adapter_id, row.client_key, payload, request_id, run)

    async def _drop_live(self, adapter_id: str) -> None:
        """The worker frees an adapter; a dead worker holds nothing."""
        command = worker_pb2.DropAdapter(adapter_id=adapter_id)
        try:
            await self._worker.call(worker_pb2.WorkerCommand(drop_adapter=command))
        except ServiceError as error:
            if error.reason != "UNAVAILABLE":
                raise

    def forget_old(self) -> None:
        """Let go of results whose time is up."""
        for operation in self._operations.sweep():
            queue = self._adapters.queues.get(operation.adapter_id)
            if queue is not None:
                queue.forget([operation])
        self._creations = {key: made for key, made in self._creations.items() if made[1] in self._operations}

    def _source(self, request: training_pb2.CreateAdapterRequest) -> tuple[str, policy_pb2.LoraConfig]:
        """Directory to start from ("" for fresh weights) and the complete configuration."""
        if not request.from_uri:
            self._check_base_model(request.base_model)
            seed = secrets.randbits(31)
            return "", complete_lora(request.lora, max_rank=self._config.training.max_rank, seed=seed)
        found = self._artifacts.find(request.from_uri)
        if isinstance(found, SnapshotRow) and request.with_optimizer:
            raise _needs_checkpoint(request.from_uri)
        adapter = self._artifacts.adapter_of(found)
        if adapter.base_model != self._model.name or (request.base_model or adapter.base_model) != adapter.base_model:
            raise ServiceError(
                "WRONG_KIND",
                f"{request.from_uri} belongs to base model {adapter.base_model}, "
                f"asked for {request.base_model or self._model.name}",
                field="from_uri",
            )
        lora = lora_message(adapter.lora)
        if request.HasField("lora"):
            wanted = complete_lora(request.lora, max_rank=self._config.training.max_rank, seed=lora.seed)
            if wanted != lora:
                raise ServiceError(
                    "WRONG_KIND", f"{request.from_uri} was built with another LoRA configuration", field="lora"
                )
        return str(self._artifacts.directory(found)), lora

    def _check_base_model(self, name: str) -> None:
        if name != self._model.name:
            raise ServiceError(
                "NOT_FOUND", f"no base model {name!r} here; this server offers {self._model.name}", field="base_model"
            )

    # Calls in an adapter's order

    async def forward_backward(
        self, header: training_pb2.ForwardBackwardHeader, data: Sequence[datum_pb2.Datum], request_id: str
    ) -> Operation:
        """Loss, log-probabilities and, unless forward_only, a gradient."""
        size = sum(datum.ByteSize() for datum in data)

        async def off_loop(function: Callable, *arguments: object):
            return await asyncio.to_thread(function, *arguments) if size > THREAD_BYTES else function(*arguments)

        payload = await off_loop(_digest, header, *data)

        def validate() -> None:
            refuse_unknown_fields(header, "the header")
            spec = check_loss(header.loss_fn, header.loss_fn_config)
            check_data(data, spec, self._model, max_dense_bytes=self._config.limits.max_call_bytes)

        async def run(operation: Operation) -> Message:
            command = worker_pb2.ForwardBackward(
                adapter_id=operation.adapter_id,
                loss_fn=header.loss_fn,
                loss_fn_config=header.loss_fn_config,
                forward_only=header.forward_only,
                trained_only=header.trained_only,
                data=data,
            )
            sent = worker_pb2.WorkerCommand(forward_backward=command)
            operation.stop = lambda: self._worker.cancel(sent)
            async for reply in self._worker.stream(sent):
                if reply.WhichOneof("reply") == "datums_done":
                    operation.progress(reply.datums_done)
                elif reply.final:
                    operation.datums_done = len(data)
                    self._adapters.touch(operation.adapter_id)
                    return reply.forward_backward
            raise ServiceError("INTERNAL", "the device worker ended the call without a result")

        kind = "FORWARD" if header.forward_only else "FORWARD_BACKWARD"
        return await self._submit(header.sequence, kind, payload, request_id, lambda: off_loop(validate), run)

    async def optim_step(self, request: training_pb2.OptimStepRequest, request_id: str) -> Operation:
        """One optimizer step."""
        adam = training_pb2.AdamParams()

        async def validate() -> None:
            adam.CopyFrom(complete_adam(request.adam))

        async def run(operation: Operation) -> Message:
            command = worker_pb2.OptimStep(adapter_id=operation.adapter_id, adam=adam)
            reply = await self._worker.call(worker_pb2.WorkerCommand(optim_step=command))
            self._adapters.touch(operation.adapter_id, step=reply.step)
            return reply.optim_step

        return await self._submit(request.sequence, "OPTIM_STEP", _digest(request), request_id, validate, run)

    async def save_checkpoint(self, request: training_pb2.SaveCheckpointRequest, request_id: str) -> Operation:
        """Save weights and optimizer state under a name."""
        adapter_id = request.sequence.adapter_id

        def check_free() -> None:
            if not request.overwrite and self._artifacts.checkpoint(adapter_id, request.name) is not None:
                raise name_taken(request.name)

        async def validate() -> None:
            _check_name(request.name, "checkpoint name")
            check_metadata(request.user_metadata)
            expiry(_ttl(request), now=now())
            check_free()

        async def run(operation: Operation) -> Message:
            check_free()  # an earlier queued save may have taken the name
            store = self._artifacts.store
            directory = store.new_directory()
            try:
                command = worker_pb2.SaveState(adapter_id=adapter_id, directory=str(directory))
                reply = await self._worker.call(worker_pb2.WorkerCommand(save_state=command))
                relative = store.commit(directory, adapter_id=adapter_id, kind="checkpoints")
            except BaseException:
                store.discard(directory)
                raise
            row = CheckpointRow(
                adapter_id=adapter_id,
                name=request.name,
                directory=relative,
                step=reply.step,
                sha256=reply.saved.sha256,
                size_bytes=reply.saved.size_bytes,
                user_metadata=dict(request.user_metadata),
                created_at=now(),
                expires_at=expiry(_ttl(request), now=now()),
            )
            self._artifacts.add_checkpoint(row, overwrite=request.overwrite)
            self._adapters.touch(adapter_id)
            return checkpoint_message(row, self._adapters.row(adapter_id))

        return await self._submit(request.sequence, "SAVE_CHECKPOINT", _digest(request), request_id, validate, run)

    async def publish_snapshot(self, request: training_pb2.PublishSnapshotRequest, request_id: str) -> Operation:
        """Publish the weights as the next version; with a name, durable before it is acknowledged as done."""
        adapter_id = request.sequence.adapter_id

        async def validate() -> None:
            if request.name:
                _check_name(request.name, "snapshot name")
            check_metadata(request.user_metadata)
            expiry(_ttl(request), now=now())

        async def run(operation: Operation) -> Message:
            version = self._adapters.row(adapter_id).latest_version + 1
            store = self._artifacts.store
            directory = store.new_directory() if request.name else None
            relative = ""
            taken = False
            try:
                command = worker_pb2.PublishSnapshot(
                    adapter_id=adapter_id,
                    snapshot_key=snapshot_key(adapter_id, version),
                    directory="" if directory is None else str(directory),
                )
                reply = await self._worker.call(worker_pb2.WorkerCommand(publish_snapshot=command))
                taken = True
                if directory is not None:
                    relative = store.commit(directory, adapter_id=adapter_id, kind="snapshots")
                row = SnapshotRow(
                    adapter_id=adapter_id,
                    version=version,
                    name=request.name,
                    directory=relative,
                    step=reply.step,
                    sha256=reply.saved.sha256,
                    size_bytes=reply.saved.size_bytes,
                    user_metadata=dict(request.user_metadata),
                    created_at=now(),
                    expires_at=expiry(_ttl(request), now=now()),
                )
                self._artifacts.add_snapshot(row)
            except BaseException:
                if directory is not None:
                    store.discard(directory)
                if relative:
                    store.delete(relative)
                if taken:
                    self._samplers.withdraw(adapter_id, version)
                raise
            self._samplers.published(row)
            self._adapters.touch(adapter_id)
            return snapshot_message(row, self._adapters.row(adapter_id))

        return await self._submit(request.sequence, "PUBLISH_SNAPSHOT", _digest(request), request_id, validate, run)

    async def load_state(self, request: training_pb2.LoadStateRequest, request_id: str) -> Operation:
        """Replace the weights of a live adapter."""
        adapter_id = request.sequence.adapter_id

        async def validate() -> None:
            found = self._artifacts.find(request.uri)
            if isinstance(found, SnapshotRow) and request.with_optimizer:
                raise _needs_checkpoint(request.uri)
            theirs, ours = self._artifacts.adapter_of(found), self._adapters.row(adapter_id)
            if theirs.base_model != ours.base_model:
                raise ServiceError(
                    "WRONG_KIND",
                    f"{request.uri} belongs to base model {theirs.base_model}, the adapter to {ours.base_model}",
                    field="uri",
                )
            for key in ("rank", "alpha", "use_rslora", "train_attn", "train_mlp", "train_unembed"):
                if theirs.lora.get(key) != ours.lora.get(key):
                    raise ServiceError(
                        "WRONG_KIND",
                        f"{request.uri} was built with {key} {theirs.lora.get(key)}, the adapter with "
                        f"{ours.lora.get(key)}; create a new training client from it instead",
                        field=key,
                    )
            self._artifacts.directory(found)

        async def run(operation: Operation) -> Message:
            directory = self._artifacts.directory(self._artifacts.find(request.uri))
            command = worker_pb2.LoadState(
                adapter_id=adapter_id, directory=str(directory), with_optimizer=request.with_optimizer
            )
            reply = await self._worker.call(worker_pb2.WorkerCommand(load_state=command))
            self._adapters.touch(adapter_id, step=reply.step)
            return self._adapters.message(self._adapters.row(adapter_id))

        return await self._submit(request.sequence, "LOAD_STATE", _digest(request), request_id, validate, run)

    async def unload_adapter(self, request: training_pb2.UnloadAdapterRequest, request_id: str) -> Operation:
        """Free the live state after everything before it is done."""
        adapter_id = request.sequence.adapter_id

        async def validate() -> None:
            return None

        async def run(operation: Operation) -> Message:
            await self.unload(adapter_id)
            return self._adapters.message(self._adapters.row(adapter_id))

        return await self._submit(request.sequence, "UNLOAD_ADAPTER", _digest(request), request_id, validate, run)

    def attach(self, request: training_pb2.AttachAdapterRequest) -> policy_pb2.Adapter:
        """Make the caller's session the owner of a live adapter."""
        self._sessions.require(request.session_id)
        queue = self._adapters.live(request.adapter_id)
        # What the caller before sent and never arrived does not come any more.
        queue.abandon(range(queue.next_seq_id, queue.first_free()))
        self._adapters.touch(request.adapter_id, session_id=request.session_id)
        return self._adapters.message(self._adapters.row(request.adapter_id))

    async def unload(self, adapter_id: str) -> None:
        """Free an adapter's live state; a running operation is not torn apart."""
        row = self._adapters.row(adapter_id)
        row.state = UNLOADED
        queue = self._adapters.remove_live(adapter_id, UNLOADED, self._adapters.not_live(row))
        if queue is None:
            return
        queue.finish()
        for operation in queue.running:
            if operation.kind != operation_pb2.OPERATION_KIND_UNLOAD_ADAPTER:
                await operation.ended.wait()
        await self._drop_live(adapter_id)
        await self._samplers.drop_unbound(adapter_id)

    async def end_session(self, session_id: str) -> None:
        """Unload what an ended session owns."""
        unloads = [self.unload(adapter_id) for adapter_id in self._adapters.of_session(session_id)]
        for result in await asyncio.gather(*unloads, return_exceptions=True):
            if isinstance(result, Exception):
                logger.error("an adapter was not unloaded", exc_info=result)

    def explain(self, op_id: str) -> operation_pb2.ExplainOperationResponse:
        """Why an operation has not ended."""
        operation = self._operations.get(op_id)
        queue = self._adapters.queues.get(operation.adapter_id)
        ahead = 0
        missing = None
        if queue is not None:
            ahead = sum(1 for op in queue.waiting() if op.seq_id < operation.seq_id) + len(queue.running)
            missing = queue.missing()
        others = sum(1 for op in self._operations.active() if op.adapter_id != operation.adapter_id)
        state = operation_pb2.OperationState.Name(operation.state).removeprefix("OPERATION_STATE_")
        if operation.ended.is_set():
            text = f"It has ended: {state}."
        elif queue is not None and operation in queue.running:
            text = (
                f"It is running; {operation.datums_done} datums are done, {others} other operations share the device."
            )
        elif missing is not None:
            gap = self._config.scheduler.gap_timeout_s
            text = f"seq_id {missing} has not arrived; it is waited for at most {gap:g} s."
        else:
            text = f"{ahead} operations of this adapter come first; {others} of other adapters share the device."
        if not self._worker.is_up:
            text += " The device worker is restarting."
        return operation_pb2.ExplainOperationResponse(
            explanation=text,
            num_ahead_same_adapter=ahead,
            num_other_operations=others,
            missing_seq_id=missing,
        )

    async def _submit(
        self,
        sequence: training_pb2.Sequence,
        kind: str,
        payload: bytes,
        request_id: str,
        validate: Callable[[], Awaitable[None]],
        run: Run,
    ) -> Operation:
        if sequence.adapter_id not in self._adapters.queues:
            ended = self._operations.at(sequence.adapter_id, sequence.seq_id)
            if ended is not None and ended.payload_sha256 == payload:  # the answer was lost, then the live state
                return ended
        queue = self._adapters.live(sequence.adapter_id)
        queue.abandon(sequence.abandoned_seq_ids)
        known = queue.find(sequence.seq_id, payload)
        if known is not None:
            return known
        try:
            await validate()
        except ServiceError as error:
            queue.refuse(sequence.seq_id, payload, error)
            raise
        except Exception:  # a fault of the check itself must not make the next call wait
            queue.refuse(sequence.seq_id, payload, ServiceError("INTERNAL", "the request could not be checked"))
            raise
        # The same request may have been taken, or the adapter unloaded, while this one was validated.
        queue = self._adapters.live(sequence.adapter_id)
        known = queue.find(sequence.seq_id, payload)
        if known is not None:
            return known
        number = operation_pb2.OperationKind.Value(f"OPERATION_KIND_{kind}")
        operation = Operation(sequence.adapter_id, sequence.seq_id, number, payload, request_id, self._telling(run))
        queue.submit(self._operations.add(operation))
        return operation

    def _telling(self, run: Run) -> Run:
        """`run`, whose failure by the worker's death says what became of the adapter."""

        async def told(operation: Operation) -> Message:
            try:
                return await run(operation)
            except ServiceError as error:
                if error.reason == "UNAVAILABLE" and operation.adapter_id not in self._adapters.queues:
                    raise self._adapters.not_live(self._adapters.row(operation.adapter_id)) from error
                raise

        return told

    def refuse_stream(self, header: training_pb2.ForwardBackwardHeader, error: ServiceError) -> None:
        """A stream whose header was readable broke a rule: its sequence id is used up."""
        queue = self._adapters.queues.get(header.sequence.adapter_id)
        if queue is not None:
            queue.abandon(header.sequence.abandoned_seq_ids)
            queue.refuse(header.sequence.seq_id, _digest(header), error)


def _digest(first: Message, *more: Message) -> bytes:
    """sha256 of a request; the list of given-up ids is not part of it, since a repetition may carry another."""
    if first.DESCRIPTOR.fields_by_name.get("sequence") is not None:
        copy = type(first)()
        copy.CopyFrom(first)
        copy.sequence.ClearField("abandoned_seq_ids")
        first = copy
    digest = hashlib.sha256(first.SerializeToString(deterministic=True))
    for message in more:
        data = message.SerializeToString(deterministic=True)
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def _flags(lora: policy_pb2.LoraConfig) -> dict[str, bool]:
    return {name: getattr(lora, name) for name in ("train_attn", "train_mlp", "train_unembed", "use_rslora")}


def _check_name(name: str, what: str) -> None:
    try:
        check_name(name, what=what)
    except NotAPlainName as error:
        raise ServiceError("INVALID_ARGUMENT", str(error), field="name") from error


def _ttl(request: training_pb2.SaveCheckpointRequest | training_pb2.PublishSnapshotRequest) -> int | None:
    return request.ttl_seconds if request.HasField("ttl_seconds") else None


def _needs_checkpoint(uri: str) -> ServiceError:
    return ServiceError(
        "WRONG_KIND",
        f"{uri} is a snapshot (weights for sampling, no optimizer state); a checkpoint from save_state is needed to "
        "load the optimizer too. Load it without the optimizer, or give a checkpoint",
        field="uri",
    )
