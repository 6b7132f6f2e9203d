"""Files of checkpoints and snapshots.

A folder holds the adapter as stock PEFT loads it (adapter_config.json, adapter_model.safetensors), state.json (kind,
base model, configuration, step) and, for a checkpoint, optimizer.safetensors. manifest.json, written last, gives
size and sha256 of each. Writers get an empty folder and make every file and the folder durable; whoever owns the
folder renames it into place afterwards. Readers verify every hash, then every tensor's name, shape and dtype, before
they return anything.
"""

import dataclasses
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from opentinker_server.models.base import BaseModel
from opentinker_server.models.lora import LoraWeights
from opentinker_server.models.peft_adapter import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    LoraSettings,
    expected_shapes,
    export_peft,
    to_peft_tensors,
)
from opentinker_server.training.adapter import Factors, LiveAdapter, adapter_from
from opentinker_server.training.errors import TrainingError

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.safetensors"
CHECKPOINT = "checkpoint"
SNAPSHOT = "snapshot"
FORMAT_VERSION = 1
_FILES = {
    CHECKPOINT: frozenset({CONFIG_FILE, WEIGHTS_FILE, STATE_FILE, OPTIMIZER_FILE}),
    SNAPSHOT: frozenset({CONFIG_FILE, WEIGHTS_FILE, STATE_FILE}),
}
_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """What was written."""

    sha256: str
    """Lower-case hexadecimal: of manifest.json for a checkpoint, `content_hash` for a snapshot."""

    size_bytes: int
    """Of all files."""

    step: int
    """Optimizer steps of the adapter when it was written."""


def content_hash(weights: LoraWeights) -> str:
    """sha256, lower-case hexadecimal, of what the weights compute.

    Over the scale and, in the order of their PEFT names, name, dtype, shape and little-endian bytes of each tensor.
    """
    digest = hashlib.sha256(f"scale {weights.scale!r}\n".encode())
    for name, tensor in sorted(to_peft_tensors(weights.factors).items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def write_state(directory: Path, *, base: BaseModel, adapter: LiveAdapter) -> SavedState:
    """Writes a checkpoint. Raises TrainingError DISK_FULL, leaving `directory` empty."""
    with _all_or_nothing(directory):
        _write(directory / OPTIMIZER_FILE, save(_optimizer_tensors(adapter)))
        size_bytes, sha256 = _write_rest(directory, CHECKPOINT, base=base, adapter=adapter)
    return SavedState(sha256=sha256, size_bytes=size_bytes, step=adapter.adam.step)


def write_snapshot(directory: Path, *, base: BaseModel, adapter: LiveAdapter) -> SavedState:
    """Writes a snapshot. Raises TrainingError DISK_FULL, leaving `directory` empty."""
    with _all_or_nothing(directory):
        size_bytes, _ = _write_rest(directory, SNAPSHOT, base=base, adapter=adapter)
    return SavedState(sha256=content_hash(adapter.weights), size_bytes=size_bytes, step=adapter.adam.step)


def read_state(directory: Path, *, base: BaseModel, lora: LoraSettings, with_optimizer: bool) -> LiveAdapter:
    """A new adapter built as `lora` from a checkpoint or, without optimizer, a snapshot.

    Raises TrainingError: NOT_FOUND without the folder, CORRUPT_DATA naming the file or tensor, WRONG_KIND naming
    what was found and what is needed.
    """
    saved = _read_verified(directory)
    if with_optimizer and saved.kind != CHECKPOINT:
        raise TrainingError(
            f"Found a {saved.kind}, which has no optimizer state; a {CHECKPOINT} is needed, or load the weights only.",
            reason="WRONG_KIND",
            field="kind",
        )
    _check_same_kind(saved, base=base, lora=lora)
    factors = _read_factors(saved, base)
    if not with_optimizer:
        return adapter_from(lora, factors)
    return adapter_from(lora, factors, moments=_read_moments(saved, factors, base), step=saved.step)


def read_weights(directory: Path, *, base: BaseModel, sha256: str | None = None) -> LoraWeights:
    """The weights of a checkpoint or snapshot, for sampling or export; `sha256`, if given, is their `content_hash`.

    Raises TrainingError as `read_state`.
    """
    saved = _read_verified(directory)
    _check_same_kind(saved, base=base, lora=saved.lora)
    weights = LoraWeights(scale=saved.lora.scale, factors=_read_factors(saved, base))
    if sha256 is not None and (found := content_hash(weights)) != sha256:
        raise _corrupt(WEIGHTS_FILE, f"holds tensors with sha256 {found}, not {sha256}")
    return weights


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """A folder whose files have the hashes that its manifest gives."""

    kind: str
    base_model: str
    lora: LoraSettings
    step: int
    contents: dict[str, bytes]


def _read_verified(directory: Path) -> _Saved:
    if not directory.is_dir():
        raise TrainingError(f"No saved state in {directory.name}.", reason="NOT_FOUND", field=directory.name)
    contents: dict[str, bytes] = {}
    for name, expected in _read_manifest(directory).items():
        try:
            data = (directory / name).read_bytes()
        except FileNotFoundError:
            raise _corrupt(name, "is missing") from None
        if len(data) != expected["size_bytes"]:
            raise _corrupt(
                name,
                f"has {len(data)} bytes instead of {expected['size_bytes']}",
                expected=expected["size_bytes"],
                actual=len(data),
            )
        if hashlib.sha256(data).hexdigest() != expected["sha256"]:
            raise _corrupt(name, "does not have the sha256 that the manifest gives")
        contents[name] = data
    if STATE_FILE not in contents:
        raise _corrupt(MANIFEST_FILE, f"does not list {STATE_FILE}")
    saved = _parse_state(contents)
    missing = _FILES[saved.kind] - contents.keys()
    if missing:
        raise _corrupt(MANIFEST_FILE, f"of a {saved.kind} does not list {', '.join(sorted(missing))}")
    return saved


def _read_manifest(directory: Path) -> dict[str, dict]:
    """File name -> {"sha256", "size_bytes"}; names are plain."""
    try:
        files = json.loads((directory / MANIFEST_FILE).read_bytes())["files"]
        for name, entry in files.items():
            if name != os.path.basename(name) or not isinstance(entry["size_bytes"], int):
                raise _corrupt(MANIFEST_FILE, f"has a bad entry {name!r}")
            str.lower(entry["sha256"])
    except FileNotFoundError:
        raise _corrupt(MANIFEST_FILE, "is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(MANIFEST_FILE, f"is not a manifest ({error})") from error
    return files


def _parse_state(contents: dict[str, bytes]) -> _Saved:
    try:
        state = json.loads(contents[STATE_FILE])
        if state["format_version"] != FORMAT_VERSION or state["kind"] not in _FILES:
            raise ValueError(f"kind {state['kind']!r}, format version {state['format_version']!r}")
        return _Saved(
            kind=state["kind"],
            base_model=state["base_model"],
            lora=LoraSettings(**state["lora"]),
            step=state["step"],
            contents=contents,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise _corrupt(STATE_FILE, f"is not a state of format version {FORMAT_VERSION} ({error})") from error


def _check_same_kind(saved: _Saved, *, base: BaseModel, lora: LoraSettings) -> None:
    """The seed may differ: it only made the initial weights."""
    if saved.base_model != base.info.name:
        raise TrainingError(
            f"Saved from base model {saved.base_model}; this adapter is on {base.info.name}.",
            reason="WRONG_KIND",
            field="base_model",
        )
    found, needed = (
        {key: value for key, value in dataclasses.asdict(settings).items() if key != "seed"}
        for settings in (saved.lora, lora)
    )
    if found != needed:
        names = [key for key in needed if found[key] != needed[key]]
        raise TrainingError(
            f"Saved from an adapter with {', '.join(f'{key} {found[key]}' for key in names)}; "
            f"this one has {', '.join(f'{key} {needed[key]}' for key in names)}.",
            reason="WRONG_KIND",
            field=names[0],
        )


def _read_tensors(
    saved: _Saved, name: str, shapes: Mapping[str, tuple[int, ...]], base: BaseModel
) -> dict[str, torch.Tensor]:
    """Exactly the float32 tensors of `shapes`, on the device of the base."""
    try:
        tensors = load(saved.contents[name])
    except SafetensorError as error:
        raise _corrupt(name, f"is not a safetensors file ({error})") from error
    for tensor_name in sorted(shapes.keys() | tensors.keys()):
        if tensor_name not in tensors:
            raise _corrupt(tensor_name, f"is missing from {name}")
        if tensor_name not in shapes:
            raise _corrupt(tensor_name, f"in {name} belongs to nothing in the adapter")
        found = tensors[tensor_name]
        if tuple(found.shape) != tuple(shapes[tensor_name]) or found.dtype != torch.float32:
            raise _corrupt(
                tensor_name,
                f"in {name} is {found.dtype} {list(found.shape)}, not torch.float32 {list(shapes[tensor_name])}",
            )
    return {tensor_name: tensor.to(base.device) for tensor_name, tensor in tensors.items()}


def _read_factors(saved: _Saved, base: BaseModel) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    shapes = expected_shapes(saved.lora, base)
    tensors = _read_tensors(saved, WEIGHTS_FILE, shapes, base)
    a_names = [name for name in shapes if name.endswith(".lora_A.weight")]
    return {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): (
            tensors[name],
            tensors[name.replace(".lora_A.", ".lora_B.")],
        )
        for name in a_names
    }


def _optimizer_tensors(adapter: LiveAdapter) -> dict[str, torch.Tensor]:
    return {
        f"{moment}.{module}.{factor}": tensor
        for moment, factors in adapter.moments().items()
        for module, pair in factors.items()
        for factor, tensor in zip("AB", pair, strict=True)
    }


def _read_moments(saved: _Saved, factors: Factors, base: BaseModel) -> dict[str, Factors]:
    shapes = {
        f"{moment}.{module}.{factor}": tuple(tensor.shape)
        for moment in ("first", "second")
        for module, pair in factors.items()
        for factor, tensor in zip("AB", pair, strict=True)
    }
    tensors = _read_tensors(saved, OPTIMIZER_FILE, shapes, base)
    return {
        moment: {module: (tensors[f"{moment}.{module}.A"], tensors[f"{moment}.{module}.B"]) for module in factors}
        for moment in ("first", "second")
    }


def _write_rest(directory: Path, kind: str, *, base: BaseModel, adapter: LiveAdapter) -> tuple[int, str]:
    """Adds PEFT's files, state.json and last the manifest; returns bytes of all files and the manifest's sha256."""
    export_peft(directory, adapter.lora, base, adapter.weights.factors)
    state = {
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "base_model": base.info.name,
        "lora": dataclasses.asdict(adapter.lora),
        "step": adapter.adam.step,
        "tensors_sha256": content_hash(adapter.weights),
    }
    _write(directory / STATE_FILE, _json(state))
    files = {}
    for name in sorted(_FILES[kind]):
        data = (directory / name).read_bytes()
        files[name] = {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
        _sync(directory / name)
    manifest = _json({"format_version": FORMAT_VERSION, "files": files})
    _write(directory / MANIFEST_FILE, manifest)
    _sync(directory)
    size_bytes = sum((directory / name).stat().st_size for name in files) + len(manifest)
    return size_bytes, hashlib.sha256(manifest).hexdigest()


@contextmanager
def _all_or_nothing(directory: Path) -> Iterator[None]:
    """Empties `directory` again when writing fails; a full disk is told as such."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        for path in directory.iterdir():
            path.unlink()
        # safetensors gives the operating system's error in its text only.
        told = re.search(r"os error (\d+)", str(error))
        number = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
        if number not in _FULL:
            raise
        raise TrainingError(
            "No space is left on the server's disk: nothing was saved, and the adapter is as it was. Delete "
            "checkpoints or snapshots, then save again.",
            reason="DISK_FULL",
        ) from error


def _json(value: dict) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _corrupt(name: str, what: str, *, expected: int | None = None, actual: int | None = None) -> TrainingError:
    return TrainingError(
        f"{name} {what}: refused, nothing was loaded.",
        reason="CORRUPT_DATA",
        field=name,
        expected=expected,
        actual=actual,
    )
