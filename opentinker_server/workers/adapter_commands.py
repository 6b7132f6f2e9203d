"""Commands that are carried out in units of device work: those of adapters, and exports."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from opentinker_client.wire.v1 import operation_pb2
from opentinker_server.models.base import BaseModel
from opentinker_server.models.peft_adapter import merge_into_base
from opentinker_server.sampler.base import SamplerBackend
from opentinker_server.training.call import TrainingCall
from opentinker_server.training.errors import TrainingError
from opentinker_server.training.state_files import content_hash, read_weights
from opentinker_server.training.trainer import Trainer
from opentinker_server.workers import codec
from opentinker_server.workers.v1 import worker_pb2

log = logging.getLogger(__name__)

NO_ADAPTER = ""
"""Queue of the commands that concern no live adapter."""


def queue_of(command: worker_pb2.WorkerCommand) -> str | None:
    """Id of the adapter in whose order the command runs, or NO_ADAPTER; None when it is no command in units."""
    kind = command.WhichOneof("command")
    if kind == "export_merged":
        return NO_ADAPTER
    return getattr(command, kind).adapter_id if kind in _OF_ADAPTERS else None


class AdapterCommands:
    """Carries commands out on the trainer and hands snapshots to the sampler. The loop thread only."""

    def __init__(self, *, base: BaseModel, trainer: Trainer, sampler: SamplerBackend) -> None:
        self._base = base
        self._trainer = trainer
        self._sampler = sampler
        self._live: set[str] = set()
        self._lost: set[str] = set()
        self.num_tokens_trained = 0
        """Token rows whose gradient was added to an adapter's."""
        self.num_tokens_scored = 0
        """Token rows that went through a forward pass only."""

    @property
    def num_live(self) -> int:
        """Adapters with live state."""
        return len(self._live)

    def run(self, command: worker_pb2.WorkerCommand) -> worker_pb2.WorkerReply:
        """A command that is one unit of work: any for which `queue_of` is not None but the two below.

        Raises TrainingError or SamplingError when the command is refused. Any other exception is a fault, after
        which the adapter is as before the command.
        """
        kind = command.WhichOneof("command")
        adapter_id = queue_of(command)
        if kind != "drop_adapter":
            self._refuse_lost(adapter_id)
        return self._with_step(adapter_id, _ONE_UNIT[kind](self, getattr(command, kind)))

    def begin(self, command: worker_pb2.WorkerCommand) -> TrainingCall:
        """A forward_backward, decoded. Raises as `run`."""
        body = command.forward_backward
        self._refuse_lost(body.adapter_id)
        return self._trainer.begin(
            body.adapter_id,
            [codec.decode_datum(datum, datum_index=index) for index, datum in enumerate(body.data)],
            body.loss_fn,
            codec.decode_loss_config(body.loss_fn_config),
            backward=not body.forward_only,
            trained_only=body.trained_only,
        )

    def run_calls(self, calls: Sequence[TrainingCall]) -> None:
        """One pass; see `Trainer.run`."""
        self._trainer.run(calls)

    def finish(self, call: TrainingCall) -> worker_pb2.WorkerReply:
        """The reply of a call that is done; its gradient is added."""
        output = self._trainer.finish(call)
        if call.backward:
            self.num_tokens_trained += call.num_tokens
        else:
            self.num_tokens_scored += call.num_tokens
        reply = worker_pb2.WorkerReply(forward_backward=codec.encode_forward_backward(output))
        return self._with_step(call.adapter_id, reply)

    def optim_steps(self, commands: Sequence[worker_pb2.WorkerCommand]) -> list[worker_pb2.WorkerReply | Exception]:
        """One step of each of several adapters: the replies, or what each was refused for."""
        outcomes: dict[str, worker_pb2.WorkerReply | Exception] = {}
        steps = []
        for body in (command.optim_step for command in commands):
            try:
                self._refuse_lost(body.adapter_id)
                self._trainer.step(body.adapter_id)
                steps.append((body.adapter_id, codec.decode_adam(body.adam)))
            except Exception as error:
                outcomes[body.adapter_id] = error
        try:
            results = self._trainer.optim_steps(steps)
        except Exception as error:
            # Weights and moments change in place: steps that broke off may have changed some of them.
            log.exception("optimizer steps of adapters %s broke off; their state is lost", [name for name, _ in steps])
            outcomes |= {adapter_id: self._lose(adapter_id, error) for adapter_id, _ in steps}
        else:
            for (adapter_id, _), result in zip(steps, results, strict=True):
                if isinstance(result, Exception):
                    outcomes[adapter_id] = result
                else:
                    reply = worker_pb2.WorkerReply(optim_step=operation_pb2.OptimStepResult(metrics=result))
                    outcomes[adapter_id] = self._with_step(adapter_id, reply)
        return [outcomes[command.optim_step.adapter_id] for command in commands]

    def _refuse_lost(self, adapter_id: str | None) -> None:
        if adapter_id in self._lost:
            raise TrainingError(
                f"The live state of adapter {adapter_id} was lost in a fault; drop it and reload a checkpoint.",
                reason="STATE_LOST",
                field=adapter_id or "",
            )

    def _with_step(self, adapter_id: str | None, reply: worker_pb2.WorkerReply) -> worker_pb2.WorkerReply:
        if adapter_id in self._live:
            reply.step = self._trainer.step(adapter_id)
        return reply

    def _create_adapter(self, body: worker_pb2.CreateAdapter) -> worker_pb2.WorkerReply:
        try:
            self._trainer.create_adapter(
                body.adapter_id,
                codec.decode_lora(body.lora),
                directory=Path(body.directory) if body.directory else None,
                with_optimizer=body.with_optimizer,
            )
        except ValueError as error:
            # The models' own word for settings that leave nothing to adapt.
            raise TrainingError(str(error), reason="INVALID_ARGUMENT", field="lora") from error
        self._live.add(body.adapter_id)
        return _done()

    def _drop_adapter(self, body: worker_pb2.DropAdapter) -> worker_pb2.WorkerReply:
        if body.adapter_id in self._lost:
            self._lost.remove(body.adapter_id)
        else:
            self._trainer.drop_adapter(body.adapter_id)
            self._live.remove(body.adapter_id)
        return _done()

    def _save_state(self, body: worker_pb2.SaveState) -> worker_pb2.WorkerReply:
        saved = self._trainer.save_state(body.adapter_id, Path(body.directory))
        return worker_pb2.WorkerReply(saved=worker_pb2.SavedFiles(sha256=saved.sha256, size_bytes=saved.size_bytes))

    def _load_state(self, body: worker_pb2.LoadState) -> worker_pb2.WorkerReply:
        self._trainer.load_state(body.adapter_id, Path(body.directory), with_optimizer=body.with_optimizer)
        return _done()

    def _publish_snapshot(self, body: worker_pb2.PublishSnapshot) -> worker_pb2.WorkerReply:
        """Known to the sampler last, so that a failed write publishes nothing."""
        if self._sampler.has_snapshot(body.snapshot_key):
            raise TrainingError(
                f"A snapshot with key '{body.snapshot_key}' exists; what a key names never changes.",
                reason="ALREADY_EXISTS",
                field=body.snapshot_key,
            )
        weights = self._trainer.snapshot(body.adapter_id)
        if body.directory:
            written = self._trainer.write_snapshot(body.adapter_id, Path(body.directory))
            saved = worker_pb2.SavedFiles(sha256=written.sha256, size_bytes=written.size_bytes)
        else:
            saved = worker_pb2.SavedFiles(sha256=content_hash(weights))
        self._sampler.add_snapshot(body.snapshot_key, weights)
        return worker_pb2.WorkerReply(saved=saved)

    def _export_merged(self, body: worker_pb2.ExportMerged) -> worker_pb2.WorkerReply:
        weights = read_weights(Path(body.source_directory), base=self._base)
        merge_into_base(Path(body.target_directory), self._base, weights)
        return _done()

    def _lose(self, adapter_id: str, error: Exception) -> TrainingError:
        self._trainer.drop_adapter(adapter_id)
        self._live.remove(adapter_id)
        self._lost.add(adapter_id)
        return TrainingError(
            f"The optimizer step broke off ({type(error).__name__}); the live state of the adapter is lost: drop "
            "it and reload a checkpoint.",
            reason="STATE_LOST",
            field=adapter_id,
        )


def _done() -> worker_pb2.WorkerReply:
    return worker_pb2.WorkerReply(done=worker_pb2.Done())


_ONE_UNIT: dict[str, Callable[..., worker_pb2.WorkerReply]] = {
    "create_adapter": AdapterCommands._create_adapter,
    "drop_adapter": AdapterCommands._drop_adapter,
    "save_state": AdapterCommands._save_state,
    "load_state": AdapterCommands._load_state,
    "publish_snapshot": AdapterCommands._publish_snapshot,
    "export_merged": AdapterCommands._export_merged,
}
_OF_ADAPTERS = (_ONE_UNIT.keys() | {"forward_backward", "optim_step"}) - {"export_merged"}
