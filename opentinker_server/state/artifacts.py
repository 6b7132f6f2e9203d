"""Files of checkpoints and snapshots: complete or absent, whenever the machine stops.

A writer fills a directory below tmp/; `commit` makes it permanent by one rename and syncs the parent. The database row
comes after the rename: a crash between the two leaves a directory without a row, which the sweep at the next start
removes, never a row without files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path


class StateDirectoryInUse(OSError):
    """Another server owns the state directory."""


class ArtifactStore:
    """The files below one state directory, owned by one process at a time."""

    def __init__(self, root: Path):
        self.root = root
        self._tmp = root / "tmp"
        self._adapters = root / "adapters"
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = self._take_lock()
        shutil.rmtree(self._tmp, ignore_errors=True)
        self._tmp.mkdir(exist_ok=True)
        self._adapters.mkdir(exist_ok=True)

    def close(self) -> None:
        """Gives up the state directory."""
        os.close(self._lock)

    def new_directory(self) -> Path:
        """An empty directory for a writer."""
        directory = self._tmp / uuid.uuid4().hex
        directory.mkdir()
        return directory

    def commit(self, directory: Path, *, adapter_id: str, kind: str) -> str:
        """Makes a filled directory permanent; returns its place relative to the root.

        `adapter_id` must be an id made by this server, `kind` "checkpoints" or "snapshots".
        """
        parent = self._adapters / adapter_id / kind
        parent.mkdir(parents=True, exist_ok=True)
        target = parent / directory.name
        os.rename(directory, target)
        for folder in (parent, parent.parent, self._adapters):
            _sync(folder)
        return str(target.relative_to(self.root))

    def discard(self, directory: Path) -> None:
        """Removes what a writer left that failed."""
        shutil.rmtree(directory, ignore_errors=True)

    def path(self, relative: str) -> Path:
        """Absolute path of a committed directory, as the database keeps it."""
        return self.root / relative

    def delete(self, relative: str) -> None:
        """Removes a committed directory: first out of sight by a rename, then its files."""
        grave = self._tmp / uuid.uuid4().hex
        try:
            os.rename(self.path(relative), grave)
        except FileNotFoundError:
            return
        shutil.rmtree(grave, ignore_errors=True)

    def sweep(self, known: Iterable[str]) -> list[str]:
        """Removes directories that no row names; returns them."""
        wanted = set(known)
        found = [str(path.relative_to(self.root)) for path in self._adapters.glob("*/*/*")]
        orphans = [relative for relative in found if relative not in wanted]
        for relative in orphans:
            self.delete(relative)
        return orphans

    def _take_lock(self) -> int:
        handle = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise StateDirectoryInUse(f"another server is using the state directory {self.root}") from error
            raise
        return handle


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
