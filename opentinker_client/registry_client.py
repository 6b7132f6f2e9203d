"""What a server keeps: runs, checkpoints, snapshots."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from opentinker_client import types
from opentinker_client.arguments import checked, with_async_names
from opentinker_client.futures import APIFuture
from opentinker_client.tokenizer import receive_files
from opentinker_client.transport.connection import Connection, Link, Stream
from opentinker_client.wire import requests, responses

registry = requests.registry
PAGE = 1000


@with_async_names(
    results=(
        "get_server_capabilities",
        "list_training_runs",
        "get_training_run",
        "get_training_run_by_tinker_path",
        "list_checkpoints",
        "list_user_checkpoints",
        "list_snapshots",
        "get_weights_info_by_tinker_path",
        "delete_checkpoint",
        "delete_checkpoint_from_tinker_path",
        "set_checkpoint_ttl_from_tinker_path",
        "download",
    )
)
class RegistryClient:
    """Reads and tidies what a server keeps; needs no session."""

    @checked
    def __init__(self, *, base_url: str | None = None, connection: Connection | None = None):
        self._connection = connection or Connection(base_url)
        self._owned = connection is None

    @property
    def address(self) -> str:
        """host:port of the server."""
        return self._connection.address

    def _call(self, method: str, request: Any, read: Any, *, retry: bool = True) -> APIFuture[Any]:
        async def run(link: Link) -> Any:
            return read(await link.call("registry", method, request, retry=retry))

        return self._connection.submit(run(self._connection.link))

    def get_server_capabilities(self) -> APIFuture[types.GetServerCapabilitiesResponse]:
        """What the server is and offers."""
        return self._connection.submit(self._connection.link.server_info())

    @checked
    def list_training_runs(self, limit: int = 20, offset: int = 0) -> APIFuture[types.TrainingRunsResponse]:
        """A page of runs (adapters), newest first."""
        page = registry.Page(limit=limit, offset=offset)

        def read(response: Any) -> types.TrainingRunsResponse:
            return types.TrainingRunsResponse(
                training_runs=[responses.training_run(adapter) for adapter in response.adapters],
                cursor=responses.cursor(page, response.total_count),
            )

        return self._call("ListAdapters", registry.ListAdaptersRequest(page=page), read)

    @checked
    def get_training_run(self, training_run_id: str) -> APIFuture[types.TrainingRun]:
        """One run (adapter)."""
        request = registry.GetAdapterRequest(adapter_id=training_run_id)
        return self._call("GetAdapter", request, lambda response: responses.training_run(response.adapter))

    @checked
    def get_training_run_by_tinker_path(self, tinker_path: str) -> APIFuture[types.TrainingRun]:
        """The run that a checkpoint or snapshot was taken from."""
        return self.get_training_run(_adapter_of(tinker_path))

    @checked
    def list_checkpoints(self, training_run_id: str) -> APIFuture[types.CheckpointsListResponse]:
        """All checkpoints and named snapshots of a run, newest first."""

        async def run(link: Link) -> types.CheckpointsListResponse:
            found = await self._all(link, training_run_id)
            return types.CheckpointsListResponse(
                checkpoints=found, cursor=types.Cursor(offset=0, limit=len(found), total_count=len(found))
            )

        return self._connection.submit(run(self._connection.link))

    @checked
    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> APIFuture[types.CheckpointsListResponse]:
        """A page of all checkpoints and named snapshots, newest first."""

        async def run(link: Link) -> types.CheckpointsListResponse:
            found = await self._all(link, "")
            return types.CheckpointsListResponse(
                checkpoints=found[offset : offset + limit],
                cursor=types.Cursor(offset=offset, limit=limit, total_count=len(found)),
            )

        return self._connection.submit(run(self._connection.link))

    async def _all(self, link: Link, adapter_id: str) -> list[types.Checkpoint]:
        found: list[types.Checkpoint] = []
        kinds = (
            ("ListCheckpoints", registry.ListCheckpointsRequest, "checkpoints"),
            ("ListSnapshots", registry.ListSnapshotsRequest, "snapshots"),
        )
        for method, kind, field in kinds:
            offset = 0
            while True:
                request = kind(adapter_id=adapter_id, page=registry.Page(limit=PAGE, offset=offset))
                response = await link.call("registry", method, request)
                items = getattr(response, field)
                found += [responses.checkpoint(item) for item in items if item.name]
                offset += len(items)
                if not items or offset >= response.total_count:
                    break
        return sorted(found, key=lambda checkpoint: checkpoint.time, reverse=True)

    @checked
    def list_snapshots(
        self, training_run_id: str, limit: int = 100, offset: int = 0
    ) -> APIFuture[types.SnapshotsListResponse]:
        """A page of an adapter's snapshot versions, temporary ones included, newest first."""
        page = registry.Page(limit=limit, offset=offset)

        def read(response: Any) -> types.SnapshotsListResponse:
            return types.SnapshotsListResponse(
                snapshots=[responses.snapshot(item) for item in response.snapshots],
                cursor=responses.cursor(page, response.total_count),
            )

        return self._call("ListSnapshots", registry.ListSnapshotsRequest(adapter_id=training_run_id, page=page), read)

    @checked
    def watch_snapshots(self, training_run_id: str, after_version: int = 0) -> Stream[types.Snapshot]:
        """Each snapshot above `after_version` as it is published; never ends by itself."""
        request = registry.WatchSnapshotsRequest(adapter_id=training_run_id, after_version=after_version)
        link = self._connection.link

        async def snapshots() -> AsyncIterator[types.Snapshot]:
            async for message in link.stream("registry", "WatchSnapshots", request):
                yield responses.snapshot(message.snapshot)

        return self._connection.iterate(snapshots)

    @checked
    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[types.WeightsInfoResponse]:
        """What a checkpoint or snapshot holds."""

        async def run(link: Link) -> types.WeightsInfoResponse:
            if "/snapshots/" in tinker_path:
                adapter_id, version = _adapter_of(tinker_path), tinker_path.rpartition("/")[2]
                if not version.isdigit():
                    raise ValueError(f"{tinker_path!r} does not end in a snapshot version")
                policy = requests.PolicyRef(adapter_id=adapter_id, version=int(version))
                request = registry.GetSnapshotRequest(policy=policy)
                snapshot = (await link.call("registry", "GetSnapshot", request)).snapshot
                adapter_request = registry.GetAdapterRequest(adapter_id=adapter_id)
                adapter = (await link.call("registry", "GetAdapter", adapter_request)).adapter
                return responses.weights_info(snapshot, adapter.lora)
            request = registry.GetCheckpointRequest(uri=tinker_path)
            checkpoint = (await link.call("registry", "GetCheckpoint", request)).checkpoint
            return responses.weights_info(checkpoint, checkpoint.lora)

        return self._connection.submit(run(self._connection.link))

    @checked
    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Deletes a checkpoint or snapshot for good."""
        request = registry.DeleteArtifactRequest(uri=tinker_path)
        return self._call("DeleteArtifact", request, lambda response: None, retry=False)

    @checked
    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> APIFuture[None]:
        """As `delete_checkpoint_from_tinker_path`; checkpoint_id as lists give it."""
        return self.delete_checkpoint_from_tinker_path(f"opentinker://{training_run_id}/{checkpoint_id}")

    @checked
    def set_checkpoint_ttl_from_tinker_path(self, tinker_path: str, ttl_seconds: int | None) -> APIFuture[None]:
        """Changes when a checkpoint or snapshot is deleted; None keeps it until deleted."""
        request = registry.SetTtlRequest(uri=tinker_path, ttl_seconds=ttl_seconds)
        return self._call("SetTtl", request, lambda response: None)

    @checked
    def download(self, tinker_path: str, directory: str | Path, merged: bool = False) -> APIFuture[list[Path]]:
        """Writes a checkpoint or snapshot as a PEFT adapter, or merged as a whole model; returns the files.

        Every file is checked against its sha256 and appears only when it is complete.
        """
        form = registry.EXPORT_FORMAT_MERGED if merged else registry.EXPORT_FORMAT_PEFT
        request = registry.ExportArtifactRequest(uri=tinker_path, format=form)
        link = self._connection.link

        async def run() -> list[Path]:
            return await receive_files(link.stream("registry", "ExportArtifact", request), Path(directory))

        return self._connection.submit(run())

    def close(self) -> None:
        """Closes the connection, when it was made for this client alone."""
        if self._owned:
            self._connection.close().result()

    def __enter__(self) -> RegistryClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


RestClient = RegistryClient
"""Tinker's name."""


def _adapter_of(tinker_path: str) -> str:
    parts = tinker_path.removeprefix("opentinker://").split("/")
    if not tinker_path.startswith("opentinker://") or len(parts) != 3:
        raise ValueError(f"{tinker_path!r} is not an opentinker:// path")
    return parts[0]
