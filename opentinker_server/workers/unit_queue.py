"""Commands waiting for the trainer: one FIFO per adapter, the adapters side by side."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from opentinker_server.workers.adapter_commands import Units
from opentinker_server.workers.fair_share import FairShare
from opentinker_server.workers.v1 import worker_pb2


@dataclass(kw_only=True)
class QueuedCommand:
    """A command in its adapter's order."""

    command: worker_pb2.WorkerCommand
    queue: str
    """The adapter, or `adapter_commands.NO_ADAPTER`."""

    units: Units | None = None
    """What is left of it; None before it begins."""


class UnitQueue:
    """Picks the adapter that runs its next unit, so that each gets an equal part of the training time."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[QueuedCommand]] = {}
        self._shares = FairShare()

    def __bool__(self) -> bool:
        """Whether there is anything to run."""
        return bool(self._queues)

    def __len__(self) -> int:
        """Unfinished commands."""
        return sum(map(len, self._queues.values()))

    def add(self, command: worker_pb2.WorkerCommand, queue: str) -> None:
        """Puts a command behind those of its adapter."""
        self._queues.setdefault(queue, deque()).append(QueuedCommand(command=command, queue=queue))

    def pick(self, start: Callable[[worker_pb2.WorkerCommand], Units]) -> tuple[QueuedCommand, Units]:
        """The command whose next unit is due, begun with `start` if it was not. Needs a non-empty queue."""
        item = self._queues[self._shares.pick(list(self._queues))][0]
        if item.units is None:
            item.units = start(item.command)
        return item, item.units

    def charge(self, item: QueuedCommand, seconds: float) -> None:
        """Accounts for the time of a unit."""
        self._shares.charge(item.queue, seconds)

    def finish(self, item: QueuedCommand) -> None:
        """Takes a picked command out: it has ended."""
        assert self._queues[item.queue][0] is item
        self._queues[item.queue].popleft()
        if not self._queues[item.queue]:
            self._forget_queue(item.queue)
            if item.command.WhichOneof("command") == "drop_adapter":
                self._shares.forget(item.queue)

    def remove(self, command_id: int) -> bool:
        """Takes out a command that has not begun; False when there is none."""
        for name, queue in self._queues.items():
            for item in queue:
                if item.command.command_id == command_id and item.units is None:
                    queue.remove(item)
                    if not queue:
                        self._forget_queue(name)
                    return True
        return False

    def drain(self) -> list[worker_pb2.WorkerCommand]:
        """Empties the queue; what has begun is broken off, its adapter as before."""
        items = [item for queue in self._queues.values() for item in queue]
        for item in items:
            if item.units is not None:
                item.units.close()
        self._queues.clear()
        return [item.command for item in items]

    def _forget_queue(self, name: str) -> None:
        del self._queues[name]
        if not self._queues:
            self._shares.rest()
