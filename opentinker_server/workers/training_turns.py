"""Training work: one FIFO of commands per adapter, the adapters side by side, calls of many adapters in one pass."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from opentinker_server.training.call import TrainingCall
from opentinker_server.workers.adapter_commands import AdapterCommands
from opentinker_server.workers.errors import is_device_fault
from opentinker_server.workers.fair_share import FairShare
from opentinker_server.workers.v1 import worker_pb2

Outcome = int | worker_pb2.WorkerReply | Exception
"""What a unit meant for a command: datums done so far, the reply that ends it, or why it failed."""


@dataclass(kw_only=True, eq=False)
class _Item:
    """A command in its adapter's order."""

    command: worker_pb2.WorkerCommand
    queue: str
    call: TrainingCall | None = None
    """Of a forward_backward that has begun."""

    @property
    def kind(self) -> str | None:
        return self.command.WhichOneof("command")


class TrainingTurns:
    """Runs a unit at a time, so that each adapter gets an equal part of the training time.

    The forward and forward_backward calls at the heads of the queues, up to each adapter's next other command, share
    a pass as far as its row budget goes; optimizer steps at the heads are one fused operation.
    """

    def __init__(self, commands: AdapterCommands, *, max_rows: int, deterministic: bool) -> None:
        """max_rows: token rows of a pass. deterministic: every call has its passes alone."""
        self._commands = commands
        self._max_rows = max_rows
        self._deterministic = deterministic
        self._queues: dict[str, deque[_Item]] = {}
        self._shares = FairShare()
        self.num_passes = 0
        """Passes over the model so far."""

    def __bool__(self) -> bool:
        """Whether there is anything to run."""
        return bool(self._queues)

    def __len__(self) -> int:
        """Unfinished commands."""
        return sum(map(len, self._queues.values()))

    def add(self, command: worker_pb2.WorkerCommand, queue: str) -> None:
        """Puts a command behind those of its adapter; `queue` is its `adapter_commands.queue_of`."""
        self._queues.setdefault(queue, deque()).append(_Item(command=command, queue=queue))

    def wants_company(self, num_live: int) -> bool:
        """Whether the next pass has room for calls of adapters, of `num_live` in all, that have none waiting."""
        waiting = [queue[0] for queue in self._queues.values()]
        rows = sum(
            len(datum.model_input.chunks[0].text.tokens) // 4
            for item in waiting
            for datum in item.command.forward_backward.data
            if datum.model_input.chunks
        )
        calls_only = all(item.kind == "forward_backward" for item in waiting)
        return calls_only and not self._deterministic and 0 < len(waiting) < num_live and rows < self._max_rows // 2

    def run(self) -> list[tuple[int, Outcome]]:
        """One unit: the command ids that it concerned, with what it meant for them. Needs work."""
        started = time.perf_counter()
        order = self._shares.order(list(self._queues))
        first = self._queues[order[0]][0]
        outcomes: list[tuple[_Item, Outcome]]
        if first.kind == "forward_backward":
            outcomes = self._pass(order)
        elif first.kind == "optim_step":
            heads = [self._queues[name][0] for name in order]
            outcomes = self._optim_steps([item for item in heads if item.kind == "optim_step"])
        else:
            outcomes = [(first, _outcome(self._commands.run, first.command))]
        self._charge([item for item, _ in outcomes], time.perf_counter() - started)
        for item, outcome in outcomes:
            if not isinstance(outcome, int):
                self._take_out(item)
        return [(item.command.command_id, outcome) for item, outcome in outcomes]

    def cancel(self, command_id: int) -> bool:
        """Takes a command out before its next unit, nothing of it applied; False when there is none."""
        for queue in self._queues.values():
            for item in queue:
                if item.command.command_id == command_id:
                    self._take_out(item)
                    return True
        return False

    def drain(self) -> list[int]:
        """Empties the queues, nothing of what had begun applied; the ids of all commands."""
        items = [item for queue in self._queues.values() for item in queue]
        self._queues.clear()
        return [item.command.command_id for item in items]

    def _pass(self, order: Sequence[str]) -> list[tuple[_Item, Outcome]]:
        outcomes: list[tuple[_Item, Outcome]] = []
        together: list[tuple[_Item, TrainingCall]] = []
        room = self._max_rows
        for item in self._leading_calls(order):
            if item.call is None:
                try:
                    item.call = self._commands.begin(item.command)
                except Exception as error:
                    outcomes.append((item, error))
                    continue
            if together and item.call.next_rows > room:
                continue
            together.append((item, item.call))
            room -= item.call.next_rows
            if self._deterministic or room <= 0:
                break
        if together:
            outcomes += self._run_together(together)
        return outcomes

    def _leading_calls(self, order: Sequence[str]) -> list[_Item]:
        """Calls that no other command comes before, all with a backward pass or all without."""
        forward_only = self._queues[order[0]][0].command.forward_backward.forward_only
        found = []
        for name in order:
            for item in self._queues[name]:
                if item.kind != "forward_backward" or item.command.forward_backward.forward_only != forward_only:
                    break
                found.append(item)
        return found

    def _run_together(self, together: Sequence[tuple[_Item, TrainingCall]]) -> list[tuple[_Item, Outcome]]:
        try:
            self.num_passes += 1
            self._commands.run_calls([call for _, call in together])
        except Exception as error:
            if len(together) == 1 or is_device_fault(error):
                return [(item, error) for item, _ in together]
            # One of them is to blame, and nothing was applied: each for itself.
            return [outcome for pair in together for outcome in self._run_together([pair])]
        return [
            (item, _outcome(self._commands.finish, call) if call.is_done else call.num_done) for item, call in together
        ]

    def _optim_steps(self, items: Sequence[_Item]) -> list[tuple[_Item, Outcome]]:
        return list(zip(items, self._commands.optim_steps([item.command for item in items]), strict=True))

    def _charge(self, items: Sequence[_Item], seconds: float) -> None:
        rows = [max(1, item.call.num_tokens) if item.call is not None else 1 for item in items]
        for item, own in zip(items, rows, strict=True):
            self._shares.charge(item.queue, seconds * own / sum(rows))

    def _take_out(self, item: _Item) -> None:
        queue = self._queues[item.queue]
        queue.remove(item)
        if queue:
            return
        del self._queues[item.queue]
        if not self._queues:
            self._shares.rest()
        if item.kind == "drop_adapter":
            self._shares.forget(item.queue)


def _outcome(function, argument) -> Outcome:  # type: ignore[no-untyped-def]
    try:
        return function(argument)
    except Exception as error:
        return error
