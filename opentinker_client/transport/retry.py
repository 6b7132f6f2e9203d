"""When a call is sent again. Only calls that are idempotent by an id of the client go through here."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import tenacity

from opentinker_client.exceptions import TABLE, APIConnectionError, APIError, APITimeoutError
from opentinker_client.wire import responses

T = TypeVar("T")

CONNECT_SECONDS = 4.0
"""How long a server that never answered is tried again."""
RECONNECT_SECONDS = 120.0
"""How long a server that answered before is tried again."""
_DETAILS_KEY = "grpc-status-details-bin"


def to_exception(error: grpc.RpcError, address: str) -> APIError:
    """The SDK's exception for a failed RPC."""
    code = error.code()
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            info = responses.error_details(value)
            if info is not None:
                return responses.error(info)
    if code == grpc.StatusCode.UNAVAILABLE:
        return APIConnectionError(f"the server at {address} cannot be reached: {error.details()}")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return APITimeoutError(f"the server at {address} did not answer in time")
    return APIError(f"the call to {address} failed: {code.name} {error.details()}")


def can_help(error: BaseException) -> bool:
    """Whether sending the same call again can help."""
    if isinstance(error, APIConnectionError):
        return True
    return isinstance(error, APIError) and TABLE.get(error.reason, TABLE["UNSPECIFIED"])[3]


async def with_retries(send: Callable[[], Awaitable[T]], *, seconds: Callable[[], float]) -> T:
    """`send` until it succeeds, fails for good, or `seconds()` have passed since it first failed.

    From the first failure: a call that takes long by nature must not have used its time up when its connection breaks.
    """
    failed_at: list[float] = []

    def out_of_time(state: tenacity.RetryCallState) -> bool:
        failed_at.append(time.monotonic())
        return failed_at[-1] - failed_at[0] > seconds()

    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(can_help),
        wait=tenacity.wait_exponential(multiplier=0.1, max=3.0) + tenacity.wait_random(0, 0.1),
        stop=out_of_time,
        reraise=True,
    )
    return await retrying(send)
