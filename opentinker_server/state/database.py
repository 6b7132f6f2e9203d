"""The database: metadata of sessions, adapters, checkpoints and snapshots. Never tensors.

Calls are short and made from the event loop: SQLite in WAL mode answers them in well under a millisecond. Times are
seconds since the epoch, in UTC.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path

from alembic import command
from alembic.config import Config as AlembicConfig
from sqlalchemy import JSON, BigInteger, Double, Engine, Index, create_engine, event
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

MIGRATIONS = Path(__file__).with_name("migrations")


class Base(DeclarativeBase):
    """Root of the tables."""


class SessionRow(Base):
    """A client's session."""

    __tablename__ = "sessions"
    session_id: Mapped[str] = mapped_column(primary_key=True)
    client_key: Mapped[str] = mapped_column(unique=True)
    user_metadata: Mapped[dict] = mapped_column(JSON, default=dict)
    created_at: Mapped[float] = mapped_column(Double)
    ended_at: Mapped[float | None] = mapped_column(Double)


class AdapterRow(Base):
    """A policy. Its live state is in a worker; `state` says whether it is."""

    __tablename__ = "adapters"
    adapter_id: Mapped[str] = mapped_column(primary_key=True)
    client_key: Mapped[str] = mapped_column(unique=True)
    session_id: Mapped[str] = mapped_column(index=True)
    base_model: Mapped[str]
    lora: Mapped[dict] = mapped_column(JSON)
    """Fields of LoraConfig, every default filled in."""
    state: Mapped[str]
    """Name of an AdapterState without its prefix."""
    user_metadata: Mapped[dict] = mapped_column(JSON, default=dict)
    created_at: Mapped[float] = mapped_column(Double, index=True)
    last_used_at: Mapped[float] = mapped_column(Double)
    step: Mapped[int] = mapped_column(BigInteger, default=0)
    latest_version: Mapped[int] = mapped_column(BigInteger, default=0)


class CheckpointRow(Base):
    """A saved training state."""

    __tablename__ = "checkpoints"
    __table_args__ = (Index("ix_checkpoints_name", "adapter_id", "name", unique=True),)
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    adapter_id: Mapped[str]
    name: Mapped[str]
    directory: Mapped[str]
    """Relative to the state directory; made by the server."""
    step: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    user_metadata: Mapped[dict] = mapped_column(JSON, default=dict)
    created_at: Mapped[float] = mapped_column(Double)
    expires_at: Mapped[float | None] = mapped_column(Double)


class SnapshotRow(Base):
    """Sampler weights. Ephemeral ones have no directory and die with their worker."""

    __tablename__ = "snapshots"
    __table_args__ = (Index("ix_snapshots_version", "adapter_id", "version", unique=True),)
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    adapter_id: Mapped[str]
    version: Mapped[int] = mapped_column(BigInteger)
    name: Mapped[str]
    directory: Mapped[str]
    """Relative to the state directory; empty while in memory only."""
    step: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    user_metadata: Mapped[dict] = mapped_column(JSON, default=dict)
    created_at: Mapped[float] = mapped_column(Double)
    expires_at: Mapped[float | None] = mapped_column(Double)


class Database:
    """An open database with its schema up to date."""

    def __init__(self, url: str):
        self.engine = create_engine(url, pool_pre_ping=not url.startswith("sqlite"))
        if self.engine.dialect.name == "sqlite":
            event.listen(self.engine, "connect", _configure_sqlite)
        upgrade(self.engine)
        self._sessions = sessionmaker(self.engine, expire_on_commit=False)

    def begin(self) -> AbstractContextManager[Session]:
        """A transaction as a context manager: committed at the end, rolled back by an exception."""
        return self._sessions.begin()

    def close(self) -> None:
        """Gives back all connections."""
        self.engine.dispose()


def upgrade(engine: Engine, revision: str = "head") -> None:
    """Bring the schema to `revision`."""
    _migrate(engine, lambda config: command.upgrade(config, revision))


def downgrade(engine: Engine, revision: str) -> None:
    """Take the schema back to `revision`."""
    _migrate(engine, lambda config: command.downgrade(config, revision))


def _migrate(engine: Engine, act) -> None:
    config = AlembicConfig()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        act(config)


def _configure_sqlite(connection, _record) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=5000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def now() -> float:
    """Seconds since the epoch, UTC."""
    return time.time()
