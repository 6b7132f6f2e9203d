"""The seam between the control plane and device workers, wherever they run.

Ownership: whoever called `Backend.start_worker` owns the `Worker` and must `stop` it. A `Worker` owns the worker
process, the connection to it and the ids of its commands; the process owns the base model, the adapters and the
snapshots, and loses them when it ends. Nothing restarts a worker by itself: its owner hears of the end through
`on_exit` and starts another. Everything here belongs to one event loop.
"""

from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from opentinker_client.wire.v1 import error_pb2
from opentinker_server.workers.config import WorkerConfig
from opentinker_server.workers.v1 import worker_pb2


@dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """How a worker process ended."""

    code: int
    """Exit code; the negative signal number when a signal ended it."""

    stderr_tail: tuple[str, ...]
    """Its last lines on standard error, oldest first."""

    requested: bool
    """Whether `Worker.stop` was called before."""

    def describe(self) -> str:
        """One line for people, without the error output."""
        how = f"was ended by signal {-self.code}" if self.code < 0 else f"ended with exit code {self.code}"
        return f"The device worker {how}{', as requested' if self.requested else ''}."


class WorkerError(Exception):
    """The worker answered with an error: the command was not applied, the worker goes on.

    `error_info` has every field but `request_id`, which the control plane adds. `Worker.cancel` ends a command
    with reason CANCELLED, the end of the worker by `Worker.stop` with UNAVAILABLE.
    """

    def __init__(self, error_info: error_pb2.ErrorInfo) -> None:
        super().__init__(error_info)
        self.error_info = error_info

    def __str__(self) -> str:
        return self.error_info.message


class WorkerDied(Exception):
    """The worker process has ended; whether the command was applied is unknown, and its state is gone."""

    def __init__(self, exit: WorkerExit) -> None:
        super().__init__(exit)
        self.exit = exit

    def __str__(self) -> str:
        return "\n".join((self.exit.describe(), *self.exit.stderr_tail))


class Worker(Protocol):
    """One device worker that has loaded its base model.

    Commands reach the worker in the order in which they are first awaited. Those of one adapter are carried out in
    that order, one at a time; those of different adapters, and sampling, run interleaved.
    """

    ready: worker_pb2.Ready
    """What it serves."""

    def call(self, command: worker_pb2.WorkerCommand) -> Coroutine[Any, Any, worker_pb2.WorkerReply]:
        """Sends a command when awaited, and returns its final reply; replies before it are dropped.

        `command.command_id` must be 0; a fresh one is filled in at once, before anything is awaited. Cancelling the
        await cancels the command as `cancel` does, without waiting for it. Raises WorkerError, WorkerDied.
        """

    def stream(self, command: worker_pb2.WorkerCommand) -> AsyncGenerator[worker_pb2.WorkerReply, None]:
        """Sends a command at the first iteration; yields its replies as they come, the final one last.

        `command.command_id` as for `call`. Closing the generator early (`aclose`, or cancelling the iteration)
        cancels the command. Raises WorkerError in place of a final reply that is an error, WorkerDied.
        """

    async def cancel(self, command_id: int) -> None:
        """Cancels a command, if it can still be: its `call` or `stream` then raises WorkerError CANCELLED.

        A sampling request stops within one step; any other command is removed if it has not begun, and finished if
        it has. Returns when the worker has seen it. Unknown and ended ids are ignored. Raises WorkerDied.
        """

    async def stop(self) -> None:
        """Ends the worker after its running unit of work, by force if that takes too long; idempotent.

        Unfinished commands end with WorkerError UNAVAILABLE or WorkerDied. Returns when the process has ended and
        the callbacks of `on_exit` have run.
        """

    def on_exit(self, callback: Callable[[WorkerExit], None]) -> None:
        """Has `callback` called once, on the event loop, when the process has ended for whatever reason.

        Unfinished commands have been told by then. Called at the loop's next turn if it has ended already.
        """


class Backend(Protocol):
    """Starts device workers: as local processes, or on other machines."""

    async def start_worker(self, config: WorkerConfig) -> Worker:
        """Starts a worker and waits until its base model is loaded, which may include fetching it.

        Cancelling the wait ends the process. Raises WorkerError when the worker cannot start, with its own words
        (FAILED_PRECONDITION: unknown model, bad directory), WorkerDied when it ended without a word.
        """
