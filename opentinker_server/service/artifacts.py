"""Saved checkpoints and snapshots: rows and files together, lists, expiry, deletion."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from sqlalchemy import func, select

from opentinker_client.wire.v1 import policy_pb2
from opentinker_server.scheduler.errors import ServiceError
from opentinker_server.service.messages import checkpoint_message, snapshot_message
from opentinker_server.state.artifacts import ArtifactStore
from opentinker_server.state.database import AdapterRow, CheckpointRow, Database, SnapshotRow, now
from opentinker_server.state.uris import BadUri, CheckpointUri, SnapshotUri, parse_uri

logger = logging.getLogger(__name__)

ArtifactRow = CheckpointRow | SnapshotRow


def parse(text: str) -> CheckpointUri | SnapshotUri:
    """Raises ServiceError INVALID_ARGUMENT."""
    try:
        return parse_uri(text)
    except BadUri as error:
        raise ServiceError("INVALID_ARGUMENT", str(error), field="uri") from error


class Artifacts:
    """What is saved. Used from the event loop only."""

    def __init__(self, database: Database, store: ArtifactStore):
        self.store = store
        self._database = database
        self._published = asyncio.Event()

    def checkpoint(self, adapter_id: str, name: str) -> CheckpointRow | None:
        """The checkpoint of that name, unless it has expired."""
        with self._database.begin() as transaction:
            query = select(CheckpointRow).where(CheckpointRow.adapter_id == adapter_id, CheckpointRow.name == name)
            return _unexpired(transaction.scalars(query).first())

    def snapshot(self, adapter_id: str, version: int) -> SnapshotRow | None:
        """The snapshot of that version, unless it has expired."""
        with self._database.begin() as transaction:
            query = select(SnapshotRow).where(SnapshotRow.adapter_id == adapter_id, SnapshotRow.version == version)
            return _unexpired(transaction.scalars(query).first())

    def latest_snapshot(self, adapter_id: str) -> SnapshotRow | None:
        """The newest version that is kept."""
        with self._database.begin() as transaction:
            query = select(SnapshotRow).where(SnapshotRow.adapter_id == adapter_id)
            rows = transaction.scalars(query.order_by(SnapshotRow.version.desc()))
            return next((row for row in rows if _unexpired(row) is not None), None)

    def find(self, text: str) -> ArtifactRow:
        """What a URI names. Raises ServiceError: INVALID_ARGUMENT or NOT_FOUND, naming the URI."""
        uri = parse(text)
        row: ArtifactRow | None
        if isinstance(uri, CheckpointUri):
            row, what = self.checkpoint(uri.adapter_id, uri.name), "checkpoint"
        else:
            row, what = self.snapshot(uri.adapter_id, uri.version), "snapshot"
        if row is None:
            raise ServiceError("NOT_FOUND", f"no {what} {text}; it never existed, was deleted or expired", field="uri")
        return row

    def adapter_of(self, row: ArtifactRow) -> AdapterRow:
        """The adapter that it was taken from."""
        with self._database.begin() as transaction:
            adapter = transaction.get(AdapterRow, row.adapter_id)
        assert adapter is not None
        return adapter

    def directory(self, row: ArtifactRow) -> Path:
        """Its files. Raises ServiceError FAILED_PRECONDITION for one that is in memory only."""
        if not row.directory:
            raise ServiceError(
                "FAILED_PRECONDITION",
                f"a snapshot of {row.adapter_id} without a name lives in memory only; "
                "save one with a name to keep or export it",
            )
        return self.store.path(row.directory)

    def message(self, row: ArtifactRow) -> policy_pb2.Checkpoint | policy_pb2.Snapshot:
        """It as clients see it."""
        adapter = self.adapter_of(row)
        if isinstance(row, CheckpointRow):
            return checkpoint_message(row, adapter)
        return snapshot_message(row, adapter)

    def add_checkpoint(self, row: CheckpointRow, *, overwrite: bool) -> None:
        """Record a committed directory; replaces the checkpoint of that name when told to.

        Raises ServiceError ALREADY_EXISTS and removes the new directory when the name is taken.
        """
        with self._database.begin() as transaction:
            query = select(CheckpointRow).where(
                CheckpointRow.adapter_id == row.adapter_id, CheckpointRow.name == row.name
            )
            old = transaction.scalars(query).first()
            taken = old is not None and not overwrite and _unexpired(old) is not None
            if not taken:
                if old is not None:
                    transaction.delete(old)
                    transaction.flush()
                transaction.add(row)
        if taken:
            self.store.delete(row.directory)
            raise name_taken(row.name)
        if old is not None:
            self.store.delete(old.directory)

    def add_snapshot(self, row: SnapshotRow) -> None:
        """Record a snapshot and make it the adapter's latest version, in one transaction."""
        with self._database.begin() as transaction:
            transaction.add(row)
            adapter = transaction.get(AdapterRow, row.adapter_id)
            assert adapter is not None
            adapter.latest_version = row.version
        self._published.set()
        self._published = asyncio.Event()

    def delete(self, row: ArtifactRow) -> None:
        """Row first, then files: a crash between leaves an orphan for the sweep."""
        with self._database.begin() as transaction:
            transaction.delete(row)
        if row.directory:
            self.store.delete(row.directory)

    def set_expiry(self, row: ArtifactRow, expires_at: float | None) -> None:
        """Change when it is deleted."""
        with self._database.begin() as transaction:
            transaction.merge(row).expires_at = expires_at

    def expired(self) -> list[ArtifactRow]:
        """What is to be deleted now."""
        with self._database.begin() as transaction:
            rows: list[ArtifactRow] = []
            for table in (CheckpointRow, SnapshotRow):
                rows += transaction.scalars(select(table).where(table.expires_at < now()))
            return rows

    def page(
        self, table: type[CheckpointRow] | type[SnapshotRow], *, adapter_id: str, limit: int, offset: int
    ) -> tuple[list, int]:
        """Part of the list, newest first, and the number of all."""
        alive = (table.expires_at.is_(None)) | (table.expires_at >= now())
        condition = alive & (table.adapter_id == adapter_id) if adapter_id else alive
        with self._database.begin() as transaction:
            total = transaction.scalar(select(func.count()).select_from(table).where(condition)) or 0
            query = select(table).where(condition).order_by(table.created_at.desc(), table.id.desc())
            return list(transaction.scalars(query.limit(limit).offset(offset))), total

    def forget_in_memory(self) -> None:
        """The worker is gone, and with it the snapshots that lived in its memory."""
        with self._database.begin() as transaction:
            for row in transaction.scalars(select(SnapshotRow).where(SnapshotRow.directory == "")):
                transaction.delete(row)

    def sweep(self) -> None:
        """At start: remove directories that no row names."""
        known: list[str] = []
        with self._database.begin() as transaction:
            for table in (CheckpointRow, SnapshotRow):
                known += transaction.scalars(select(table.directory))
        orphans = self.store.sweep(known)
        if orphans:
            logger.info("removed %d unfinished artifacts", len(orphans))

    async def watch(self, adapter_id: str, after_version: int) -> AsyncIterator[SnapshotRow]:
        """Each snapshot above `after_version`, in order, as it is published; never ends by itself."""
        while True:
            published = self._published
            with self._database.begin() as transaction:
                query = select(SnapshotRow).where(
                    SnapshotRow.adapter_id == adapter_id, SnapshotRow.version > after_version
                )
                rows = list(transaction.scalars(query.order_by(SnapshotRow.version)))
            for row in rows:
                yield row
                after_version = row.version
            await published.wait()


def name_taken(name: str) -> ServiceError:
    """The refusal of a checkpoint name."""
    return ServiceError(
        "ALREADY_EXISTS",
        f"a checkpoint named {name!r} exists; choose another name, or pass overwrite=True to replace it",
        field="name",
    )


def _unexpired(row):
    return None if row is None or (row.expires_at is not None and row.expires_at < now()) else row
