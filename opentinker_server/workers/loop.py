"""The worker's loop: one thread that does all device work, a unit at a time."""

import logging
import queue
import time
from collections.abc import Callable
from pathlib import Path

from opentinker_client.wire.v1 import error_pb2
from opentinker_server.models.base import BaseModel, ModelInfo
from opentinker_server.sampler.base import Delta, Failed, SampleEvent, SamplerBackend, SamplingError
from opentinker_server.training.state_files import read_weights
from opentinker_server.training.trainer import Trainer
from opentinker_server.workers import codec
from opentinker_server.workers.adapter_commands import AdapterCommands, queue_of
from opentinker_server.workers.config import WorkerConfig
from opentinker_server.workers.errors import DeviceFault, is_device_fault, is_expected, make_error_info, to_error_info
from opentinker_server.workers.fair_share import FairShare
from opentinker_server.workers.stats import resident_bytes
from opentinker_server.workers.training_turns import TrainingTurns
from opentinker_server.workers.v1 import worker_pb2

log = logging.getLogger(__name__)

_GATHER_GAP_S = 0.005
_GATHER_S = 0.05
"""An idle loop waits for company of a training call while commands arrive within the gap, so long in all."""
TRAINING = "training"
SAMPLING = "sampling"

Inbox = queue.SimpleQueue[worker_pb2.WorkerCommand | None]
"""Commands as they arrive; None asks the loop to end after the running unit."""


class WorkerLoop:
    """Runs commands: training and sampling in turns by weighted fair share of time, all others on arrival."""

    def __init__(
        self,
        *,
        base: BaseModel,
        trainer: Trainer,
        sampler: SamplerBackend,
        config: WorkerConfig,
        inbox: Inbox,
        send: Callable[[worker_pb2.WorkerReply], None],
    ) -> None:
        """send: delivers a reply; called by the loop's thread only."""
        self._base = base
        self._sampler = sampler
        self._inbox = inbox
        self._send = send
        self._commands = AdapterCommands(base=base, trainer=trainer, sampler=sampler)
        self._training = TrainingTurns(
            self._commands,
            max_rows=trainer.max_rows(),
            deterministic=config.deterministic,
        )
        self._sampling: set[int] = set()
        self._shares = FairShare({TRAINING: config.training_weight, SAMPLING: config.sampling_weight})
        self._seconds = {TRAINING: 0.0, SAMPLING: 0.0}
        self._shutdowns: list[int] = []
        self._ending = False

    @property
    def model_info(self) -> ModelInfo:
        """What the base model is."""
        return self._base.info

    def run(self) -> None:
        """Returns when asked to end. Raises DeviceFault, with every command answered, when the device has failed."""
        try:
            while not self._ending:
                self._receive()
                if not self._ending:
                    self._run_unit()
        finally:
            self._refuse_unfinished()
        for command_id in self._shutdowns:
            self._finish(command_id, worker_pb2.WorkerReply(done=worker_pb2.Done()))

    def _receive(self) -> None:
        """Takes in what has arrived; waits when there is nothing else to do."""
        if not self._work():
            self._shares.rest()
            self._accept(self._inbox.get())
            self._gather()
        for _ in range(self._inbox.qsize()):
            self._accept(self._inbox.get_nowait())

    def _gather(self) -> None:
        """Calls of other adapters that come a moment later share the pass of the first."""
        until = time.monotonic() + _GATHER_S
        while self._training.wants_company(self._commands.num_live) and self._work() == [TRAINING]:
            try:
                self._accept(self._inbox.get(timeout=min(_GATHER_GAP_S, max(until - time.monotonic(), 0))))
            except queue.Empty:
                return

    def _work(self) -> list[str]:
        has_work = {TRAINING: bool(self._training), SAMPLING: self._sampler.has_work()}
        return [kind for kind, waiting in has_work.items() if waiting]

    def _accept(self, command: worker_pb2.WorkerCommand | None) -> None:
        if command is None:
            self._ending = True
            return
        kind = command.WhichOneof("command")
        adapter = queue_of(command)
        if kind == "shutdown":
            self._ending = True
            self._shutdowns.append(command.command_id)
        elif adapter is not None:
            self._training.add(command, adapter)
        else:
            try:
                reply = self._run_on_arrival(kind, command)
            except Exception as error:
                self._fail([command.command_id], error)
            else:
                if reply is not None:
                    self._finish(command.command_id, reply)

    def _run_on_arrival(self, kind: str, command: worker_pb2.WorkerCommand) -> worker_pb2.WorkerReply | None:
        """None when the command goes on."""
        match kind:
            case "sample":
                task = codec.decode_sample(command.sample, task_id=command.command_id, info=self._base.info)
                self._sampler.add(task)
                self._sampling.add(command.command_id)
                return None
            case "cancel":
                self._cancel(command.cancel.command_id)
            case "load_snapshot":
                self._load_snapshot(command.load_snapshot)
            case "drop_snapshot":
                self._sampler.drop_snapshot(command.drop_snapshot.snapshot_key)
            case "get_stats":
                return worker_pb2.WorkerReply(stats=worker_pb2.Stats(values=self._stats()))
            case _:
                raise ValueError(f"a command without content or of an unknown kind: {kind}")
        return worker_pb2.WorkerReply(done=worker_pb2.Done())

    def _run_unit(self) -> None:
        work = self._work()
        if not work:
            return
        kind = self._shares.pick(work)
        started = time.perf_counter()
        if kind == TRAINING:
            self._training_unit()
        else:
            self._sampling_step()
        seconds = time.perf_counter() - started
        self._shares.charge(kind, seconds)
        self._seconds[kind] += seconds

    def _training_unit(self) -> None:
        failed: dict[Exception, list[int]] = {}
        for command_id, outcome in self._training.run():
            if isinstance(outcome, int):
                self._send(worker_pb2.WorkerReply(command_id=command_id, datums_done=outcome))
            elif isinstance(outcome, Exception):
                failed.setdefault(outcome, []).append(command_id)
            else:
                self._finish(command_id, outcome)
        for error, command_ids in failed.items():
            self._fail(command_ids, error)

    def _sampling_step(self) -> None:
        try:
            events = self._sampler.step()
        except Exception as error:
            # Which of the requests is to blame is unknown: all of them end, none gets tokens of a broken step.
            failed = sorted(self._sampling)
            for command_id in failed:
                self._sampler.cancel(command_id)
            self._sampling.clear()
            self._fail(failed, error)
            return
        for event in events:
            self._report(event)

    def _report(self, event: SampleEvent) -> None:
        if isinstance(event, Delta):
            self._send(worker_pb2.WorkerReply(command_id=event.task_id, sample_delta=codec.encode_delta(event)))
            return
        self._sampling.remove(event.task_id)
        if isinstance(event, Failed):
            self._fail([event.task_id], event.error)
        else:
            self._finish(event.task_id, worker_pb2.WorkerReply(sample=codec.encode_sample(event.output)))

    def _cancel(self, command_id: int) -> None:
        if command_id in self._sampling:
            self._sampler.cancel(command_id)
            self._sampling.remove(command_id)
        elif not self._training.cancel(command_id):
            return
        self._finish_with_error(command_id, make_error_info("CANCELLED", "Cancelled before it was done."))

    def _load_snapshot(self, body: worker_pb2.LoadSnapshot) -> None:
        if self._sampler.has_snapshot(body.snapshot_key):
            return
        if not body.sha256:
            raise SamplingError("sha256 of the snapshot is missing", reason="INVALID_ARGUMENT", field="sha256")
        weights = read_weights(Path(body.directory), base=self._base, sha256=body.sha256)
        self._sampler.add_snapshot(body.snapshot_key, weights)

    def _stats(self) -> dict[str, float]:
        values: dict[str, float] = {
            "adapters": self._commands.num_live,
            "commands_waiting": len(self._training),
            "training_passes": self._training.num_passes,
            "tokens_trained": self._commands.num_tokens_trained,
            "tokens_scored": self._commands.num_tokens_scored,
            "training_seconds": self._seconds[TRAINING],
            "sampling_seconds": self._seconds[SAMPLING],
        }
        values |= {f"sampler_{name}": value for name, value in self._sampler.stats().items()}
        rss_bytes = resident_bytes()
        return values if rss_bytes is None else values | {"rss_bytes": rss_bytes}

    def _finish(self, command_id: int, reply: worker_pb2.WorkerReply) -> None:
        reply.command_id = command_id
        reply.final = True
        try:
            self._send(reply)
        except ValueError as error:
            self._fail([command_id], error)

    def _finish_with_error(self, command_id: int, error_info: error_pb2.ErrorInfo) -> None:
        self._send(worker_pb2.WorkerReply(command_id=command_id, final=True, error=error_info))

    def _fail(self, command_ids: list[int], error: Exception) -> None:
        """Answers the commands that `error` ended; the loop goes on unless the device has failed."""
        if not is_expected(error):
            log.error("commands %s failed", command_ids, exc_info=error)
        for command_id in command_ids:
            self._finish_with_error(command_id, to_error_info(error))
        if is_device_fault(error):
            raise DeviceFault(str(error)) from error

    def _refuse_unfinished(self) -> None:
        ended = make_error_info("UNAVAILABLE", "The device worker ended before the command was done.")
        for command_id in self._training.drain():
            self._finish_with_error(command_id, ended)
        for command_id in sorted(self._sampling):
            self._finish_with_error(command_id, ended)
        self._sampling.clear()
