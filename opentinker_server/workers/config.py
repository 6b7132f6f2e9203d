"""What a device worker is told when it starts. Free of torch: the control plane makes it."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class TrainerLimits:
    """Limits of training; the fields of `training.trainer.TrainerConfig`."""

    max_tokens_per_micro_batch: int = 2048
    """Token rows of one forward and backward, the smallest unit of training work; a longer datum runs alone."""

    head_chunk_rows: int = 256
    """Rows whose logits exist at one time; a chunk takes rows * vocabulary * 4 bytes, twice in backward."""

    recompute: Literal["auto", "always", "never"] = "auto"
    """Compute each layer again in the backward pass instead of keeping it: auto where a datum needs it to fit."""

    memory_bytes: int = 0
    """For one forward and backward; 0 takes 0.6 of what is free once the model is loaded."""

    max_adapters: int = 32
    """Live adapters at one time."""

    max_rank: int = 128
    """Largest LoRA rank."""


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Limits of sampling; the fields of `sampler.engine.EngineConfig`."""

    max_running: int = 64
    """Most sequences that generate at once; further ones wait."""

    max_batched_tokens: int = 512
    """Most tokens in a step, decode rows and prompt chunks together; the smallest unit of sampling work."""

    kv_cache_tokens: int = 65536
    """Capacity of the key/value cache, in tokens of all running sequences together."""

    max_lora_rank: int = 256
    """Highest rank of a snapshot."""


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Configuration of one device worker. Raises ValueError when a value is out of range."""

    model: str
    """Registry name, local Hugging Face directory or hub id."""

    model_name: str = ""
    """Public name of the model. Empty: what `model` resolves to."""

    cache_dir: str
    """Where fetched models are kept."""

    device: str = "cpu"
    """A torch device: "cpu", "cuda:0"."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the base model's weights and activations."""

    quantization: Literal["none", "nf4"] = "none"
    """Of the base model's linear layers: nf4 keeps them in four bits, by bitsandbytes."""

    threads: int = 0
    """Threads of one torch operation on the CPU. 0: torch's choice."""

    training_weight: float = 1.0
    """Share of the device's time for training, relative to `sampling_weight`, when both have work."""

    sampling_weight: float = 1.0
    """Share of the device's time for sampling, relative to `training_weight`, when both have work."""

    deterministic: bool = False
    """Every training call has its passes to itself: its numbers do not depend, in any bit, on what else runs."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe record that is written to standard error."""

    trainer: TrainerLimits = field(default_factory=TrainerLimits)
    """Limits of training."""

    engine: EngineLimits = field(default_factory=EngineLimits)
    """Limits of sampling."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model must not be empty")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f'dtype must be "float32", "bfloat16" or "float16", got {self.dtype!r}')
        if self.quantization not in ("none", "nf4"):
            raise ValueError(f'quantization must be "none" or "nf4", got {self.quantization!r}')
        if self.threads < 0:
            raise ValueError(f"threads must be at least 0, got {self.threads}")
        for name in ("training_weight", "sampling_weight"):
            if not 1e-3 <= getattr(self, name) <= 1e3:
                raise ValueError(f"{name} must be in [0.001, 1000], got {getattr(self, name)}")
        for limits in (self.trainer, self.engine):
            for name, value in dataclasses.asdict(limits).items():
                least = 0 if name == "memory_bytes" else 1
                if name != "recompute" and value < least:
                    raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.trainer.recompute not in ("auto", "always", "never"):
            raise ValueError(f'recompute must be "auto", "always" or "never", got {self.trainer.recompute!r}')

    def to_json(self) -> str:
        """One JSON object, every field present."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "WorkerConfig":
        """Inverse of `to_json`. Raises ValueError for unknown keys, missing ones without default and wrong types."""
        values = json.loads(text)
        if isinstance(values, dict):
            for name, limits in (("trainer", TrainerLimits), ("engine", EngineLimits)):
                if name in values:
                    values[name] = _build(limits, values[name], where=name)
        return _build(cls, values, where="worker configuration")


_JSON_TYPES: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), str: (str,)}


def _build(cls: type, values: Any, *, where: str) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be a JSON object, got {type(values).__name__}")
    fields = {item.name: item for item in dataclasses.fields(cls)}
    unknown = sorted(values.keys() - fields.keys())
    if unknown:
        raise ValueError(f"{where} has unknown keys: {', '.join(unknown)}")
    for name, value in values.items():
        allowed = _JSON_TYPES.get(fields[name].type, (str, TrainerLimits, EngineLimits))
        is_bool = fields[name].type is bool
        if isinstance(value, bool) != is_bool or not (is_bool or isinstance(value, allowed)):
            raise ValueError(f"{name} in {where} has the wrong type: {type(value).__name__}")
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from error
