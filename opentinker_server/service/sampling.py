"""Samplers: sampling calls bound to one immutable snapshot, or to the base model.

The worker holds a snapshot while a sampler is bound to it. One with a name can be loaded again from its files; one
that lives in memory only is gone with its last sampler, or with the worker.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentinker_client.wire.v1 import sampling_pb2
from opentinker_server.config import Config
from opentinker_server.scheduler.errors import ServiceError
from opentinker_server.service.adapters import Adapters
from opentinker_server.service.artifacts import Artifacts
from opentinker_server.service.sessions import Sessions
from opentinker_server.service.supervisor import WorkerSupervisor
from opentinker_server.service.validation import ModelLimits, prompt_tokens, refuse_unknown_fields
from opentinker_server.state.database import CheckpointRow, SnapshotRow, now
from opentinker_server.state.names import SAMPLER, new_id
from opentinker_server.workers.v1 import worker_pb2

logger = logging.getLogger(__name__)

MAX_STOP_RULES = 64
MAX_STOP_CHARS = 1024
UNBOUND_SECONDS = 60.0
"""How long a snapshot in memory waits at least for its first sampler when a newer version is published."""


def snapshot_key(adapter_id: str, version: int) -> str:
    """The worker's key of a snapshot."""
    return f"{adapter_id}@{version}"


@dataclass
class _Sampler:
    sampler_id: str
    session_id: str
    client_key: str
    payload: bytes
    row: SnapshotRow | None
    message: sampling_pb2.Sampler


@dataclass
class _Held:
    """What is known of the worker's snapshots, by key."""

    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    present: bool = False


class Samplers:
    """All samplers and the snapshots they pin. Used from the event loop only."""

    def __init__(
        self,
        *,
        config: Config,
        model: ModelLimits,
        adapters: Adapters,
        artifacts: Artifacts,
        sessions: Sessions,
        worker: WorkerSupervisor,
    ):
        self._config = config
        self._model = model
        self._adapters = adapters
        self._artifacts = artifacts
        self._sessions = sessions
        self._worker = worker
        self._samplers: dict[str, _Sampler] = {}
        self._by_client_key: dict[str, str] = {}
        self._held: dict[str, _Held] = {}
        self._calls: Counter[str] = Counter()
        """Sampling calls under way, by the key of their snapshot: each pins it as a sampler does."""
        self._tasks: set[asyncio.Task[None]] = set()

    # Samplers

    def create(self, request: sampling_pb2.CreateSamplerRequest) -> sampling_pb2.Sampler:
        """Bind a new sampler; repeating the client_key returns the same one."""
        payload = request.SerializeToString(deterministic=True)
        known = self._samplers.get(self._by_client_key.get(request.client_key, ""))
        if known is not None:
            if known.payload != payload:
                raise ServiceError("SEQUENCE_CONFLICT", "client_key was used for another request", field="client_key")
            return known.message
        self._sessions.require(request.session_id)
        if not 8 <= len(request.client_key) <= 128:
            raise ServiceError("INVALID_ARGUMENT", "client_key must have 8 to 128 characters", field="client_key")
        row = self._target(request)
        sampler_id = new_id(SAMPLER)
        message = self._message(sampler_id, row)
        sampler = _Sampler(sampler_id, request.session_id, request.client_key, payload, row, message)
        self._samplers[sampler_id] = sampler
        self._by_client_key[request.client_key] = sampler_id
        return sampler.message

    def refresh(self, request: sampling_pb2.RefreshSamplerRequest) -> sampling_pb2.Sampler:
        """Bind to another version of the same adapter; calls in progress keep the old one."""
        sampler = self._get(request.sampler_id)
        if sampler.row is None:
            raise ServiceError("FAILED_PRECONDITION", "the sampler is bound to the base model, which has no versions")
        version = request.version if request.HasField("version") else None
        old, row = sampler.row, self._version(sampler.row.adapter_id, version)
        sampler.row, sampler.message = row, self._message(sampler.sampler_id, row)
        if old.version != row.version:
            self._later(self._release(old))
        return sampler.message

    def delete(self, sampler_id: str) -> None:
        """Release a sampler; deleting one that is gone changes nothing."""
        sampler = self._samplers.pop(sampler_id, None)
        if sampler is None:
            return
        self._by_client_key.pop(sampler.client_key, None)
        if sampler.row is not None:
            self._later(self._release(sampler.row))

    async def end_session(self, session_id: str) -> None:
        """Release what an ended session owns."""
        for sampler in [s for s in self._samplers.values() if s.session_id == session_id]:
            self.delete(sampler.sampler_id)

    def _target(self, request: sampling_pb2.CreateSamplerRequest) -> SnapshotRow | None:
        kind = request.WhichOneof("target")
        if kind == "base_model":
            if request.base_model != self._model.name:
                raise ServiceError(
                    "NOT_FOUND",
                    f"no base model {request.base_model!r} here; this server offers {self._model.name}",
                    field="base_model",
                )
            return None
        if kind == "policy":
            version = request.policy.version if request.policy.HasField("version") else None
            return self._version(request.policy.adapter_id, version)
        if kind is None:
            raise ServiceError("INVALID_ARGUMENT", "give a base_model, a uri or a policy", field="target")
        row = self._artifacts.find(request.uri)
        if isinstance(row, CheckpointRow):
            raise ServiceError(
                "WRONG_KIND",
                f"{request.uri} is a checkpoint (training state); a snapshot from save_weights_for_sampler is needed "
                "to sample. Create a training client from the checkpoint and publish a snapshot of it",
                field="uri",
            )
        return row

    def _version(self, adapter_id: str, version: int | None) -> SnapshotRow:
        self._adapters.row(adapter_id)
        if version is None:
            row = self._artifacts.latest_snapshot(adapter_id)
        else:
            row = self._artifacts.snapshot(adapter_id, version)
        if row is None:
            which = "no snapshot yet" if version is None else f"no snapshot version {version}"
            raise ServiceError("NOT_FOUND", f"adapter {adapter_id} has {which}", field="version")
        return row

    def _message(self, sampler_id: str, row: SnapshotRow | None) -> sampling_pb2.Sampler:
        message = sampling_pb2.Sampler(sampler_id=sampler_id, base_model=self._model.name)
        if row is not None:
            message.snapshot.CopyFrom(self._artifacts.message(row))
        return message

    def _get(self, sampler_id: str) -> _Sampler:
        sampler = self._samplers.get(sampler_id)
        if sampler is None:
            shown = sampler_id if len(sampler_id) <= 60 else sampler_id[:57] + "..."
            raise ServiceError(
                "NOT_FOUND", f"no sampler {shown!r}; it was released, or its session ended", field="sampler_id"
            )
        return sampler

    # Snapshots in the worker

    def published(self, row: SnapshotRow) -> None:
        """The worker holds a new snapshot; older ones in memory that nobody is bound to are forgotten."""
        self._held[snapshot_key(row.adapter_id, row.version)] = _Held(present=True)
        self._later(self.drop_unbound(row.adapter_id, below=row.version))

    def withdraw(self, adapter_id: str, version: int) -> None:
        """The worker took a snapshot that could not be recorded: its key must be free for the next attempt."""
        key = snapshot_key(adapter_id, version)
        self._held[key] = _Held(present=True)
        self._later(self._drop(key))

    def worker_lost(self) -> None:
        """The worker died: it holds nothing any more."""
        self._held.clear()
        self._artifacts.forget_in_memory()

    async def drop_unbound(self, adapter_id: str, *, below: int | None = None) -> None:
        """Forget snapshots of an adapter in the worker that no sampler is bound to.

        With `below`, older versions only, and of those in memory none that its publisher may be about to bind.
        """
        for key in [key for key in self._held if key.startswith(f"{adapter_id}@")]:
            version = int(key.rpartition("@")[2])
            if below is None or version < below:
                row = self._artifacts.snapshot(adapter_id, version)
                if row is None:
                    continue
                young = not row.directory and row.created_at > now() - UNBOUND_SECONDS
                if below is None or not young:
                    await self._release(row)

    async def removed(self, row: SnapshotRow) -> None:
        """A snapshot was deleted: the worker forgets it once running requests have ended."""
        await self._drop(snapshot_key(row.adapter_id, row.version))

    def _is_pinned(self, row: SnapshotRow) -> bool:
        key = snapshot_key(row.adapter_id, row.version)
        return self._calls[key] > 0 or any(
            s.row is not None and snapshot_key(s.row.adapter_id, s.row.version) == key for s in self._samplers.values()
        )

    async def _release(self, row: SnapshotRow) -> None:
        if self._is_pinned(row):
            return
        current = self._artifacts.snapshot(row.adapter_id, row.version)
        if current is not None and not current.directory:
            self._artifacts.delete(current)  # at once: nobody binds to it while the worker is told
        await self._drop(snapshot_key(row.adapter_id, row.version))

    async def _drop(self, key: str) -> None:
        if self._held.pop(key, None) is None:
            return
        try:
            command = worker_pb2.DropSnapshot(snapshot_key=key)
            await self._worker.call(worker_pb2.WorkerCommand(drop_snapshot=command))
        except ServiceError as error:
            if error.reason not in ("UNAVAILABLE", "NOT_FOUND"):
                raise

    async def _hold(self, row: SnapshotRow) -> str:
        """The key under which the worker holds the snapshot, loading it from its files when needed."""
        key = snapshot_key(row.adapter_id, row.version)
        current = self._artifacts.snapshot(row.adapter_id, row.version)
        if current is None:
            raise ServiceError(
                "NOT_FOUND",
                f"snapshot {row.adapter_id} version {row.version} was deleted, expired, or lost with the worker's "
                "memory",
                field="sampler_id",
            )
        held = self._held.setdefault(key, _Held())
        async with held.loading:
            if not held.present:
                command = worker_pb2.LoadSnapshot(
                    snapshot_key=key, directory=str(self._artifacts.directory(current)), sha256=current.sha256
                )
                await self._worker.call(worker_pb2.WorkerCommand(load_snapshot=command))
                held.present = True
        return key

    def _later(self, work) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Sampling

    async def sample(
        self, request: sampling_pb2.SampleRequest, *, stream: bool
    ) -> AsyncIterator[sampling_pb2.SampleDelta | sampling_pb2.SampleResponse]:
        """Deltas while streaming, then the whole answer. Closing the iteration stops the generation."""
        sampler = self._get(request.sampler_id)
        row, bound = sampler.row, sampler.message
        complete = self._complete(request)
        with self._pinned(row):
            key = "" if row is None else await self._hold(row)
            command = worker_pb2.Sample(snapshot_key=key, request=complete, stream=stream)
            replies = self._worker.stream(worker_pb2.WorkerCommand(sample=command))
            try:
                async for reply in replies:
                    if reply.WhichOneof("reply") == "sample_delta":
                        yield reply.sample_delta
                    elif reply.final:
                        response = reply.sample
                        if bound.HasField("snapshot"):
                            response.snapshot.CopyFrom(bound.snapshot)
                        yield response
            finally:
                await replies.aclose()  # type: ignore[attr-defined]

    @contextmanager
    def _pinned(self, row: SnapshotRow | None) -> Iterator[None]:
        """A snapshot that a call is on its way to stays, whatever its sampler is bound to meanwhile."""
        if row is None:
            yield
            return
        key = snapshot_key(row.adapter_id, row.version)
        self._calls[key] += 1
        try:
            yield
        finally:
            self._calls[key] -= 1
            if not self._calls[key]:
                del self._calls[key]
                if not self._is_pinned(row):
                    self._later(self._release(row))

    def _complete(self, request: sampling_pb2.SampleRequest) -> sampling_pb2.SampleRequest:
        """The request with every default resolved. Raises ServiceError naming what is out of range."""
        tokens = prompt_tokens(request.prompt, self._model)
        limits = self._config.limits
        _check(1 <= request.num_samples <= limits.max_num_samples, "num_samples", request.num_samples,
               f"from 1 to {limits.max_num_samples}")  # fmt: skip
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            _check(0 <= getattr(request, name) <= limits.max_topk_logprobs, name, getattr(request, name),
                   f"from 0 to {limits.max_topk_logprobs}")  # fmt: skip
        complete = sampling_pb2.SampleRequest()
        complete.CopyFrom(request)
        params = complete.params
        context = self._model.max_context_length
        room = context - len(tokens)
        if not params.HasField("max_tokens"):
            params.max_tokens = max(room, 0)
        elif params.max_tokens < 1:
            _check(False, "max_tokens", params.max_tokens, "at least 1")
        if len(tokens) + max(params.max_tokens, 1) > context:
            raise ServiceError(
                "CONTEXT_LENGTH",
                f"the prompt has {len(tokens)} tokens and max_tokens is {max(params.max_tokens, 1)}; together they "
                f"exceed the context of {context}",
                field="max_tokens",
                expected=context,
                actual=len(tokens) + max(params.max_tokens, 1),
            )
        _complete_distribution(params)
        _check_stop(params, self._model)
        return complete


def _check(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ServiceError("INVALID_ARGUMENT", f"{name} is {value}; it must be {rule}", field=name)


def _complete_distribution(params: sampling_pb2.SamplingParams) -> None:
    refuse_unknown_fields(params, "params")
    if not params.HasField("seed"):
        params.seed = secrets.randbits(63)
    for name, default in (("temperature", 1.0), ("top_k", -1), ("top_p", 1.0)):
        if not params.HasField(name):
            setattr(params, name, default)
    temperature, top_p = params.temperature, params.top_p
    _check(math.isfinite(temperature) and temperature >= 0, "temperature", temperature, "finite and at least 0")
    _check(params.top_k == -1 or params.top_k >= 1, "top_k", params.top_k, "-1 (all) or at least 1")
    _check(math.isfinite(top_p) and 0 < top_p <= 1, "top_p", top_p, "above 0 and at most 1")
    if params.logprobs_mode == sampling_pb2.LOGPROBS_MODE_UNSPECIFIED:
        params.logprobs_mode = sampling_pb2.LOGPROBS_MODE_MODEL
    known = params.logprobs_mode in sampling_pb2.LogprobsMode.values()
    _check(known, "logprobs_mode", params.logprobs_mode, "MODEL or PROCESSED")


def _check_stop(params: sampling_pb2.SamplingParams, model: ModelLimits) -> None:
    texts, ids = list(params.stop_texts.texts), list(params.stop_token_ids.ids)
    _check(len(texts) + len(ids) <= MAX_STOP_RULES, "stop", len(texts) + len(ids), f"at most {MAX_STOP_RULES} rules")
    _check(all(texts), "stop", "an empty text", "a non-empty text")
    _check(all(len(t) <= MAX_STOP_CHARS for t in texts), "stop", "too long", f"at most {MAX_STOP_CHARS} characters")
    outside = [token for token in ids if not 0 <= token < model.vocab_size]
    _check(not outside, "stop", outside[:1], f"a token id below {model.vocab_size}")
