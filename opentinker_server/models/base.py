"""The frozen base model that trainer and sampler share.

The modules are transformers' own, so every architecture it knows with the common attention interface runs. Two things
are replaced: where attention looks (`attention.py`) and the linear layers that adapters may change (`lora.py`). There
is no batch axis and no padding: all tokens of a pass lie on one row axis.

Shape legend: N token rows, M rows that reach the head, D hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from opentinker_server.models import attention as packed_attention
from opentinker_server.models.attention import Attention
from opentinker_server.models.lora import LoraContext, LoraLinear, LoraRows

if TYPE_CHECKING:
    from opentinker_server.models.registry import ModelSource

HEAD = "lm_head"
TARGETS = {
    "attn": ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
    "unembed": (HEAD,),
}
"""Kind of layer -> last part of the module names that it covers."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What others need to know of a base model without holding it."""

    name: str
    """Registry name."""
    arch: str
    """Hugging Face model type."""
    vocab_size: int
    max_context_length: int
    """Tokens."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a generation by default."""
    num_layers: int
    hidden_size: int
    head_dim: int
    num_attention_heads: int
    num_kv_heads: int
    tied_head: bool
    """Whether the head shares the input embeddings' tensor."""
    accepts_images: bool
    tokenizer_directory: Path
    adaptable: tuple[str, ...]
    """Kinds of layers that adapters can change: of "attn", "mlp", "unembed"."""


class BaseModel:
    """One frozen base model. Used from one thread at a time."""

    def __init__(
        self, module: nn.Module, *, name: str, tokenizer_directory: Path, eos_token_ids: tuple[int, ...]
    ):
        self.module = module.eval().requires_grad_(False)
        self._context = LoraContext()
        self.lora_shapes: dict[str, tuple[int, int]] = {}
        """Module name -> (in, out) of every adaptable linear layer."""
        self._replace_linears()
        config = module.config
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        heads = config.num_attention_heads
        self.info = ModelInfo(
            name=name,
            arch=config.model_type,
            vocab_size=config.vocab_size,
            max_context_length=config.max_position_embeddings,
            eos_token_ids=eos_token_ids,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            num_attention_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            tied_head=self.head.weight.data_ptr() == module.get_input_embeddings().weight.data_ptr(),
            accepts_images=False,
            tokenizer_directory=tokenizer_directory,
            adaptable=tuple(
                kind for kind in TARGETS if any(self._kind(name) == kind for name in self.lora_shapes)
            ),
        )

    @classmethod
    def load(
        cls, source: ModelSource, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> BaseModel:
        """Load a Hugging Face directory or hub id, frozen and in evaluation mode."""
        packed_attention.register()
        module = AutoModelForCausalLM.from_pretrained(
            source.location, dtype=dtype, attn_implementation=packed_attention.IMPLEMENTATION
        )
        eos = module.generation_config.eos_token_id if module.generation_config else None
        eos = module.config.eos_token_id if eos is None else eos
        eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,)
        return cls(
            module.to(device),
            name=source.name,
            tokenizer_directory=Path(source.location),
            eos_token_ids=eos_ids,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the base weights."""
        return self.module.dtype

    @property
    def device(self) -> torch.device:
        """Where the base weights lie."""
        return self.module.device

    @property
    def head(self) -> LoraLinear:
        """The output head."""
        return self.module.get_submodule(HEAD)

    def hidden_states(
        self,
        tokens_N: torch.Tensor,
        positions_N: torch.Tensor,
        *,
        attention: Attention,
        lora: LoraRows | None,
    ) -> torch.Tensor:
        """Hidden states [N, D] after the final norm.

        tokens_N, positions_N: int64 [N]. The result depends on the arguments only.
        """
        self._context.rows = lora
        try:
            output = self.module.model(
                input_ids=tokens_N.unsqueeze(0),
                position_ids=positions_N.unsqueeze(0),
                use_cache=False,
                opentinker_attention=attention,
            )
        finally:
            self._context.rows = None
        return output.last_hidden_state[0]

    def logits(self, hidden_MD: torch.Tensor, *, lora: LoraRows | None) -> torch.Tensor:
        """Logits [M, V] in the dtype of the base; the rows of `lora` are those of `hidden_MD`."""
        self._context.rows = lora
        try:
            logits_MV = self.head(hidden_MD)
        finally:
            self._context.rows = None
        if self._softcap is not None:
            logits_MV = torch.tanh(logits_MV / self._softcap) * self._softcap
        return logits_MV

    @staticmethod
    def _kind(module_name: str) -> str | None:
        last = module_name.rpartition(".")[2]
        return next((kind for kind, names in TARGETS.items() if last in names), None)

    def modules_of(self, kinds: tuple[str, ...]) -> list[str]:
        """Names of the adaptable layers of the given kinds, in model order."""
        return [name for name in self.lora_shapes if self._kind(name) in kinds]

    def _replace_linears(self) -> None:
        linears = [(name, m) for name, m in self.module.named_modules() if isinstance(m, nn.Linear)]
        for name, linear in linears:
            if self._kind(name) is None:
                continue
            parent_name, _, last = name.rpartition(".")
            setattr(self.module.get_submodule(parent_name), last, LoraLinear(linear, name, self._context))
            self.lora_shapes[name] = (linear.in_features, linear.out_features)
