"""Results that are on their way: usable from plain code and from coroutines alike."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)


class APIFuture(Generic[T]):
    """The result of a call. The work goes on whether or not anyone waits.

    `future.result()` blocks; `await future` does not. Cancelling what `future()` returns, or an awaiting coroutine,
    cancels the call where it can still be cancelled.
    """

    def __init__(self, future: concurrent.futures.Future[T], *, loop_thread_id: int, keep: Any = None):
        self._future = future
        self._loop_thread_id = loop_thread_id
        self._keep = keep  # holds the connection open while the result is on its way

    def result(self, timeout: float | None = None) -> T:
        """The result; raises what the call raised, or TimeoutError after `timeout` seconds (the call goes on)."""
        import threading

        if threading.get_ident() == self._loop_thread_id:
            raise RuntimeError("result() was called on the client's own event loop; use `await` there")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            logger.debug("result() blocks the running event loop; `await` the future instead")
        try:
            return self._future.result(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"no result within {timeout} s; the call goes on") from None

    async def result_async(self, timeout: float | None = None) -> T:
        """The result, awaited; a timeout or cancellation here cancels the call."""
        return await asyncio.wait_for(asyncio.wrap_future(self._future), timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def future(self) -> concurrent.futures.Future[T]:
        """As a concurrent.futures.Future."""
        return self._future

    def coroutine(self) -> Coroutine[Any, Any, T]:
        """As a coroutine, for asyncio.gather and create_task."""
        return self.result_async()

    def cancel(self) -> bool:
        """Give the call up where it has not been applied yet; False when it has ended already."""
        return self._future.cancel()

    def done(self) -> bool:
        """Whether the result, or an error, is there."""
        return self._future.done()


class ClientFuture(APIFuture[T]):
    """A client that is being made. Using it as the client waits for it first."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.result(), name)
