"""opentinker:// URIs, parsed and made only here.

opentinker://<adapter_id>/checkpoints/<name> and opentinker://<adapter_id>/snapshots/<version>.
"""

from __future__ import annotations

from dataclasses import dataclass

from opentinker_server.state.names import ADAPTER, NotAPlainName, check_name, is_id

SCHEME = "opentinker://"


@dataclass(frozen=True)
class CheckpointUri:
    """A saved training state."""

    adapter_id: str
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.adapter_id}/checkpoints/{self.name}"


@dataclass(frozen=True)
class SnapshotUri:
    """Immutable sampler weights."""

    adapter_id: str
    version: int

    def __str__(self) -> str:
        return f"{SCHEME}{self.adapter_id}/snapshots/{self.version}"


class BadUri(ValueError):
    """The text is not a URI of this server."""


def parse_uri(text: str) -> CheckpointUri | SnapshotUri:
    """Raises BadUri naming what was wrong."""
    shown = text if len(text) <= 120 else text[:117] + "..."
    expected = f"{SCHEME}<adapter>/checkpoints/<name> or {SCHEME}<adapter>/snapshots/<version>"
    if not text.startswith(SCHEME):
        raise BadUri(f"{shown!r} is not a path of this server; expected {expected}")
    parts = text.removeprefix(SCHEME).split("/")
    if len(parts) != 3 or not is_id(parts[0], ADAPTER):
        raise BadUri(f"{shown!r} is malformed; expected {expected}")
    adapter_id, kind, last = parts
    if kind == "checkpoints":
        try:
            return CheckpointUri(adapter_id, check_name(last, what="checkpoint"))
        except NotAPlainName as error:
            raise BadUri(str(error)) from error
    if kind == "snapshots":
        if not (last.isascii() and last.isdigit() and 0 < len(last) <= 12 and last[0] != "0"):
            raise BadUri(f"{shown!r} is malformed; a snapshot version is a number from 1, without leading zeros")
        return SnapshotUri(adapter_id, int(last))
    raise BadUri(f"{shown!r} is malformed; expected {expected}")
