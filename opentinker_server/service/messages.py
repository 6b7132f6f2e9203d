"""Database rows as wire messages."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from opentinker_client.wire.v1 import policy_pb2
from opentinker_server.state.database import AdapterRow, CheckpointRow, SnapshotRow
from opentinker_server.state.uris import CheckpointUri, SnapshotUri


def timestamp(seconds: float | None) -> Timestamp | None:
    """Seconds since the epoch as a protobuf timestamp."""
    if seconds is None:
        return None
    message = Timestamp()
    message.FromNanoseconds(int(seconds * 1e9))
    return message


def lora_message(fields: dict) -> policy_pb2.LoraConfig:
    """The stored configuration of an adapter."""
    return policy_pb2.LoraConfig(**fields)


def adapter_message(row: AdapterRow, *, next_seq_id: int) -> policy_pb2.Adapter:
    """An adapter as clients see it."""
    return policy_pb2.Adapter(
        adapter_id=row.adapter_id,
        base_model=row.base_model,
        lora=lora_message(row.lora),
        state=policy_pb2.AdapterState.Value(f"ADAPTER_STATE_{row.state}"),
        session_id=row.session_id,
        user_metadata=row.user_metadata,
        created_at=timestamp(row.created_at),
        last_used_at=timestamp(row.last_used_at),
        step=row.step,
        latest_version=row.latest_version,
        next_seq_id=next_seq_id,
    )


def checkpoint_message(row: CheckpointRow, adapter: AdapterRow) -> policy_pb2.Checkpoint:
    """A checkpoint as clients see it."""
    return policy_pb2.Checkpoint(
        adapter_id=row.adapter_id,
        name=row.name,
        uri=str(CheckpointUri(row.adapter_id, row.name)),
        step=row.step,
        sha256=row.sha256,
        base_model=adapter.base_model,
        size_bytes=row.size_bytes,
        created_at=timestamp(row.created_at),
        expires_at=timestamp(row.expires_at),
        user_metadata=row.user_metadata,
        lora=lora_message(adapter.lora),
    )


def snapshot_message(row: SnapshotRow, adapter: AdapterRow) -> policy_pb2.Snapshot:
    """A snapshot as clients see it."""
    return policy_pb2.Snapshot(
        adapter_id=row.adapter_id,
        version=row.version,
        sha256=row.sha256,
        uri=str(SnapshotUri(row.adapter_id, row.version)),
        name=row.name,
        step=row.step,
        base_model=adapter.base_model,
        size_bytes=row.size_bytes,
        created_at=timestamp(row.created_at),
        expires_at=timestamp(row.expires_at),
        user_metadata=row.user_metadata,
    )
