"""One connection: a background thread with an event loop, and the gRPC channel that lives on it.

`Connection` is what clients hold; `Link` is what coroutines on the loop hold. When the last holder of a Connection is
gone, or at the end of the process, the session is closed, the channel too, and the thread ends. Threads and channels do
not survive a fork: a child process gets a clear error at once and makes a connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from importlib.metadata import version
from typing import Any, TypeVar

import grpc

from opentinker_client import types
from opentinker_client.exceptions import APIConnectionError, OpenTinkerError, SessionExpiredError
from opentinker_client.futures import APIFuture, ClientFuture
from opentinker_client.transport.retry import CONNECT_SECONDS, RECONNECT_SECONDS, to_exception, with_retries
from opentinker_client.wire import responses
from opentinker_client.wire.v1 import (
    operation_pb2,
    operation_pb2_grpc,
    registry_pb2_grpc,
    sampling_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    training_pb2_grpc,
)

T = TypeVar("T")
logger = logging.getLogger(__name__)

DEFAULT_ADDRESS = "127.0.0.1:8711"
MAX_RECEIVE_BYTES = 2**31 - 1
CALL_SECONDS = 60.0
FIRST_CALL_SECONDS = 4.0
"""Of a call to a server that never answered yet, so that an address that swallows everything is told in ten seconds."""
WAIT_SECONDS = 30.0
CLOSE_SECONDS = 2.0
KEEPALIVE_MS = 30_000
"""Agrees with the server, which refuses pings more often than every 10 s."""


def resolve_address(base_url: str | None) -> str:
    """host:port of a server: the argument, else OPENTINKER_BASE_URL, else TINKER_BASE_URL, else the default."""
    text = base_url or os.environ.get("OPENTINKER_BASE_URL") or os.environ.get("TINKER_BASE_URL") or DEFAULT_ADDRESS
    for scheme in ("grpc://", "http://"):
        text = text.removeprefix(scheme)
    text = text.rstrip("/")
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdigit():
        raise ValueError(f"base_url is {base_url or text!r}; expected HOST:PORT or grpc://HOST:PORT")
    return text


class ForkedProcessError(OpenTinkerError, RuntimeError):
    """A client was used in a child process made by fork; make a new ServiceClient there."""


class Link:
    """The channel with its stubs and session, on the background loop."""

    def __init__(self, address: str, loop: asyncio.AbstractEventLoop):
        self.address = address
        self.loop = loop
        self._channel: grpc.aio.Channel | None = None
        self._session: asyncio.Task[str] | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._info: types.GetServerCapabilitiesResponse | None = None
        self._session_error: SessionExpiredError | None = None
        self._reached = False
        self._tasks: set[asyncio.Task] = set()
        self.closed = False
        self.finishing: asyncio.Task[None] | None = None

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            if self.closed:
                raise APIConnectionError(f"the client of {self.address} is closed")
            options = [
                ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", 20_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.min_reconnect_backoff_ms", 5000),
                ("grpc.max_reconnect_backoff_ms", 2000),
            ]
            self._channel = grpc.aio.insecure_channel(self.address, options=options)
            self.sessions = session_pb2_grpc.SessionServiceStub(self._channel)
            self.training = training_pb2_grpc.TrainingServiceStub(self._channel)
            self.operations = operation_pb2_grpc.OperationServiceStub(self._channel)
            self.sampling = sampling_pb2_grpc.SamplingServiceStub(self._channel)
            self.registry = registry_pb2_grpc.RegistryServiceStub(self._channel)
        return self._channel

    def _retry_seconds(self) -> float:
        return RECONNECT_SECONDS if self._reached else CONNECT_SECONDS

    async def call(
        self, service: str, method: str, request: Any, *, timeout_s: float | None = CALL_SECONDS, retry: bool = True
    ) -> Any:
        """One unary call; `request` may be a function that makes the stream of a client-streaming call.

        Only a call that is idempotent may be retried.
        """
        self._open()

        async def send() -> Any:
            rpc = getattr(getattr(self, service), method)
            limit = timeout_s if timeout_s is None or self._reached else min(timeout_s, FIRST_CALL_SECONDS)
            try:
                response = await rpc(request() if callable(request) else request, timeout=limit)
            except grpc.aio.AioRpcError as error:
                raise to_exception(error, self.address) from None
            self._reached = True
            return response

        return await (with_retries(send, seconds=self._retry_seconds) if retry else send())

    async def stream(self, service: str, method: str, request: Any) -> AsyncIterator[Any]:
        """A server stream, from its beginning; it is not retried."""
        await self.server_info()
        try:
            async for message in getattr(getattr(self, service), method)(request):
                yield message
        except grpc.aio.AioRpcError as error:
            raise to_exception(error, self.address) from None

    async def server_info(self) -> types.GetServerCapabilitiesResponse:
        """What the server offers, asked once."""
        if self._info is None:
            response = await self.call("sessions", "GetServerInfo", session_pb2.GetServerInfoRequest())
            self._info = responses.capabilities(response)
        return self._info

    async def session_id(self, user_metadata: dict[str, str] | None = None) -> str:
        """The session, opened at first use. Raises SessionExpiredError once it has ended."""
        if self._session_error is not None:
            raise self._session_error
        if self._session is None or (self._session.done() and self._session.exception() is not None):
            self._session = asyncio.ensure_future(self._open_session(dict(user_metadata or {})))
        return await asyncio.shield(self._session)

    async def _open_session(self, user_metadata: dict[str, str]) -> str:
        request = session_pb2.CreateSessionRequest(
            client_key=uuid.uuid4().hex, user_metadata=user_metadata, client_version=version("opentinker")
        )
        response = await self.call("sessions", "CreateSession", request)
        self._heartbeat = asyncio.ensure_future(self._beat(response.session_id, response.lease_s))
        return response.session_id

    async def _beat(self, session_id: str, lease_s: float) -> None:
        """Renews the lease three times as often as needed; apart from all other calls."""
        request = session_pb2.HeartbeatRequest(session_id=session_id)
        while True:
            await asyncio.sleep(lease_s / 3)
            try:
                await self.sessions.Heartbeat(request, timeout=lease_s / 3)
            except grpc.aio.AioRpcError as error:
                exception = to_exception(error, self.address)
                if isinstance(exception, SessionExpiredError):
                    self._session_error = exception
                    logger.warning("%s", exception)
                    return
                logger.debug("heartbeat failed, it is tried again: %s", exception)

    async def wait_operation(
        self, operation: operation_pb2.Operation, on_datums_done: Callable[[int], None] | None = None
    ) -> operation_pb2.Operation:
        """The operation when it has succeeded. Raises what it failed with. Cancelling cancels the operation.

        on_datums_done: called with the number of datums done, each time that it has grown.
        """
        try:
            while operation.state not in responses.ENDED:
                request = operation_pb2.WaitOperationRequest(op_id=operation.op_id, timeout_ms=int(WAIT_SECONDS * 1e3))
                if on_datums_done is not None:
                    request.datums_seen = operation.datums_done
                    seen = operation.datums_done
                response = await self.call(
                    "operations", "WaitOperation", request, timeout_s=WAIT_SECONDS + CALL_SECONDS
                )
                operation = response.operation
                if on_datums_done is not None and operation.datums_done > seen:
                    on_datums_done(operation.datums_done)
        except asyncio.CancelledError:
            request = operation_pb2.CancelOperationRequest(op_id=operation.op_id)
            self.spawn_quietly(self.call("operations", "CancelOperation", request))
            raise
        if operation.HasField("error"):
            raise responses.error(operation.error)
        return operation

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something whose result nobody waits for. On the loop only."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def spawn_quietly(self, work: Coroutine[Any, Any, Any]) -> None:
        """As `spawn`; a failure is nobody's concern, as of a release that the end of the session makes up for."""

        async def quiet() -> None:
            with contextlib.suppress(OpenTinkerError):
                await work

        self.spawn(quiet())

    async def shut_down(self, *, end_session: bool = True) -> None:
        """Close the channel; what still runs is cancelled.

        Without `end_session` the server keeps what the session holds until its lease ends, for `attach`.
        """
        if self.closed:
            return
        self.closed = True
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        session = self._session
        opened = session is not None and session.done() and not session.cancelled() and session.exception() is None
        if session is not None and opened and end_session:
            request = session_pb2.CloseSessionRequest(session_id=session.result())
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self.sessions.CloseSession(request, timeout=CLOSE_SECONDS)
        if self._channel is not None:
            await self._channel.close()
        current = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not current]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class Connection:
    """What clients hold. Safe to use from any thread of the process that made it."""

    def __init__(self, base_url: str | None):
        self.address = resolve_address(base_url)
        self._pid = os.getpid()
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(_quiet_poller)
        self.link = Link(self.address, loop)
        self._thread = threading.Thread(target=_run_loop, args=(loop,), name=f"opentinker {self.address}", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _finish, self.link, self._thread, self._pid)

    def check_process(self) -> None:
        """Raises ForkedProcessError in a child made by fork."""
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                "this client was made before fork and cannot be used in the child process; make a new ServiceClient "
                "(or unpickle a SamplingClient) there"
            )

    def submit(self, work: Coroutine[Any, Any, T], *, client: bool = False) -> APIFuture[T]:
        """Run a coroutine on the loop; its result as a future."""
        try:
            self.check_process()
            if self.link.closed:
                raise APIConnectionError(f"the client of {self.address} is closed")
        except BaseException:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self.link.loop)
        kind: type[APIFuture] = ClientFuture if client else APIFuture
        return kind(future, loop_thread_id=self._thread.ident or 0, keep=self)

    def iterate(self, make: Callable[[], AsyncIterator[T]]) -> Stream[T]:
        """An asynchronous iteration on the loop, usable from plain code and from coroutines."""
        self.check_process()
        return Stream(self, make)

    def close(self, *, end_session: bool = True) -> APIFuture[None]:
        """Close the session and the channel; repeating it changes nothing. end_session: see `Link.shut_down`."""
        self.check_process()
        if self.link.closed:
            import concurrent.futures

            done: concurrent.futures.Future[None] = concurrent.futures.Future()
            done.set_result(None)
            return APIFuture(done, loop_thread_id=0)
        future = asyncio.run_coroutine_threadsafe(self._close(end_session), self.link.loop)
        return APIFuture(future, loop_thread_id=self._thread.ident or 0, keep=self)

    async def _close(self, end_session: bool) -> None:
        await self.link.shut_down(end_session=end_session)
        self.link.loop.call_soon(self.link.loop.stop)


class Stream(AsyncIterator[T]):
    """Messages as they come: `for message in stream` or `async for message in stream`. Closing it stops the source."""

    _END = object()

    def __init__(self, connection: Connection, make: Callable[[], AsyncIterator[T]]):
        self._connection = connection
        self._make = make
        self._source: AsyncIterator[T] | None = None
        self.response: Any = None
        """What the server sends at the end of the stream; None before it, and where it sends nothing."""

    async def _next(self) -> Any:
        if self._source is None:
            self._source = self._make()
        try:
            return await self._source.__anext__()
        except StopAsyncIteration:
            return self._END

    def __iter__(self) -> Stream[T]:
        return self

    def __next__(self) -> T:
        message = self._connection.submit(self._next()).result()
        if message is self._END:
            raise StopIteration
        return message

    def __aiter__(self) -> Stream[T]:
        return self

    async def __anext__(self) -> T:
        message = await self._connection.submit(self._next())
        if message is self._END:
            raise StopAsyncIteration
        return message

    def close(self) -> None:
        """Stop the source; no more messages come."""
        source = self._source
        if source is not None and not self._connection.link.closed:
            self._connection.submit(source.aclose()).result()  # type: ignore[attr-defined]

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _finish(link: Link, thread: threading.Thread, pid: int) -> None:
    """The last holder is gone, or the process ends. Not in a forked child, whose threads do not exist."""
    if os.getpid() != pid or link.loop.is_closed() or not thread.is_alive():
        return

    # A program that dies of an exception has not said that it is done: its adapters can be attached to.
    crashed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")

    async def finish() -> None:
        try:
            await link.shut_down(end_session=not crashed)
        finally:
            link.loop.call_soon(link.loop.stop)

    def begin() -> None:
        link.finishing = link.loop.create_task(finish())

    try:
        link.loop.call_soon_threadsafe(begin)
    except RuntimeError:  # the loop ended meanwhile
        return
    if threading.current_thread() is not thread:
        thread.join(timeout=CLOSE_SECONDS + 1.0)


def _quiet_poller(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """gRPC's poller wakes every loop of the process; those that find nothing to read are not an error."""
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
