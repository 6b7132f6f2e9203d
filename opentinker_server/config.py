"""Every setting of the server, and the only place where environment variables are read.

A setting is named `section.field`. Later sources win: defaults, a TOML file (`[section]` tables), the environment
(`OPENTINKER_SECTION__FIELD`), flags. Unknown names are refused.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import os
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

DEFAULT_STATE_DIR = Path("~/.local/state/opentinker").expanduser()
DEFAULT_CACHE_DIR = Path("~/.cache/opentinker").expanduser()
ENVIRONMENT_PREFIX = "OPENTINKER_"


class ConfigError(ValueError):
    """A setting is unknown or its value is not allowed; the text names it and where it came from."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `allow_remote`: whoever connects is trusted."""
    allow_remote: bool = False
    """Listen on an address that other machines reach. There are no keys: protect the port yourself."""
    port: int = 8711
    """Port to listen on; 0 picks a free one."""
    state_dir: Path = DEFAULT_STATE_DIR
    """Where the database, checkpoints and snapshots are kept. One server at a time owns it."""
    database_url: str = ""
    """SQLAlchemy URL. Empty: SQLite inside the state directory."""
    shutdown_grace_s: float = 30.0
    """Seconds that running calls get to end when the server stops."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    name: str = "smollm2-135m-instruct"
    """Base model: a name from `opentinker models list`, a local Hugging Face directory, or a hub id."""
    public_name: str = ""
    """What clients call it. Empty: the name, or the directory's own name."""
    dtype: str = "bfloat16"
    """Of the frozen weights: float32 or bfloat16. Adapters and their optimizer are always float32."""
    quantization: str = "none"
    """Of the base's linear layers: nf4 keeps them in four bits (needs the extra `quantized`), none as they are."""
    device: str = "cpu"
    """Torch device of the worker."""
    threads: int = 0
    """CPU threads of the worker; 0 lets torch choose."""
    cache_dir: Path = DEFAULT_CACHE_DIR
    """Where fetched models are kept."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    max_tokens_per_micro_batch: int = 2048
    """Token rows of one forward and backward pass; a longer datum runs alone."""
    head_chunk_rows: int = 256
    """Rows whose logits exist at one time."""
    recompute: str = "auto"
    """Compute layers again in the backward pass instead of keeping them: auto (datums that need it), always, never."""
    memory_bytes: int = 0
    """Memory of one forward and backward pass, in bytes; 0 takes 0.6 of what is free once the model is loaded."""
    max_adapters: int = 32
    """Adapters that can be live at one time."""
    max_rank: int = 128
    """Largest LoRA rank."""
    weight: float = 1.0
    """Share of the device's time for training when sampling has work too."""
    deterministic: bool = False
    """Give every training call its passes to itself, so that no bit of its numbers depends on what else runs."""


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    max_running: int = 64
    """Sequences that generate at once; further ones wait."""
    max_batched_tokens: int = 512
    """Tokens of one step, decode rows and prompt chunks together."""
    kv_cache_tokens: int = 65536
    """Capacity of the key/value cache, in tokens of all running sequences together."""
    weight: float = 1.0
    """Share of the device's time for sampling when training has work too."""


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    max_message_bytes: int = 64 * 2**20
    """Largest gRPC message."""
    max_call_bytes: int = 1024 * 2**20
    """Largest forward_backward call over all its messages."""
    max_datums: int = 65536
    """Most datums of one forward_backward call."""
    max_num_samples: int = 1024
    """Most samples of one sample call."""
    max_topk_logprobs: int = 128
    """Most entries per position of top-k log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    gap_timeout_s: float = 60.0
    """Seconds that calls wait for an earlier sequence id that has not arrived; then they fail, naming it."""
    result_ttl_s: float = 3600.0
    """Seconds that a finished operation and its result stay retrievable."""
    session_lease_s: float = 60.0
    """Seconds without a heartbeat after which a session ends and what it holds live is unloaded."""
    worker_timeout_s: float = 60.0
    """Seconds without an answer after which a device worker counts as hung, is killed and replaced."""
    sweep_interval_s: float = 5.0
    """Seconds between looks for expired sessions, results, checkpoints and snapshots."""


@dataclass(frozen=True, kw_only=True)
class LoggingSettings:
    level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""
    json: bool = False
    """One JSON object a line instead of text."""


@dataclass(frozen=True, kw_only=True)
class ConfigEntry:
    """One effective setting."""

    key: str
    """section.field"""
    value: str
    source: str
    """default, the file's path, the environment variable, or "flag"."""
    doc: str


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings, validated."""

    server: ServerSettings = field(default_factory=ServerSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    sampler: SamplerSettings = field(default_factory=SamplerSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    logging: LoggingSettings = field(default_factory=LoggingSettings)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        _check_ranges(self)

    def describe(self) -> list[ConfigEntry]:
        """Every setting with its value, its meaning and where the value comes from."""
        entries = []
        for section, cls in SECTIONS.items():
            docs = _field_docs(cls)
            for item in dataclasses.fields(cls):
                key = f"{section}.{item.name}"
                value = getattr(getattr(self, section), item.name)
                source = self.sources.get(key, "default")
                entries.append(ConfigEntry(key=key, value=str(value), source=source, doc=docs[item.name]))
        return entries


SECTIONS: dict[str, type] = {
    "server": ServerSettings,
    "model": ModelSettings,
    "training": TrainingSettings,
    "sampler": SamplerSettings,
    "limits": LimitSettings,
    "scheduler": SchedulerSettings,
    "logging": LoggingSettings,
}
CHOICES = {
    "model.dtype": ("float32", "bfloat16"),
    "model.quantization": ("none", "nf4"),
    "training.recompute": ("auto", "always", "never"),
    "logging.level": ("DEBUG", "INFO", "WARNING", "ERROR"),
}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MAY_BE_ZERO = {"server.port", "training.memory_bytes", "model.threads", "server.shutdown_grace_s"}


def load_config(
    file: Path | None = None,
    *,
    overrides: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Settings from the file, the environment and `overrides` ("section.field" -> text), in that order.

    Raises ConfigError naming the setting and its source.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def put(key: str, value: Any, source: str) -> None:
        values[key] = _convert(key, value, source)
        sources[key] = source

    for key, value in _read_file(file).items():
        put(key, value, str(file))
    for name, value in sorted((os.environ if environment is None else environment).items()):
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            section, _, setting = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
            put(f"{section}.{setting}", value, name)
    for key, value in (overrides or {}).items():
        put(key, value, "flag")

    sections = {
        section: cls(**{k.partition(".")[2]: v for k, v in values.items() if k.startswith(f"{section}.")})
        for section, cls in SECTIONS.items()
    }
    return Config(**sections, sources=sources)


def _read_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        document = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    flat = {}
    for section, table in document.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{file}: {section} must be a table of settings, as [{section}]")
        flat.update({f"{section}.{name}": value for name, value in table.items()})
    return flat


def _convert(key: str, value: Any, source: str) -> Any:
    section, _, name = key.partition(".")
    cls = SECTIONS.get(section)
    types = get_type_hints(cls) if cls is not None else {}
    if name not in types:
        known = [f"{s}.{f.name}" for s, c in SECTIONS.items() for f in dataclasses.fields(c)]
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"unknown setting {key} (from {source}){hint}")
    kind = types[name]
    try:
        if not isinstance(value, str | int | float | Path):  # a table, list or date of the file
            raise ValueError
        if kind is bool:
            return _to_bool(value)
        if kind is Path:
            return Path(str(value)).expanduser()
        if isinstance(value, bool) or (kind is int and isinstance(value, float)):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{key} (from {source}) must be of type {kind.__name__}, got {value!r}") from None


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if str(value).lower() not in words:
        raise ValueError(value)
    return words[str(value).lower()]


def _check_ranges(config: Config) -> None:
    for section, cls in SECTIONS.items():
        for item in dataclasses.fields(cls):
            key = f"{section}.{item.name}"
            value = getattr(getattr(config, section), item.name)
            source = config.sources.get(key, "default")
            if key in CHOICES and value not in CHOICES[key]:
                raise ConfigError(f"{key} (from {source}) must be one of {', '.join(CHOICES[key])}, got {value!r}")
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and key not in _MAY_BE_ZERO):
                raise ConfigError(f"{key} (from {source}) must be positive and finite, got {value}")
    if config.server.host not in LOOPBACK and not config.server.allow_remote:
        raise ConfigError(
            f"server.host is {config.server.host}, which other machines may reach, and this server has no keys; "
            "set server.allow_remote=true if the port is protected"
        )
    if config.server.port > 65535:
        raise ConfigError(f"server.port must be at most 65535, got {config.server.port}")


def _field_docs(cls: type) -> dict[str, str]:
    """Field name -> the string that follows it in the class body."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for node, after in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[node.target.id] = inspect.cleandoc(str(after.value.value))  # type: ignore[union-attr]
    return docs
