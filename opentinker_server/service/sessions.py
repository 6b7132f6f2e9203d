"""Sessions: who is connected, and what ends with them.

A session lives by heartbeats. When it is closed or its lease runs out, what it holds live is unloaded; what is saved
stays. A session that is not known here (after a restart) is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from sqlalchemy import select, update

from opentinker_server.scheduler.errors import ServiceError
from opentinker_server.service.validation import check_metadata
from opentinker_server.state.database import Database, SessionRow, now
from opentinker_server.state.names import SESSION, new_id

logger = logging.getLogger(__name__)


@dataclass
class _Lease:
    client_key: str
    ends: float
    """On the monotonic clock."""


class Sessions:
    """The live sessions. Used from the event loop only."""

    def __init__(self, database: Database, *, lease_s: float):
        self.lease_s = lease_s
        self.on_end: list[Callable[[str], Awaitable[None]]] = []
        """Told the id of each session that has ended."""
        self._database = database
        self._leases: dict[str, _Lease] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}

    def create(self, client_key: str, user_metadata: Mapping[str, str]) -> str:
        """Id of the session with this key, which is made when it is new."""
        if not 8 <= len(client_key) <= 128:
            raise ServiceError("INVALID_ARGUMENT", "client_key must have 8 to 128 characters", field="client_key")
        for session_id, lease in self._leases.items():
            if lease.client_key == client_key:
                return session_id
        metadata = check_metadata(user_metadata)
        with self._database.begin() as transaction:
            query = select(SessionRow).where(SessionRow.client_key == client_key)
            if transaction.scalars(query).first() is not None:
                raise ServiceError("SESSION_EXPIRED", "a session with this client_key existed and has ended")
            session_id = new_id(SESSION)
            transaction.add(
                SessionRow(session_id=session_id, client_key=client_key, user_metadata=metadata, created_at=now())
            )
        self._leases[session_id] = _Lease(client_key, time.monotonic() + self.lease_s)
        return session_id

    def heartbeat(self, session_id: str) -> None:
        """Renew the lease. Raises ServiceError SESSION_EXPIRED."""
        self.require(session_id)
        self._leases[session_id].ends = time.monotonic() + self.lease_s

    def require(self, session_id: str) -> None:
        """Raises ServiceError SESSION_EXPIRED when the session is over or unknown."""
        if session_id not in self._leases:
            raise ServiceError(
                "SESSION_EXPIRED",
                "the session has ended or expired; open a new one and restore adapters from a checkpoint",
                field="session_id",
            )

    async def close(self, session_id: str) -> None:
        """End a session and wait for what it owns to be released; closing one that is over changes nothing.

        A caller that stops waiting does not stop the release, which waits for running operations.
        """
        if session_id in self._leases:
            self._end(session_id)
        ending = self._ending.get(session_id)
        if ending is not None:
            await asyncio.shield(ending)

    def expire(self) -> None:
        """End the sessions whose lease has run out; what they own is released in the background."""
        late = [session_id for session_id, lease in self._leases.items() if lease.ends < time.monotonic()]
        for session_id in late:
            logger.warning("session expired", extra={"session_id": session_id})
            self._end(session_id)

    async def stop(self) -> None:
        """Stop releasing: the worker that holds it all is about to end."""
        tasks = list(self._ending.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, session_id: str) -> None:
        with self._database.begin() as transaction:
            transaction.execute(update(SessionRow).where(SessionRow.session_id == session_id).values(ended_at=now()))
        del self._leases[session_id]
        task = asyncio.create_task(self._release(session_id))
        self._ending[session_id] = task
        task.add_done_callback(lambda _: self._ending.pop(session_id))

    async def _release(self, session_id: str) -> None:
        for callback in self.on_end:
            try:
                await callback(session_id)
            except Exception:
                logger.exception("what a session owned was not released", extra={"session_id": session_id})

    def end_all_of_last_run(self) -> None:
        """At start: sessions of a server that stopped are over."""
        with self._database.begin() as transaction:
            transaction.execute(update(SessionRow).where(SessionRow.ended_at.is_(None)).values(ended_at=now()))
