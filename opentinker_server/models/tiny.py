"""Random tiny models of several architectures, the same on every machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from opentinker_server.models.testing import write_byte_tokenizer

SPECIALS = ("<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 257
_COMMON: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
    "initializer_range": 0.1,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_config(name: str) -> PreTrainedConfig:
    """Configuration of `tiny-<arch>` or `tiny-<arch>-tied`."""
    arch = name.removeprefix("tiny-").removesuffix("-tied")
    common = {**_COMMON, "tie_word_embeddings": name.endswith("-tied")}
    if arch == "llama":
        return LlamaConfig(**common)
    if arch == "qwen3":
        return Qwen3Config(**common, head_dim=16)
    if arch == "gemma3":
        layers = ["sliding_attention", "full_attention"]
        return Gemma3TextConfig(**common, head_dim=16, sliding_window=16, layer_types=layers)
    if arch == "mixtral":
        return MixtralConfig(**common, num_local_experts=4)
    raise ValueError(f"unknown tiny model {name!r}")


def build_tiny(name: str, directory: Path) -> None:
    """Write the model in float32, with a byte-level tokenizer that has a ChatML template."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(name), dtype=torch.float32)
    model.generation_config.bos_token_id = None
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.save_pretrained(directory)
    write_byte_tokenizer(directory, SPECIALS, eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE)
