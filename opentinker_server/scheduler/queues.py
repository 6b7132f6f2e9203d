"""One queue per adapter: operations run one at a time, in the order of their sequence ids.

A sequence id is used up by an operation, by a refused request, or by a client that gave it up; only an id that is none
of these makes later ones wait, for a bounded time.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterable
from dataclasses import dataclass

from opentinker_client.wire.v1 import operation_pb2
from opentinker_server.scheduler.errors import ServiceError
from opentinker_server.scheduler.operations import CANCELLED, QUEUED, Operation

MAX_AHEAD = 100_000
"""How far a sequence id may lie beyond the next one."""
MAX_TOGETHER = 8
"""Passes of one adapter under way at one time."""
PASSES = frozenset({operation_pb2.OPERATION_KIND_FORWARD, operation_pb2.OPERATION_KIND_FORWARD_BACKWARD})
MAX_BEHIND = 10_000
"""How far back refused and given-up ids are told from those whose result is no longer kept."""


@dataclass(frozen=True)
class _Refused:
    payload_sha256: bytes
    error: ServiceError


class AdapterQueue:
    """The order of one adapter. Used from the event loop only."""

    def __init__(self, adapter_id: str, *, gap_timeout_s: float):
        self.adapter_id = adapter_id
        self.next_seq_id = 1
        """The id that runs next, or is waited for."""
        self._running: dict[Operation, asyncio.Task[None]] = {}
        self._gap_timeout_s = gap_timeout_s
        self._known: dict[int, Operation | _Refused | None] = {}
        """Every used id; None for one that the client gave up."""
        self._changed = asyncio.Event()
        self._gap: int | None = None
        self._gap_ends = 0.0
        """When the missing id is given up, on the loop's clock."""
        self._finished = False
        # Of its own context: it outlives the request that made it, whose id must not mark what it logs.
        self._runner = asyncio.get_running_loop().create_task(
            self._run(), name=f"queue {adapter_id}", context=contextvars.Context()
        )

    def find(self, seq_id: int, payload_sha256: bytes) -> Operation | None:
        """The operation that this request already is, if it is a repetition.

        Raises ServiceError: the error that the same request was refused with, or SEQUENCE_CONFLICT when the id was
        used by another payload or given up.
        """
        if seq_id < 1 or seq_id > self.next_seq_id + MAX_AHEAD:
            raise ServiceError(
                "INVALID_ARGUMENT",
                f"seq_id is {seq_id}; the next one is {self.next_seq_id} and it may lie {MAX_AHEAD} ahead at most",
                field="seq_id",
                expected=self.next_seq_id,
                actual=seq_id,
            )
        if seq_id not in self._known:
            if seq_id < self.next_seq_id:
                raise ServiceError(
                    "FAILED_PRECONDITION", f"seq_id {seq_id} was used; its result is no longer kept", field="seq_id"
                )
            return None
        entry = self._known[seq_id]
        if entry is None:
            raise ServiceError(
                "SEQUENCE_CONFLICT", f"seq_id {seq_id} was given up before this request arrived", field="seq_id"
            )
        if entry.payload_sha256 != payload_sha256:
            raise ServiceError(
                "SEQUENCE_CONFLICT", f"seq_id {seq_id} was used before with another payload", field="seq_id"
            )
        if isinstance(entry, _Refused):
            raise entry.error
        return entry

    def submit(self, operation: Operation) -> None:
        """Take an operation whose id `find` knows nothing of."""
        assert operation.seq_id not in self._known
        self._known[operation.seq_id] = operation
        self._changed.set()

    def refuse(self, seq_id: int, payload_sha256: bytes, error: ServiceError) -> None:
        """The request of this id was refused; a repetition gets the same error, the next id may run."""
        if 1 <= seq_id <= self.next_seq_id + MAX_AHEAD and seq_id not in self._known:
            self._known[seq_id] = _Refused(payload_sha256, error)
            self._changed.set()

    def abandon(self, seq_ids: Iterable[int]) -> None:
        """The client gave these ids up; those that did arrive are left alone."""
        for seq_id in seq_ids:
            if 1 <= seq_id <= self.next_seq_id + MAX_AHEAD:
                self._known.setdefault(seq_id, None)
        self._changed.set()

    def first_free(self) -> int:
        """The id that a client which takes the adapter up again goes on with."""
        return max([self.next_seq_id - 1, *self._known]) + 1

    def waiting(self) -> list[Operation]:
        """Queued operations, in order."""
        entries = (self._known[seq_id] for seq_id in sorted(self._known) if seq_id >= self.next_seq_id)
        return [entry for entry in entries if isinstance(entry, Operation) and entry.state == QUEUED]

    def missing(self) -> int | None:
        """The id that later ones wait for, if there is one."""
        return self.next_seq_id if self.next_seq_id not in self._known and self.waiting() else None

    @property
    def running(self) -> list[Operation]:
        """Begun and not ended, in order."""
        return list(self._running)

    def cancel(self, operation: Operation) -> None:
        """End a queued operation; one that runs or has ended is left alone."""
        if operation.state == QUEUED:
            error = ServiceError("CANCELLED", "cancelled before it began; nothing was applied")
            operation.fail(error, state=CANCELLED)
            self._changed.set()

    def fail_all(self, error: ServiceError) -> None:
        """End everything that is queued."""
        for operation in self.waiting():
            operation.fail(error)
        self._changed.set()

    def forget(self, operations: Iterable[Operation]) -> None:
        """Drop what the store no longer keeps; the ids stay used."""
        for operation in operations:
            if operation.seq_id < self.next_seq_id:
                self._known.pop(operation.seq_id, None)
            else:  # it was cancelled while it waited
                self._known[operation.seq_id] = None
        oldest = self.next_seq_id - MAX_BEHIND
        for seq_id in [s for s, e in self._known.items() if s < oldest and not isinstance(e, Operation)]:
            del self._known[seq_id]

    def finish(self) -> None:
        """End once the operation that runs, such as the one that unloads the adapter, has ended."""
        self._finished = True
        self._changed.set()

    async def close(self, error: ServiceError | None = None) -> None:
        """Stop running operations; those that run are interrupted, and fail with `error` if one is given."""
        if error is not None:
            for operation in self._running:
                operation.fail(error)
        tasks = {self._runner, *self._running.values()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while not self._finished:
            if self.next_seq_id in self._known:
                entry = self._known[self.next_seq_id]
                if isinstance(entry, Operation) and not self._may_begin(entry):
                    await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
                    continue
                self.next_seq_id += 1
                if isinstance(entry, Operation):
                    await self._begin(entry)
                continue
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), self._until_gap_ends())
            except TimeoutError:
                if self._gap is not None and self.missing() == self._gap:
                    self._skip(self._gap)

    def _may_begin(self, operation: Operation) -> bool:
        """Passes that follow one another are under way together; anything else waits for them."""
        return len(self._running) < (MAX_TOGETHER if operation.kind in PASSES else 1) or operation.state != QUEUED

    async def _begin(self, operation: Operation) -> None:
        if operation.kind in PASSES:
            task = asyncio.create_task(operation.execute(), name=f"operation {operation.op_id}")
            self._running[operation] = task
            task.add_done_callback(lambda _: self._running.pop(operation))
            return
        self._running[operation] = self._runner
        try:
            await operation.execute()
        finally:
            del self._running[operation]

    def _until_gap_ends(self) -> float | None:
        """Seconds left for the missing id, counted from when it was first missed; None when none is."""
        clock = asyncio.get_running_loop().time()
        gap = self.missing()
        if gap != self._gap:
            self._gap, self._gap_ends = gap, clock + self._gap_timeout_s
        return None if gap is None else max(self._gap_ends - clock, 0.0)

    def _skip(self, gap: int) -> None:
        """Give up a missing id: what waited fails, naming it; the id counts as used from now on."""
        error = ServiceError(
            "SEQUENCE_GAP",
            f"seq_id {gap} did not arrive within {self._gap_timeout_s:g} s; calls that waited for it were not run. "
            "It counts as used now, and the adapter goes on",
            field="seq_id",
            expected=gap,
        )
        last = max(operation.seq_id for operation in self.waiting())
        self.fail_all(error)
        for seq_id in range(gap, last + 1):
            self._known.setdefault(seq_id, None)
