"""RegistryService."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from opentinker_client.wire.v1 import registry_pb2, registry_pb2_grpc
from opentinker_server.api.calls import streaming, unary
from opentinker_server.scheduler.errors import ServiceError
from opentinker_server.service import files
from opentinker_server.service.adapters import Adapters
from opentinker_server.service.artifacts import Artifacts
from opentinker_server.service.sampling import Samplers
from opentinker_server.service.supervisor import WorkerSupervisor
from opentinker_server.service.validation import expiry
from opentinker_server.state.database import CheckpointRow, SnapshotRow, now

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000


def _page(page: registry_pb2.Page) -> dict[str, int]:
    if page.limit < 0 or page.offset < 0:
        raise ServiceError("INVALID_ARGUMENT", "limit and offset must be at least 0", field="page")
    return {"limit": min(page.limit or DEFAULT_LIMIT, MAX_LIMIT), "offset": page.offset}


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """What the server keeps."""

    def __init__(self, *, adapters: Adapters, artifacts: Artifacts, samplers: Samplers, worker: WorkerSupervisor):
        self._adapters = adapters
        self._artifacts = artifacts
        self._samplers = samplers
        self._worker = worker

    @unary
    async def ListAdapters(self, request: registry_pb2.ListAdaptersRequest, context: grpc.aio.ServicerContext):
        rows, total = self._adapters.page(**_page(request.page))
        return registry_pb2.ListAdaptersResponse(
            adapters=[self._adapters.message(row) for row in rows], total_count=total
        )

    @unary
    async def GetAdapter(self, request: registry_pb2.GetAdapterRequest, context: grpc.aio.ServicerContext):
        row = self._adapters.row(request.adapter_id)
        return registry_pb2.GetAdapterResponse(adapter=self._adapters.message(row))

    @unary
    async def ListSnapshots(self, request: registry_pb2.ListSnapshotsRequest, context: grpc.aio.ServicerContext):
        if request.adapter_id:
            self._adapters.row(request.adapter_id)
        rows, total = self._artifacts.page(SnapshotRow, adapter_id=request.adapter_id, **_page(request.page))
        return registry_pb2.ListSnapshotsResponse(
            snapshots=[self._artifacts.message(row) for row in rows], total_count=total
        )

    @unary
    async def GetSnapshot(self, request: registry_pb2.GetSnapshotRequest, context: grpc.aio.ServicerContext):
        policy = request.policy
        self._adapters.row(policy.adapter_id)
        if policy.HasField("version"):
            row = self._artifacts.snapshot(policy.adapter_id, policy.version)
        else:
            row = self._artifacts.latest_snapshot(policy.adapter_id)
        if row is None:
            which = f"version {policy.version}" if policy.HasField("version") else "at all"
            raise ServiceError("NOT_FOUND", f"adapter {policy.adapter_id} has no snapshot {which}", field="version")
        return registry_pb2.GetSnapshotResponse(snapshot=self._artifacts.message(row))

    @streaming
    async def WatchSnapshots(
        self, request: registry_pb2.WatchSnapshotsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[registry_pb2.WatchSnapshotsResponse]:
        self._adapters.row(request.adapter_id)
        async for row in self._artifacts.watch(request.adapter_id, request.after_version):
            yield registry_pb2.WatchSnapshotsResponse(snapshot=self._artifacts.message(row))

    @unary
    async def ListCheckpoints(self, request: registry_pb2.ListCheckpointsRequest, context: grpc.aio.ServicerContext):
        if request.adapter_id:
            self._adapters.row(request.adapter_id)
        rows, total = self._artifacts.page(CheckpointRow, adapter_id=request.adapter_id, **_page(request.page))
        return registry_pb2.ListCheckpointsResponse(
            checkpoints=[self._artifacts.message(row) for row in rows], total_count=total
        )

    @unary
    async def GetCheckpoint(self, request: registry_pb2.GetCheckpointRequest, context: grpc.aio.ServicerContext):
        row = self._artifacts.find(request.uri)
        if not isinstance(row, CheckpointRow):
            raise ServiceError(
                "WRONG_KIND", f"{request.uri} is a snapshot, a checkpoint is needed; use GetSnapshot", field="uri"
            )
        return registry_pb2.GetCheckpointResponse(checkpoint=self._artifacts.message(row))

    @unary
    async def DeleteArtifact(self, request: registry_pb2.DeleteArtifactRequest, context: grpc.aio.ServicerContext):
        row = self._artifacts.find(request.uri)
        self._artifacts.delete(row)
        if isinstance(row, SnapshotRow):
            await self._samplers.removed(row)
        return registry_pb2.DeleteArtifactResponse()

    @unary
    async def SetTtl(self, request: registry_pb2.SetTtlRequest, context: grpc.aio.ServicerContext):
        row = self._artifacts.find(request.uri)
        seconds = request.ttl_seconds if request.HasField("ttl_seconds") else None
        self._artifacts.set_expiry(row, expiry(seconds, now=now()))
        return registry_pb2.SetTtlResponse()

    @streaming
    async def ExportArtifact(
        self, request: registry_pb2.ExportArtifactRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[registry_pb2.ExportArtifactResponse]:
        row = self._artifacts.find(request.uri)
        if request.format not in registry_pb2.ExportFormat.values():
            raise ServiceError("INVALID_ARGUMENT", f"format is {request.format}; PEFT or MERGED", field="format")
        merged = request.format == registry_pb2.EXPORT_FORMAT_MERGED
        async for part in files.export(row, merged, artifacts=self._artifacts, worker=self._worker):
            yield registry_pb2.ExportArtifactResponse(part=part)

    @streaming
    async def GetTokenizer(
        self, request: registry_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[registry_pb2.GetTokenizerResponse]:
        ready = self._worker.ready
        if request.base_model != ready.base_model:
            raise ServiceError(
                "NOT_FOUND",
                f"no base model {request.base_model!r} here; this server offers {ready.base_model}",
                field="base_model",
            )
        async for part in files.tokenizer(Path(ready.tokenizer_directory)):
            yield registry_pb2.GetTokenizerResponse(part=part)
