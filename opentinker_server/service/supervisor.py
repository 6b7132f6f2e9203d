"""Keeps one device worker running and translates its failures.

When the worker dies, everything that lived in it is gone: `on_lost` is told before a new one is started. Calls made
while no worker is up fail with UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable

from opentinker_server.backends.base import Backend, Worker, WorkerDied, WorkerError, WorkerExit
from opentinker_server.scheduler.errors import ServiceError
from opentinker_server.workers.config import WorkerConfig
from opentinker_server.workers.v1 import worker_pb2

logger = logging.getLogger(__name__)

_RESTART_DELAYS_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)


class WorkerSupervisor:
    """The worker as the services see it. Used from the event loop only."""

    def __init__(self, backend: Backend, config: WorkerConfig):
        self.generation = 0
        """Grows by one each time a worker's state is lost."""
        self.on_lost: list[Callable[[], None]] = []
        self._backend = backend
        self._config = config
        self._worker: Worker | None = None
        self._ready: worker_pb2.Ready | None = None
        self._restart: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Start the first worker. Raises ServiceError when it cannot start."""
        try:
            await self._start_worker()
        except (WorkerError, WorkerDied) as error:
            raise ServiceError("FAILED_PRECONDITION", f"the device worker did not start: {error}") from error

    async def stop(self) -> None:
        """End the worker; it is not restarted."""
        self._stopping = True
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        if self._worker is not None:
            await self._worker.stop()

    @property
    def ready(self) -> worker_pb2.Ready:
        """What the worker serves; known once the first one was up."""
        assert self._ready is not None
        return self._ready

    @property
    def is_up(self) -> bool:
        """Whether a worker takes commands now."""
        return self._worker is not None

    async def call(self, command: worker_pb2.WorkerCommand) -> worker_pb2.WorkerReply:
        """One command and its final reply. Raises ServiceError."""
        worker = self._current()
        try:
            return await worker.call(command)
        except WorkerError as error:
            raise ServiceError.of(error.error_info) from error
        except WorkerDied as error:
            raise self._died(worker, error.exit) from error

    async def stream(self, command: worker_pb2.WorkerCommand) -> AsyncIterator[worker_pb2.WorkerReply]:
        """The replies of one command as they come; closing the iteration cancels it. Raises ServiceError."""
        worker = self._current()
        replies = worker.stream(command)
        try:
            async for reply in replies:
                yield reply
        except WorkerError as error:
            raise ServiceError.of(error.error_info) from error
        except WorkerDied as error:
            raise self._died(worker, error.exit) from error
        finally:
            await replies.aclose()

    async def cancel(self, command: worker_pb2.WorkerCommand) -> None:
        """Asks for a command that was sent to be broken off; its own reply tells whether it was."""
        worker = self._worker
        if worker is not None and command.command_id:
            with contextlib.suppress(WorkerError, WorkerDied):
                await worker.cancel(command.command_id)

    def _current(self) -> Worker:
        if self._worker is None:
            raise ServiceError("UNAVAILABLE", "the device worker is restarting; try again in some seconds")
        return self._worker

    def _died(self, worker: Worker, exit: WorkerExit) -> ServiceError:
        """Whoever is told of the end first makes it known, so that nothing more is sent to what is gone."""
        self._on_exit(worker, exit)
        return ServiceError("UNAVAILABLE", "the device worker died during the call; it is being restarted")

    async def _start_worker(self) -> None:
        worker = await self._backend.start_worker(self._config)
        self._worker, self._ready = worker, worker.ready
        worker.on_exit(functools.partial(self._on_exit, worker))

    def _on_exit(self, worker: Worker, exit: WorkerExit) -> None:
        if self._worker is not worker:
            return
        self._worker = None
        self.generation += 1
        if self._stopping:
            return
        logger.error("device worker lost: %s", exit.describe(), extra={"stderr_tail": list(exit.stderr_tail)})
        for callback in self.on_lost:
            callback()
        self._restart = asyncio.create_task(self._restart_worker())

    async def _restart_worker(self) -> None:
        attempt = 0
        while True:
            await asyncio.sleep(_RESTART_DELAYS_S[min(attempt, len(_RESTART_DELAYS_S) - 1)])
            try:
                await self._start_worker()
            except (WorkerError, WorkerDied) as error:
                attempt += 1
                logger.error("device worker did not restart: %s", error)
            else:
                logger.info("device worker restarted")
                return
