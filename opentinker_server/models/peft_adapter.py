"""PEFT owns what an adapter is: its configuration, which layers it targets, names, initial weights and files.

Only the forward pass is ours (`lora.py`). An adapter here is `Factors`: module name -> (A [r, in], B [out, r]).
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from opentinker_server.models.base import BaseModel, module_kind
from opentinker_server.models.lora import LoraWeights
from opentinker_server.models.quantized import dense_state

ADAPTER_NAME = "default"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NUMERIC_SETTINGS = (
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "use_qalora",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
)
"""Settings of a LoRA configuration that change what given factors compute."""
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "*.tiktoken",
)

Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Module name -> (A [r, in], B [out, r])."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """How an adapter is built."""

    rank: int
    """r of both factors."""
    alpha: float = 32.0
    """Numerator of the scale."""
    seed: int = 0
    """Determines the initial weights, whatever ran before."""
    train_attn: bool = True
    """Adapt the attention projections."""
    train_mlp: bool = True
    """Adapt the feed-forward projections."""
    train_unembed: bool = True
    """Adapt the output head."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank."""

    @property
    def scale(self) -> float:
        """What B A is multiplied with."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of layers that it adapts."""
        flags = {"attn": self.train_attn, "mlp": self.train_mlp, "unembed": self.train_unembed}
        return tuple(kind for kind, wanted in flags.items() if wanted)


def target_modules(lora: LoraSettings, base: BaseModel) -> list[str]:
    """Names of the layers that the adapter changes. Raises ValueError when there are none."""
    names = [name for name in base.lora_shapes if module_kind(name) in lora.kinds]
    if not names:
        raise ValueError(
            f"no layer to adapt: {base.info.name} offers {', '.join(base.info.adaptable)}, "
            f"asked for {', '.join(lora.kinds) or 'none'}"
        )
    return names


def make_peft_config(lora: LoraSettings, base: BaseModel) -> LoraConfig:
    """The PEFT configuration of the adapter; names every target in full, so nothing is matched by accident.

    Raises ValueError for a rank, alpha or choice of modules that makes no adapter.
    """
    if lora.rank < 1:
        raise ValueError(f"rank is {lora.rank}; it must be at least 1")
    if not (math.isfinite(lora.alpha) and lora.alpha > 0):
        raise ValueError(f"alpha is {lora.alpha}; it must be finite and above 0")
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base.info.name,
        inference_mode=True,
        r=lora.rank,
        # Loaders other than PEFT expect an integer where it is one.
        lora_alpha=int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        lora_dropout=0.0,
        bias="none",
        use_rslora=lora.use_rslora,
        target_modules=target_modules(lora, base),
    )


def init_adapter(lora: LoraSettings, base: BaseModel) -> Factors:
    """Initial factors in float32 on the device of the base, made by PEFT itself under the adapter's seed."""
    config = make_peft_config(lora, base)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of adapted tied heads: exports handle them
        template = get_peft_model(AutoModelForCausalLM.from_config(_plain_config(base)), config)
    factors: Factors = {}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(lora.seed)
        for name, layer in template.base_model.model.named_modules():
            if not isinstance(layer, LoraLayer):
                continue
            for half in (layer.lora_A[ADAPTER_NAME], layer.lora_B[ADAPTER_NAME]):
                half.to_empty(device="cpu").to(torch.float32)
            layer.reset_lora_parameters(ADAPTER_NAME, True)
            halves = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
            a_RK, b_OR = (half.detach().to(base.device, torch.float32) for half in halves)
            factors[name] = (a_RK, b_OR)
    return factors


def expected_shapes(lora: LoraSettings, base: BaseModel) -> dict[str, tuple[int, int]]:
    """PEFT tensor name -> shape of every tensor that the adapter's file must hold."""
    shapes: dict[str, tuple[int, int]] = {}
    for name in target_modules(lora, base):
        width_in, width_out = base.lora_shapes[name]
        shapes[f"{_PREFIX}{name}.lora_A.weight"] = (lora.rank, width_in)
        shapes[f"{_PREFIX}{name}.lora_B.weight"] = (width_out, lora.rank)
    return shapes


def to_peft_tensors(factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Factors under the names of PEFT's adapter file."""
    tensors = {}
    for name, (a_RK, b_OR) in factors.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = a_RK.detach().contiguous()
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = b_OR.detach().contiguous()
    return tensors


def export_peft(
    directory: Path, lora: LoraSettings, base: BaseModel, factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Write adapter_config.json and adapter_model.safetensors as stock PEFT loads them."""
    make_peft_config(lora, base).save_pretrained(str(directory))
    save_file(to_peft_tensors(factors), str(directory / WEIGHTS_FILE), metadata={"format": "pt"})


def read_peft(directory: Path, lora: LoraSettings, base: BaseModel) -> Factors:
    """Factors, in float32, of a PEFT directory that holds an adapter built as `lora`.

    Raises ValueError, naming the file, tensor or setting, where a file is absent or torn, a tensor is missing,
    unexpected, of another shape or not finite, or a setting would change what the factors compute.
    """
    _check_settings(directory / CONFIG_FILE, make_peft_config(lora, base))
    shapes = expected_shapes(lora, base)
    tensors = _read_tensors(directory / WEIGHTS_FILE, shapes)
    factors: Factors = {}
    for name in target_modules(lora, base):
        a_RK, b_OR = (tensors[f"{_PREFIX}{name}.lora_{half}.weight"].to(base.device, torch.float32) for half in "AB")
        factors[name] = (a_RK, b_OR)
    return factors


def _check_settings(path: Path, expected: LoraConfig) -> None:
    try:
        recorded = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} is not a readable JSON file: {error}") from error
    for key in _NUMERIC_SETTINGS:
        wanted = getattr(expected, key, None)
        found = recorded.get(key)
        # PEFT writes "off" as null, false or an empty container, by version; r and alpha are never off.
        if found != wanted and (found or wanted):
            raise ValueError(f"{path.name}: {key} is {found!r}, the adapter has {wanted!r}")


def _read_tensors(path: Path, shapes: Mapping[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    try:
        with safe_open(str(path), framework="pt") as file:
            found = set(file.keys())
            tensors = {name: file.get_tensor(name) for name in shapes if name in found}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path.name} is not a readable safetensors file: {error}") from error
    for name in sorted(found - shapes.keys()):
        raise ValueError(f"{path.name}: tensor {name} is unexpected")
    for name, shape in shapes.items():
        if name not in tensors:
            raise ValueError(f"{path.name}: tensor {name} is missing")
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{path.name}: tensor {name} is {tuple(tensors[name].shape)}, expected {shape}")
        if not tensors[name].isfinite().all():
            raise ValueError(f"{path.name}: tensor {name} has a value that is not finite")
    return tensors


def merge_into_base(directory: Path, base: BaseModel, weights: LoraWeights) -> None:
    """Write a Hugging Face model with the adapter merged in, in the base's dtype, and its tokenizer.

    The base in memory is not touched. An adapted head is untied from the input embeddings, and the configuration
    says so.
    """
    merged = {}
    for key, tensor in dense_state(base.module, base.dtype).items():
        merged[key.replace(".base.", ".")] = tensor
    for name, (a_RK, b_OR) in weights.factors.items():
        key = f"{name}.weight"
        delta_OK = weights.scale * (b_OR.float() @ a_RK.float())
        merged[key] = (merged[key].float() + delta_OK).to(merged[key].dtype)
    config = _plain_config(base)
    if any(module_kind(name) == "unembed" for name in weights.factors):
        config.tie_word_embeddings = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=base.dtype)
    model.load_state_dict(merged, strict=True, assign=True)
    model.tie_weights()
    model.generation_config = base.module.generation_config
    model.save_pretrained(directory)
    for pattern in _TOKENIZER_FILES:
        for file in base.info.tokenizer_directory.glob(pattern):
            shutil.copy(file, directory)


def _plain_config(base: BaseModel) -> PreTrainedConfig:
    config = copy.deepcopy(base.config)
    config._attn_implementation = "eager"
    return config
