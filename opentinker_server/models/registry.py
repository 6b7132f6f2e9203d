"""Finds the directory of a base model by its public name."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A base model on this machine."""

    name: str
    """Public name: what clients ask for and exports record."""
    directory: Path
    """Hugging Face directory with config, safetensors weights and tokenizer."""
