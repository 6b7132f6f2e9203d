"""Conversion of a GGUF file to a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

_NOT_CONFIGURATION = ("quantization_config", "_model_name_or_path", "model_type", "architectures", "dtype")


def convert_gguf(gguf: Path, directory: Path) -> None:
    """Dequantise a llama-family GGUF file to bfloat16 safetensors and write its tokenizer beside them.

    Rounding to bfloat16 (2^-9 relative) is far below the step of a 4-bit weight. Raises ValueError when the file
    does not hold a whole llama model.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = quantised.config.to_dict()
    for key in _NOT_CONFIGURATION:
        settings.pop(key, None)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **ids}))
    loaded = model.load_state_dict(quantised.state_dict(), strict=False)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if loaded.unexpected_keys or set(loaded.missing_keys) - tied:
        raise ValueError(f"{gguf.name} does not hold a whole llama model: {loaded}")
    model.tie_weights()
    for key, value in ids.items():
        setattr(model.generation_config, key, value)
    model.bfloat16().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
