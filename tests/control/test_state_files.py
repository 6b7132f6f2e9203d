"""The state directory: one owner, complete artifacts or none, schema up and down."""

import os
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from opentinker_server.service.artifacts import Artifacts
from opentinker_server.state.artifacts import ArtifactStore, StateDirectoryInUse
from opentinker_server.state.database import (
    AdapterRow,
    Base,
    CheckpointRow,
    Database,
    SnapshotRow,
    downgrade,
    now,
    upgrade,
)

ADAPTER_ID = "a-" + "b" * 20


@pytest.fixture
def database(tmp_path: Path):
    database = Database(f"sqlite:///{tmp_path / 'state.db'}")
    with database.begin() as transaction:
        transaction.add(
            AdapterRow(
                adapter_id=ADAPTER_ID,
                client_key="key",
                session_id="s",
                base_model="m",
                lora={"rank": 2},
                state="ACTIVE",
                user_metadata={},
                created_at=now(),
                last_used_at=now(),
                step=0,
                latest_version=0,
            )
        )
    yield database
    database.close()


def committed(store: ArtifactStore, kind: str = "checkpoints") -> str:
    directory = store.new_directory()
    (directory / "weights").write_bytes(b"w")
    return store.commit(directory, adapter_id=ADAPTER_ID, kind=kind)


def checkpoint(directory: str, name: str = "c", **values: object) -> CheckpointRow:
    fields = {"step": 1, "sha256": "0" * 64, "size_bytes": 1, "user_metadata": {}, "created_at": now()}
    return CheckpointRow(adapter_id=ADAPTER_ID, name=name, directory=directory, **{**fields, **values})


def test_schema_is_what_the_models_say_and_goes_up_and_down(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'x.db'}")
    with database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
        assert connection.execute(sa.text("PRAGMA journal_mode")).scalar() == "wal"
    downgrade(database.engine, "base")
    assert set(sa.inspect(database.engine).get_table_names()) == {"alembic_version"}
    upgrade(database.engine)
    assert "adapters" in sa.inspect(database.engine).get_table_names()
    database.close()


def test_one_server_owns_a_state_directory(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "state")
    with pytest.raises(StateDirectoryInUse, match="another server"):
        ArtifactStore(tmp_path / "state")
    store.close()
    ArtifactStore(tmp_path / "state").close()


def test_what_no_row_names_is_removed_at_the_next_start(tmp_path: Path, database: Database) -> None:
    store = ArtifactStore(tmp_path / "state")
    kept, orphan = committed(store), committed(store)
    Artifacts(database, store).add_checkpoint(checkpoint(kept), overwrite=False)
    half = store.new_directory()
    (half / "part").write_bytes(b"x")
    store.close()
    store = ArtifactStore(tmp_path / "state")
    Artifacts(database, store).sweep()
    assert store.path(kept).is_dir() and not store.path(orphan).exists() and not half.exists()
    store.close()


def test_overwriting_replaces_row_and_files_and_a_taken_name_leaves_nothing(tmp_path: Path, database: Database) -> None:
    from opentinker_server.scheduler.errors import ServiceError

    store = ArtifactStore(tmp_path / "state")
    artifacts = Artifacts(database, store)
    first, second, third = committed(store), committed(store), committed(store)
    artifacts.add_checkpoint(checkpoint(first), overwrite=False)
    with pytest.raises(ServiceError, match="exists"):
        artifacts.add_checkpoint(checkpoint(second), overwrite=False)
    assert store.path(first).is_dir() and not store.path(second).exists()
    artifacts.add_checkpoint(checkpoint(third, step=2), overwrite=True)
    found = artifacts.checkpoint(ADAPTER_ID, "c")
    assert found is not None and found.directory == third and found.step == 2
    assert not store.path(first).exists()
    store.close()


def test_expired_artifacts_are_not_found_and_their_names_are_free(tmp_path: Path, database: Database) -> None:
    store = ArtifactStore(tmp_path / "state")
    artifacts = Artifacts(database, store)
    artifacts.add_checkpoint(checkpoint(committed(store), expires_at=now() - 1), overwrite=False)
    assert artifacts.checkpoint(ADAPTER_ID, "c") is None
    assert [row.name for row in artifacts.expired()] == ["c"]
    assert artifacts.page(CheckpointRow, adapter_id="", limit=10, offset=0) == ([], 0)
    artifacts.add_checkpoint(checkpoint(committed(store)), overwrite=False)
    assert artifacts.checkpoint(ADAPTER_ID, "c") is not None
    assert len(os.listdir(store.root / "adapters" / ADAPTER_ID / "checkpoints")) == 1
    store.close()


def test_versions_grow_and_snapshots_in_memory_do_not_outlive_the_worker(tmp_path: Path, database: Database) -> None:
    store = ArtifactStore(tmp_path / "state")
    artifacts = Artifacts(database, store)
    for version, directory in ((1, committed(store, "snapshots")), (2, "")):
        row = SnapshotRow(
            adapter_id=ADAPTER_ID,
            version=version,
            name="n" if directory else "",
            directory=directory,
            step=0,
            sha256="0" * 64,
            size_bytes=0,
            user_metadata={},
            created_at=now(),
        )
        artifacts.add_snapshot(row)
    latest = artifacts.latest_snapshot(ADAPTER_ID)
    assert latest is not None and latest.version == 2
    artifacts.forget_in_memory()
    latest = artifacts.latest_snapshot(ADAPTER_ID)
    assert latest is not None and latest.version == 1
    assert artifacts.adapter_of(latest).latest_version == 2
    store.close()
