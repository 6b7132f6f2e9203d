"""Operations: acknowledged work, its identity, its result and whoever waits for it.

`(adapter_id, seq_id)` is the identity; the sha256 of the payload tells a repetition from a conflict.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from google.protobuf.message import Message

from opentinker_client.wire.v1 import error_pb2, operation_pb2
from opentinker_server.scheduler.errors import ServiceError
from opentinker_server.state.database import now
from opentinker_server.state.names import OPERATION, new_id

logger = logging.getLogger(__name__)

QUEUED = operation_pb2.OPERATION_STATE_QUEUED
RUNNING = operation_pb2.OPERATION_STATE_RUNNING
SUCCEEDED = operation_pb2.OPERATION_STATE_SUCCEEDED
FAILED = operation_pb2.OPERATION_STATE_FAILED
CANCELLED = operation_pb2.OPERATION_STATE_CANCELLED
ENDED = frozenset({SUCCEEDED, FAILED, CANCELLED})

RESULT_FIELDS = {
    "Adapter": "adapter",
    "ForwardBackwardResult": "forward_backward",
    "OptimStepResult": "optim_step",
    "Checkpoint": "checkpoint",
    "Snapshot": "snapshot",
}
"""Type of a result -> field of Operation that holds it."""


@dataclass(eq=False)
class Operation:
    """One piece of acknowledged work. `run` does it and returns the result message."""

    adapter_id: str
    seq_id: int
    kind: operation_pb2.OperationKind
    payload_sha256: bytes
    request_id: str
    run: Callable[[Operation], Awaitable[Message]]
    op_id: str = field(default_factory=lambda: new_id(OPERATION))
    state: operation_pb2.OperationState = QUEUED
    created_at: float = field(default_factory=now)
    started_at: float | None = None
    ended_at: float | None = None
    datums_done: int = 0
    stop: Callable[[], Awaitable[None]] | None = None
    """Set while running, if the work can be broken off with nothing applied: asks for that."""
    result: Message | None = None
    error: error_pb2.ErrorInfo | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _progressed: asyncio.Event = field(default_factory=asyncio.Event)

    async def execute(self) -> None:
        """Run to the end; failures become the operation's error."""
        if self.state != QUEUED:
            return
        self.state, self.started_at = RUNNING, now()
        try:
            result = await self.run(self)
        except ServiceError as error:
            self.fail(error, state=CANCELLED if error.reason == "CANCELLED" else FAILED)
        except asyncio.CancelledError:
            self.fail(ServiceError("UNAVAILABLE", "the server is shutting down"))
            raise
        except Exception:
            logger.exception("operation failed", extra={"op_id": self.op_id, "request_id": self.request_id})
            self.fail(ServiceError("INTERNAL", f"a fault of the server; see its log for request {self.request_id}"))
        else:
            self.result = result
            self._end(SUCCEEDED)

    def fail(self, error: ServiceError, *, state: operation_pb2.OperationState = FAILED) -> None:
        """End without a result."""
        if self.state in ENDED:
            return
        self.error = error_pb2.ErrorInfo()
        self.error.CopyFrom(error.info)
        self.error.request_id = self.request_id
        self._end(state)

    def progress(self, datums_done: int) -> None:
        """More datums are done; wakes who waits for that."""
        self.datums_done = datums_done
        self._progressed.set()
        self._progressed = asyncio.Event()

    async def wait(self, *, datums_seen: int | None) -> None:
        """Until it has ended or, where given, more than `datums_seen` datums are done."""
        if datums_seen is None:
            await self.ended.wait()
        while datums_seen is not None and self.state not in ENDED and self.datums_done <= datums_seen:
            await self._progressed.wait()

    def _end(self, state: operation_pb2.OperationState) -> None:
        self.state, self.ended_at = state, now()
        self.run = _has_ended  # what it closed over, such as the datums, is not kept with the result
        self.stop = None
        self.ended.set()
        self._progressed.set()

    def to_message(self) -> operation_pb2.Operation:
        """The operation as clients see it."""
        message = operation_pb2.Operation(
            op_id=self.op_id,
            adapter_id=self.adapter_id,
            seq_id=self.seq_id,
            kind=self.kind,
            state=self.state,
            datums_done=self.datums_done,
            error=self.error,
        )
        for name in ("created_at", "started_at", "ended_at"):
            moment = getattr(self, name)
            if moment is not None:
                getattr(message, name).FromNanoseconds(int(moment * 1e9))
        if self.result is not None:
            getattr(message, RESULT_FIELDS[type(self.result).__name__]).CopyFrom(self.result)
        return message


async def _has_ended(operation: Operation) -> Message:
    raise AssertionError(f"operation {operation.op_id} was run twice")


class OperationStore:
    """All operations whose result is still kept."""

    def __init__(self, *, result_ttl_s: float):
        self._result_ttl_s = result_ttl_s
        self._by_id: dict[str, Operation] = {}
        self._by_place: dict[tuple[str, int], Operation] = {}
        self._closing = False

    def add(self, operation: Operation) -> Operation:
        """Make it known. Raises ServiceError UNAVAILABLE once the server is stopping."""
        if self._closing:
            raise ServiceError("UNAVAILABLE", "the server is shutting down")
        self._by_id[operation.op_id] = operation
        self._by_place[operation.adapter_id, operation.seq_id] = operation
        return operation

    def close(self) -> None:
        """Take no more operations."""
        self._closing = True

    def at(self, adapter_id: str, seq_id: int) -> Operation | None:
        """The operation of that place in an adapter's order, whether the adapter is live or not."""
        return self._by_place.get((adapter_id, seq_id))

    def __contains__(self, operation: Operation) -> bool:
        return operation.op_id in self._by_id

    def get(self, op_id: str) -> Operation:
        """Raises ServiceError NOT_FOUND."""
        operation = self._by_id.get(op_id)
        if operation is None:
            shown = op_id if len(op_id) <= 60 else op_id[:57] + "..."
            raise ServiceError(
                "NOT_FOUND",
                f"no operation {shown!r}; results are kept for {self._result_ttl_s:g} s and do not outlive the server",
                field="op_id",
            )
        return operation

    async def wait(self, op_id: str, *, timeout_s: float, datums_seen: int | None = None) -> Operation:
        """The operation when it has ended (or has more datums done), or as it stands when the time is up."""
        operation = self.get(op_id)
        if operation.state not in ENDED and timeout_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(operation.wait(datums_seen=datums_seen), timeout_s)
        return operation

    def active(self) -> list[Operation]:
        """Those that have not ended."""
        return [operation for operation in self._by_id.values() if operation.state not in ENDED]

    def sweep(self) -> list[Operation]:
        """Forget results whose time is up; returns them."""
        limit = now() - self._result_ttl_s
        old = [op for op in self._by_id.values() if op.ended_at is not None and op.ended_at < limit]
        for operation in old:
            del self._by_id[operation.op_id]
            self._by_place.pop((operation.adapter_id, operation.seq_id), None)
        return old
