"""Device workers as child processes of the control plane, one socket pair each."""

import asyncio
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

from google.protobuf.message import DecodeError

from opentinker_server.backends.base import WorkerDied, WorkerError, WorkerExit
from opentinker_server.workers.config import WorkerConfig
from opentinker_server.workers.frames import encode_frame, read_frame
from opentinker_server.workers.v1 import worker_pb2

log = logging.getLogger(__name__)
worker_log = logging.getLogger("opentinker_server.worker_output")

_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
"""glibc keeps freed activations instead of giving their pages back and asking for zeroed ones again at each
operation; measured 5 % of a training step."""
_READY_COMMAND_ID = 0
_TAIL_LINES = 20
_MAX_LINE_BYTES = 16384
_TERMINATE_TIMEOUT_S = 5.0
"""Between SIGTERM and SIGKILL, and between the end of the connection and SIGKILL."""
_OUTPUT_TIMEOUT_S = 1.0
"""For the rest of the output of a process that has ended; a grandchild may hold the pipe open."""


class LocalBackend:
    """Starts workers with this interpreter. Implements `base.Backend`."""

    def __init__(self, *, stop_timeout_s: float = 30.0, answer_timeout_s: float = 60.0) -> None:
        """stop_timeout_s: how long a running unit of work may take to end before `stop` uses force.

        answer_timeout_s: a process that does not answer a ping for so long has hung, and is killed.
        """
        self._stop_timeout_s = stop_timeout_s
        self._answer_timeout_s = answer_timeout_s

    async def start_worker(self, config: WorkerConfig) -> "LocalWorker":
        """Starts a worker and waits until its base model is loaded; see `base.Backend`."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                # -P: files in the current directory must not shadow the worker's imports.
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "opentinker_server.workers.main", "--fd", str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    env={**_ALLOCATOR, **os.environ},
                )
        except BaseException:
            ours.close()
            raise
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = LocalWorker(process, reader, writer, stop_timeout_s=self._stop_timeout_s)
        await worker.start(config)
        worker.watch(self._answer_timeout_s)
        return worker


class LocalWorker:
    """A worker process of this machine. Implements `base.Worker`."""

    ready: worker_pb2.Ready

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        stop_timeout_s: float,
    ) -> None:
        """Made by `LocalBackend.start_worker`."""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._stop_timeout_s = stop_timeout_s
        self._next_command_id = _READY_COMMAND_ID + 1
        self._pending: dict[int, asyncio.Queue[worker_pb2.WorkerReply | None]] = {}
        self._callbacks: list[Callable[[WorkerExit], None]] = []
        self._output_tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._stop_requested = False
        self._exit: WorkerExit | None = None
        self._ended = asyncio.Event()
        self._supervision = asyncio.create_task(self._supervise())
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def start(self, config: WorkerConfig) -> None:
        """Sends the configuration and waits for `ready`; the process has ended when this raises."""
        replies = self._pending[_READY_COMMAND_ID] = asyncio.Queue()
        self._writer.write(encode_frame(config.to_json().encode()))
        try:
            reply = await replies.get()
        except asyncio.CancelledError:
            self._signal(self._process.kill)
            await self._ended.wait()
            raise
        finally:
            del self._pending[_READY_COMMAND_ID]
        if reply is None:
            raise self._died()
        if reply.HasField("error"):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _TERMINATE_TIMEOUT_S)
            await self.stop()
            raise WorkerError(reply.error)
        self.ready = reply.ready

    def watch(self, answer_timeout_s: float) -> None:
        """From now on, kill the process once it leaves a ping unanswered for so long."""
        self._watch = asyncio.create_task(self._ping(answer_timeout_s))

    def call(self, command: worker_pb2.WorkerCommand) -> Coroutine[Any, Any, worker_pb2.WorkerReply]:
        """See `base.Worker`."""
        return _last(self.stream(command))

    def stream(self, command: worker_pb2.WorkerCommand) -> AsyncGenerator[worker_pb2.WorkerReply, None]:
        """See `base.Worker`."""
        assert command.command_id == 0, "a command is sent once"
        command.command_id = self._take_command_id()
        return self._replies(command)

    async def cancel(self, command_id: int) -> None:
        """See `base.Worker`."""
        await self.call(worker_pb2.WorkerCommand(cancel=worker_pb2.Cancel(command_id=command_id)))

    async def stop(self) -> None:
        """See `base.Worker`."""
        self._stop_requested = True
        shutdown = worker_pb2.WorkerCommand(command_id=self._take_command_id(), shutdown=worker_pb2.Shutdown())
        steps: list[tuple[Callable[[], None], float | None]] = [
            (lambda: self._write(shutdown), self._stop_timeout_s),
            (self._process.terminate, _TERMINATE_TIMEOUT_S),
            (self._process.kill, None),
        ]
        for act, timeout_s in steps:
            if not self._ended.is_set():
                self._signal(act)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), timeout_s)

    def on_exit(self, callback: Callable[[WorkerExit], None]) -> None:
        """See `base.Worker`."""
        if self._exit is None:
            self._callbacks.append(callback)
        else:
            asyncio.get_running_loop().call_soon(callback, self._exit)

    async def _replies(self, command: worker_pb2.WorkerCommand) -> AsyncGenerator[worker_pb2.WorkerReply, None]:
        if self._exit is not None:
            raise self._died()
        replies = self._pending[command.command_id] = asyncio.Queue()
        done = False
        try:
            self._write(command)
            # The process may end at any time; that is told by the queue.
            with suppress(ConnectionError):
                await self._writer.drain()
            while not done:
                reply = await replies.get()
                done = reply is None or reply.final
                if reply is None:
                    raise self._died()
                if reply.HasField("error"):
                    raise WorkerError(reply.error)
                yield reply
        finally:
            del self._pending[command.command_id]
            if not done:
                cancel = worker_pb2.Cancel(command_id=command.command_id)
                self._write(worker_pb2.WorkerCommand(command_id=self._take_command_id(), cancel=cancel))

    def _write(self, command: worker_pb2.WorkerCommand) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode_frame(command.SerializeToString()))

    def _take_command_id(self) -> int:
        command_id = self._next_command_id
        self._next_command_id += 1
        return command_id

    def _died(self) -> WorkerDied:
        assert self._exit is not None
        return WorkerDied(self._exit)

    def _signal(self, act: Callable[[], None]) -> None:
        with suppress(ProcessLookupError):
            act()

    async def _ping(self, answer_timeout_s: float) -> None:
        while not self._ended.is_set():
            try:
                async with asyncio.timeout(answer_timeout_s):
                    await self.call(worker_pb2.WorkerCommand(ping=worker_pb2.Ping()))
            except TimeoutError:
                log.error("worker %d has not answered for %g s; it is killed", self.pid, answer_timeout_s)
                self._signal(self._process.kill)
                return
            except (WorkerDied, WorkerError):
                return
            await asyncio.sleep(answer_timeout_s / 4)

    async def _supervise(self) -> None:
        """From the start of the process to its end."""
        output = asyncio.create_task(self._read_output())
        try:
            await self._dispatch()
        except DecodeError:
            log.exception("worker %d sent what is no reply; it is ended", self.pid)
        self._writer.close()
        code = await self._wait_for_process()
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.wait([output], timeout=_OUTPUT_TIMEOUT_S)
        output.cancel()
        self._exit = WorkerExit(code=code, stderr_tail=tuple(self._output_tail), requested=self._stop_requested)
        log.log(
            logging.INFO if self._stop_requested else logging.ERROR, "worker %d: %s", self.pid, self._exit.describe()
        )
        for replies in self._pending.values():
            replies.put_nowait(None)
        # In this order, at the loop's next turn; a callback that raises must not keep the others from running.
        loop = asyncio.get_running_loop()
        for callback in self._callbacks:
            loop.call_soon(callback, self._exit)
        loop.call_soon(self._ended.set)

    async def _dispatch(self) -> None:
        """Hands replies to whoever waits for them, until the connection ends."""
        while (payload := await read_frame(self._reader)) is not None:
            reply = worker_pb2.WorkerReply.FromString(payload)
            if (replies := self._pending.get(reply.command_id)) is not None:
                replies.put_nowait(reply)

    async def _wait_for_process(self) -> int:
        """Exit code of a process that has closed its connection, by force if it does not end by itself."""
        try:
            return await asyncio.wait_for(self._process.wait(), _TERMINATE_TIMEOUT_S)
        except TimeoutError:
            self._signal(self._process.kill)
            return await self._process.wait()

    async def _read_output(self) -> None:
        """Copies the process's output to the log, keeping the last lines."""
        assert self._process.stdout is not None
        partial = b""
        level = logging.INFO
        while chunk := await self._process.stdout.read(_MAX_LINE_BYTES):
            *lines, partial = (partial + chunk).split(b"\n")
            if len(partial) > _MAX_LINE_BYTES:
                lines, partial = [*lines, partial], b""
            for line in lines:
                level = self._log_line(line, level)
        if partial:
            self._log_line(partial, level)

    def _log_line(self, line: bytes, level: int) -> int:
        """Logs a line at the level it begins with, else, as in a traceback, at that of the line before."""
        text = line.decode(errors="replace").rstrip()
        self._output_tail.append(text)
        level = logging.getLevelNamesMapping().get(text.split(" ", 1)[0], level)
        worker_log.log(level, "%s", text, extra={"worker_pid": self.pid})
        return level


async def _last(replies: AsyncGenerator[worker_pb2.WorkerReply, None]) -> worker_pb2.WorkerReply:
    async with aclosing(replies):
        async for reply in replies:
            if reply.final:
                return reply
    raise AssertionError("the last reply of a command is final")
