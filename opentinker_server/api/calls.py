"""What every servicer method shares: a request id, errors as statuses with details, a log line.

This is the operation boundary: whatever a method raises ends as a status here, and a fault of the server shows the
caller nothing but the request id.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable

import grpc
from google.protobuf import any_pb2

from opentinker_client.exceptions import STATUS_OF_REASON
from opentinker_client.wire.v1 import error_pb2
from opentinker_server.scheduler.errors import ServiceError

logger = logging.getLogger(__name__)

REQUEST_ID_KEY = "x-request-id"
DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_CHARS = 600
MAX_FIELD_CHARS = 100
_LOGGED_REASONS = {"INTERNAL", "CORRUPT_DATA", "DISK_FULL"}
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


def current_request_id() -> str:
    """Id of the request that is being served; empty outside one."""
    return _request_id.get()


def unary(method: Callable) -> Callable:
    """For a servicer method that returns one message."""

    @functools.wraps(method)
    async def wrapper(self, request, context: grpc.aio.ServicerContext):
        started = _begin(context)
        try:
            return await method(self, request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, _as_service_error(method.__name__, error))
        finally:
            _log(method.__name__, context, started)

    return wrapper


def streaming(method: Callable) -> Callable:
    """For a servicer method that yields messages; closing the call closes the method's generator."""

    @functools.wraps(method)
    async def wrapper(self, request, context: grpc.aio.ServicerContext) -> AsyncIterator:
        started = _begin(context)
        messages = method(self, request, context)
        try:
            async for message in messages:
                yield message
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, _as_service_error(method.__name__, error))
        finally:
            await messages.aclose()
            _log(method.__name__, context, started)

    return wrapper


def _begin(context: grpc.aio.ServicerContext) -> float:
    """Binds the caller's request id when it sent a well-formed one, else a fresh one; the answer carries it."""
    sent = dict(context.invocation_metadata() or ()).get(REQUEST_ID_KEY, "")
    well_formed = isinstance(sent, str) and _REQUEST_ID.fullmatch(sent)
    request_id = sent if well_formed else secrets.token_hex(8)
    _request_id.set(request_id)
    context.set_trailing_metadata(((REQUEST_ID_KEY, request_id),))
    return time.monotonic()


def _as_service_error(name: str, error: Exception) -> ServiceError:
    if isinstance(error, ServiceError):
        return error
    logger.error("fault in %s", name, exc_info=error)
    return ServiceError("INTERNAL", f"a fault of the server; see its log for request {current_request_id()}")


async def _abort(context: grpc.aio.ServicerContext, error: ServiceError) -> None:
    error.info.request_id = current_request_id()
    # Trailing metadata is limited to some KiB: what the caller sent may be longer than an answer can repeat.
    error.info.message = _shortened(error.info.message, MAX_MESSAGE_CHARS)
    error.info.field = _shortened(error.info.field, MAX_FIELD_CHARS)
    code = getattr(grpc.StatusCode, STATUS_OF_REASON[error.reason])
    level = logging.ERROR if error.reason in _LOGGED_REASONS else logging.INFO
    logger.log(level, "refused: %s: %s", error.reason, error.info.message)
    detail = any_pb2.Any()
    detail.Pack(error.info)
    status = error_pb2.ErrorStatus(code=code.value[0], message=error.info.message, details=[detail])
    metadata = ((DETAILS_KEY, status.SerializeToString()), (REQUEST_ID_KEY, error.info.request_id))
    await context.abort(code, error.info.message, trailing_metadata=metadata)


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _log(name: str, context: grpc.aio.ServicerContext, started: float) -> None:
    code = context.code()
    status = getattr(code, "name", str(code)) if code else "OK"
    logger.debug("%s %s %.1f ms", name, status, (time.monotonic() - started) * 1e3)
