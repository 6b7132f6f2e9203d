"""Exports and tokenizers as streams of file parts, each file with its size and sha256."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from opentinker_client.wire.v1 import registry_pb2
from opentinker_server.scheduler.errors import ServiceError
from opentinker_server.service.artifacts import ArtifactRow, Artifacts
from opentinker_server.service.supervisor import WorkerSupervisor
from opentinker_server.workers.v1 import worker_pb2

PART_BYTES = 1 << 20
PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


async def export(
    row: ArtifactRow, merged: bool, *, artifacts: Artifacts, worker: WorkerSupervisor
) -> AsyncIterator[registry_pb2.FilePart]:
    """The adapter as PEFT loads it, or the whole model with the adapter merged in."""
    source = artifacts.directory(row)
    if not merged:
        async for part in stream_files([source / name for name in PEFT_FILES]):
            yield part
        return
    target = artifacts.store.new_directory()
    try:
        command = worker_pb2.ExportMerged(source_directory=str(source), target_directory=str(target))
        await worker.call(worker_pb2.WorkerCommand(export_merged=command))
        files = sorted(path for path in target.iterdir() if path.is_file())
        async for part in stream_files(files):
            yield part
    finally:
        artifacts.store.discard(target)


async def tokenizer(directory: Path) -> AsyncIterator[registry_pb2.FilePart]:
    """The tokenizer's files, of a fixed list of names."""
    files = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not files:
        raise ServiceError("FAILED_PRECONDITION", "the base model has no tokenizer files")
    async for part in stream_files(files):
        yield part


async def stream_files(files: Sequence[Path]) -> AsyncIterator[registry_pb2.FilePart]:
    """Files one after the other, in parts; memory is that of one part."""
    for path in files:
        try:
            size, sha256 = await asyncio.to_thread(_size_and_hash, path)
        except FileNotFoundError as error:
            message = f"{path.name} is missing among the saved files"
            raise ServiceError("CORRUPT_DATA", message, field=path.name) from error
        with path.open("rb") as file:
            sent = 0
            while sent < size or size == 0:
                data = await asyncio.to_thread(file.read, PART_BYTES)
                yield registry_pb2.FilePart(name=path.name, data=data, size_bytes=size, sha256=sha256)
                sent += len(data)
                if not data:
                    break


def _size_and_hash(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest
