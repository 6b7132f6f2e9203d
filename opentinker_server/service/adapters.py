"""The adapters: their rows, their queues, and whether their live state exists."""

from __future__ import annotations

import logging

from sqlalchemy import func, select, update

from opentinker_client.wire.v1 import policy_pb2
from opentinker_server.scheduler.errors import ServiceError
from opentinker_server.scheduler.queues import AdapterQueue
from opentinker_server.service.messages import adapter_message
from opentinker_server.state.database import AdapterRow, CheckpointRow, Database, now
from opentinker_server.state.names import ADAPTER, is_id
from opentinker_server.state.uris import CheckpointUri

logger = logging.getLogger(__name__)

ACTIVE, UNLOADED, LOST = "ACTIVE", "UNLOADED", "LOST"


class Adapters:
    """All adapters of this server; `queues` holds those that are live. Used from the event loop only."""

    def __init__(self, database: Database, *, gap_timeout_s: float):
        self.queues: dict[str, AdapterQueue] = {}
        self._database = database
        self._gap_timeout_s = gap_timeout_s

    def row(self, adapter_id: str) -> AdapterRow:
        """Raises ServiceError NOT_FOUND; an id that cannot be one is answered alike."""
        if is_id(adapter_id, ADAPTER):
            with self._database.begin() as transaction:
                found = transaction.get(AdapterRow, adapter_id)
            if found is not None:
                return found
        shown = adapter_id if len(adapter_id) <= 60 else adapter_id[:57] + "..."
        raise ServiceError("NOT_FOUND", f"no adapter {shown!r}", field="adapter_id")

    def live(self, adapter_id: str) -> AdapterQueue:
        """The queue of a live adapter. Raises ServiceError: NOT_FOUND, STATE_LOST or SESSION_EXPIRED."""
        queue = self.queues.get(adapter_id)
        if queue is not None:
            return queue
        raise self.not_live(self.row(adapter_id))

    def not_live(self, row: AdapterRow) -> ServiceError:
        """Why an adapter cannot be trained now, and how to go on."""
        newest = self._newest_checkpoint(row.adapter_id)
        advice = (
            f"its newest checkpoint is {newest}: create a training client from it"
            if newest
            else "it has no checkpoint; create a new adapter and train it again"
        )
        if row.state == LOST:
            return ServiceError(
                "STATE_LOST",
                f"the live state of adapter {row.adapter_id} was lost when the server or its worker stopped; {advice}",
                field="adapter_id",
            )
        return ServiceError(
            "SESSION_EXPIRED",
            f"adapter {row.adapter_id} was unloaded, by its owner or because its session ended; {advice}",
            field="adapter_id",
        )

    def message(self, row: AdapterRow) -> policy_pb2.Adapter:
        """The adapter as clients see it."""
        queue = self.queues.get(row.adapter_id)
        return adapter_message(row, next_seq_id=0 if queue is None else queue.first_free())

    def add(self, row: AdapterRow) -> None:
        """Record an adapter whose live state exists now."""
        with self._database.begin() as transaction:
            transaction.add(row)
        self.queues[row.adapter_id] = AdapterQueue(row.adapter_id, gap_timeout_s=self._gap_timeout_s)

    def touch(self, adapter_id: str, **values: object) -> None:
        """Record that an operation ended, with what it changed."""
        with self._database.begin() as transaction:
            transaction.execute(
                update(AdapterRow).where(AdapterRow.adapter_id == adapter_id).values(last_used_at=now(), **values)
            )

    def by_client_key(self, client_key: str) -> AdapterRow | None:
        """The adapter that was created with this key."""
        with self._database.begin() as transaction:
            return transaction.scalars(select(AdapterRow).where(AdapterRow.client_key == client_key)).first()

    def of_session(self, session_id: str) -> list[str]:
        """Ids of the live adapters that the session owns."""
        with self._database.begin() as transaction:
            query = select(AdapterRow.adapter_id).where(AdapterRow.session_id == session_id, AdapterRow.state == ACTIVE)
            return list(transaction.scalars(query))

    def remove_live(self, adapter_id: str, state: str, error: ServiceError) -> AdapterQueue | None:
        """The live state is gone: what is queued fails with `error`. Returns the queue, for closing."""
        queue = self.queues.pop(adapter_id, None)
        if queue is not None:
            queue.fail_all(error)
            self.touch(adapter_id, state=state)
        return queue

    def mark_all_lost(self) -> list[tuple[AdapterQueue, ServiceError]]:
        """The worker died: every live adapter is lost. Returns their queues, for closing, and what to tell."""
        closed = []
        for adapter_id in list(self.queues):
            row = self.row(adapter_id)
            row.state = LOST
            error = self.not_live(row)
            queue = self.remove_live(adapter_id, LOST, error)
            if queue is not None:
                closed.append((queue, error))
        return closed

    def mark_lost_of_last_run(self) -> None:
        """At start: adapters that were live when the server stopped are lost."""
        with self._database.begin() as transaction:
            query = update(AdapterRow).where(AdapterRow.state == ACTIVE).values(state=LOST)
            transaction.execute(query)

    def page(self, *, limit: int, offset: int) -> tuple[list[AdapterRow], int]:
        """Part of the list, newest first, and the number of all."""
        with self._database.begin() as transaction:
            total = transaction.scalar(select(func.count()).select_from(AdapterRow)) or 0
            query = select(AdapterRow).order_by(AdapterRow.created_at.desc(), AdapterRow.adapter_id)
            return list(transaction.scalars(query.limit(limit).offset(offset))), total

    def _newest_checkpoint(self, adapter_id: str) -> str | None:
        with self._database.begin() as transaction:
            kept = CheckpointRow.expires_at.is_(None) | (CheckpointRow.expires_at >= now())
            query = select(CheckpointRow.name).where(CheckpointRow.adapter_id == adapter_id, kept)
            name = transaction.scalars(query.order_by(CheckpointRow.created_at.desc())).first()
        return None if name is None else str(CheckpointUri(adapter_id, name))
