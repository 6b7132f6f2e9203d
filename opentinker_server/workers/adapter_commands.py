"""Commands that are carried out in units: those of adapters, and exports.

A command is a generator: each `next` is one unit of device work, between which the loop does other things; it
yields the number of datums done and returns the reply.
"""

import logging
from collections.abc import Callable, Generator
from pathlib import Path

from opentinker_client.wire.v1 import operation_pb2
from opentinker_server.models.base import BaseModel
from opentinker_server.models.peft_adapter import merge_into_base
from opentinker_server.sampler.base import SamplerBackend
from opentinker_server.training.errors import TrainingError
from opentinker_server.training.state_files import content_hash, read_weights
from opentinker_server.training.trainer import Trainer
from opentinker_server.workers import codec
from opentinker_server.workers.v1 import worker_pb2

log = logging.getLogger(__name__)

Units = Generator[int, None, worker_pb2.WorkerReply]

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

    def start(self, command: worker_pb2.WorkerCommand) -> Units:
        """The units of a command for which `queue_of` is not None.

        They raise TrainingError or SamplingError when the command is refused. Any other exception is a fault, after
        which the adapter is as before the command or, where that cannot be known, lost.
        """
        kind = command.WhichOneof("command")
        body = getattr(command, kind)
        adapter_id = queue_of(command)
        if adapter_id in self._lost and kind != "drop_adapter":
            raise TrainingError(
                f"The live state of adapter {adapter_id} was lost in a fault; drop it and reload a checkpoint.",
                reason="STATE_LOST",
                field=adapter_id or "",
            )
        if kind == "forward_backward":
            reply = yield from self._forward_backward(body)
        else:
            reply = _ONE_UNIT[kind](self, body)
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

    def _forward_backward(self, body: worker_pb2.ForwardBackward) -> Units:
        data = [codec.decode_datum(datum, datum_index=index) for index, datum in enumerate(body.data)]
        units = self._trainer.forward_backward(
            body.adapter_id,
            data,
            body.loss_fn,
            codec.decode_loss_config(body.loss_fn_config),
            backward=not body.forward_only,
        )
        while True:
            try:
                num_done = next(units)
            except StopIteration as end:
                output = end.value
                break
            # The result follows the last micro-batch at once.
            if num_done < len(data):
                yield num_done
        num_tokens = sum(len(datum.tokens) for datum in data)
        if body.forward_only:
            self.num_tokens_scored += num_tokens
        else:
            self.num_tokens_trained += num_tokens
        return worker_pb2.WorkerReply(forward_backward=codec.encode_forward_backward(output))

    def _optim_step(self, body: worker_pb2.OptimStep) -> worker_pb2.WorkerReply:
        try:
            metrics = self._trainer.optim_step(body.adapter_id, codec.decode_adam(body.adam))
        except TrainingError:
            raise
        except Exception as error:
            # Weights and moments change in place: a step that broke off may have changed some of them.
            self._lose(body.adapter_id)
            log.exception("optimizer step of adapter %s broke off; its state is lost", body.adapter_id)
            raise TrainingError(
                f"The optimizer step broke off ({type(error).__name__}); the live state of the adapter is lost: drop "
                "it and reload a checkpoint.",
                reason="STATE_LOST",
                field=body.adapter_id,
            ) from error
        return worker_pb2.WorkerReply(optim_step=operation_pb2.OptimStepResult(metrics=metrics))

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

    def _lose(self, adapter_id: str) -> None:
        self._trainer.drop_adapter(adapter_id)
        self._live.remove(adapter_id)
        self._lost.add(adapter_id)


def _done() -> worker_pb2.WorkerReply:
    return worker_pb2.WorkerReply(done=worker_pb2.Done())


_ONE_UNIT: dict[str, Callable[..., worker_pb2.WorkerReply]] = {
    "create_adapter": AdapterCommands._create_adapter,
    "drop_adapter": AdapterCommands._drop_adapter,
    "optim_step": AdapterCommands._optim_step,
    "save_state": AdapterCommands._save_state,
    "load_state": AdapterCommands._load_state,
    "publish_snapshot": AdapterCommands._publish_snapshot,
    "export_merged": AdapterCommands._export_merged,
}
_OF_ADAPTERS = (_ONE_UNIT.keys() | {"forward_backward"}) - {"export_merged"}
