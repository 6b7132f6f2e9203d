"""A frozen base model that runs packed token rows with any mix of LoRA adapters.

Legend: N token rows, M rows that need logits, D hidden size, V vocabulary, H query heads, G key/value heads.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from opentinker_server.models.attention import Attention, PackedCausalAttention
from opentinker_server.models.lora import ForwardContext, LoraLinear, LoraRows
from opentinker_server.models.norm import install_norms
from opentinker_server.models.quantized import NF4, nf4_config, use_exact_products
from opentinker_server.models.registry import ModelSource, quiet_transformers

ATTENTION_NAME = "opentinker"
"""Name of our attention among transformers' implementations; it needs no mask, so transformers makes none."""

ATTN_MODULES = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"})
MLP_MODULES = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj"})
HEAD_MODULE = "lm_head"

_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_PROBE_TOKENS = 4
_PROBE_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What callers may know of a base model."""

    name: str
    arch: str
    """transformers' model type: "llama", "qwen3", "gemma3_text", ..."""
    vocab_size: int
    max_context_length: int
    """Tokens, prompt and answer together."""
    eos_token_ids: tuple[int, ...]
    num_layers: int
    hidden_size: int
    head_dim: int
    num_attention_heads: int
    num_kv_heads: int
    tied_head: bool
    """The head's weight is the input embedding."""
    accepts_images: bool
    tokenizer_directory: Path
    adaptable: tuple[str, ...]
    """Which of "attn", "mlp", "unembed" have linear layers that LoRA can adapt. Experts fused into 3-D
    parameters (Mixtral in transformers 5) are not among them."""


class BaseModel:
    """A causal language model, frozen, in eval mode. One thread uses it."""

    def __init__(
        self, module: PreTrainedModel, *, info: ModelInfo, config: PreTrainedConfig, context: ForwardContext
    ) -> None:
        """Made by `load`; `module` has its adaptable linears replaced already."""
        self.module = module
        self.info = info
        self.config = config
        self.dtype: torch.dtype = module.dtype
        self.device: torch.device = module.device
        self.lora_shapes: dict[str, tuple[int, int]] = {
            name: (linear.base.in_features, linear.base.out_features) for name, linear in _lora_linears(module).items()
        }
        """Module name -> (input features, output features) of each linear that LoRA can adapt."""
        self._context = context
        self._softcap: float | None = getattr(config.get_text_config(), "final_logit_softcapping", None)

    @classmethod
    def load(
        cls, source: ModelSource, *, dtype: torch.dtype, device: torch.device | str, quantization: str = "none"
    ) -> "BaseModel":
        """Reads the weights (safetensors only); with quantization "nf4" the linear layers are kept in four bits.

        Raises ValueError for a quantization that is not installed, and for an architecture whose answers would depend
        on a row's neighbours or whose head does more than a linear layer and a softcap.
        """
        AttentionInterface.register(ATTENTION_NAME, _attention_forward)
        config = AutoConfig.from_pretrained(source.directory)
        if getattr(config.get_text_config(), "num_attention_heads", None) is None:
            raise ValueError(f"{config.model_type} has no attention; packed rows would see one another.")
        _refuse_batch_dependent_rope(config)
        options: dict[str, object] = {}
        if quantization == NF4:
            options = {"quantization_config": nf4_config(dtype), "device_map": {"": str(device)}}
        with quiet_transformers():
            module = AutoModelForCausalLM.from_pretrained(
                source.directory,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                **options,
            )
        if options:
            use_exact_products(module)
        else:
            module = module.to(device)
        module = module.eval().requires_grad_(False)
        context = ForwardContext()
        tied = module.get_output_embeddings().weight is module.get_input_embeddings().weight
        _install(module, context)
        install_norms(module)
        info = _describe(module, config, source=source, tied_head=tied)
        base = cls(module, info=info, config=config, context=context)
        for layer in _decoder_layers(module, info.num_layers):
            layer.forward = base._recomputable(layer.forward)
        base._check_against_stock_forward()
        return base

    def hidden_states(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        *,
        attention: Attention,
        lora: LoraRows | None,
        recompute: bool = False,
    ) -> Tensor:
        """hidden_ND after the final norm, dtype of the model.

        tokens_N, positions_N: int64 [N], one packed row axis of any number of sequences; `attention` keeps
        them apart. Differentiable in the adapters' factors; with `recompute` the backward pass computes each layer
        again from its input, which takes a third more time and a fraction of the memory.
        """
        with self._active(attention=attention, lora=lora, num_rows=tokens_N.shape[0], recompute=recompute):
            output = self.module.base_model(input_ids=tokens_N[None], position_ids=positions_N[None], use_cache=False)
            num_attended = len(self._context.attention_layers)
        if num_attended != self.info.num_layers:
            raise ValueError(
                f"{self.info.arch} has {self.info.num_layers} layers, of which {num_attended} use the "
                "attention interface; packed rows would see one another in the others."
            )
        return output.last_hidden_state[0]

    def logits(self, hidden_MD: Tensor, *, lora: LoraRows | None) -> Tensor:
        """logits_MV in the model's dtype; `lora` refers to the M rows."""
        with self._active(attention=None, lora=lora, num_rows=hidden_MD.shape[0]):
            logits_MV = self.module.get_output_embeddings()(hidden_MD)
        if self._softcap is not None:
            logits_MV = torch.tanh(logits_MV / self._softcap) * self._softcap
        return logits_MV

    @contextmanager
    def _active(
        self, *, attention: Attention | None, lora: LoraRows | None, num_rows: int, recompute: bool = False
    ) -> Iterator[None]:
        context = self._context
        assert context.num_rows == 0, "a model runs one call at a time"
        context.attention, context.lora, context.num_rows, context.recompute = attention, lora, num_rows, recompute
        try:
            yield
        finally:
            context.attention, context.lora, context.num_rows, context.recompute = None, None, 0, False
            context.attention_layers.clear()

    def _recomputable(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A decoder layer's forward that, when asked to, keeps its input only."""

        def run(*args: object, **kwargs: object) -> Tensor:
            context = self._context
            if not (context.recompute and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            again = self._active(attention=context.attention, lora=context.lora, num_rows=context.num_rows)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), again), **kwargs)

        return run

    @torch.no_grad()
    def _check_against_stock_forward(self) -> None:
        """Refuses an architecture that does to the logits what `logits` does not know of."""
        tokens_N = torch.arange(_PROBE_TOKENS, device=self.device) % self.info.vocab_size
        positions_N = torch.arange(_PROBE_TOKENS, device=self.device)
        attention = PackedCausalAttention([(0, _PROBE_TOKENS)])
        ours_NV = self.logits(self.hidden_states(tokens_N, positions_N, attention=attention, lora=None), lora=None)
        with self._active(attention=attention, lora=None, num_rows=_PROBE_TOKENS):
            stock = self.module(input_ids=tokens_N[None], position_ids=positions_N[None], use_cache=False)
        if not torch.allclose(ours_NV, stock.logits[0], atol=_PROBE_TOLERANCE, rtol=_PROBE_TOLERANCE):
            raise ValueError(f"The head of {self.info.arch} is not a linear layer with an optional softcap.")


def _attention_forward(
    module: nn.Module,
    query_1HND: Tensor,
    key_1GND: Tensor,
    value_1GND: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """transformers' attention signature; hands the rows to the active Attention. Returns [1, N, H, D]."""
    context, layer_idx = module.opentinker_context, module.layer_idx
    assert isinstance(context, ForwardContext) and isinstance(layer_idx, int)
    assert context.attention is not None, "attention is called inside BaseModel.hidden_states only"
    if attention_mask is not None or s_aux is not None or dropout:
        raise ValueError("Attention masks, sinks and dropout are not supported on packed rows.")
    context.attention_layers.append(layer_idx)
    out_NHD = context.attention.attend(
        layer_idx,
        query_1HND[0].transpose(0, 1),
        key_1GND[0].transpose(0, 1),
        value_1GND[0].transpose(0, 1),
        scaling=scaling if scaling is not None else query_1HND.shape[-1] ** -0.5,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return out_NHD[None], None


def adaptable_linears(module: PreTrainedModel) -> dict[str, nn.Linear]:
    """Module name -> linear layer that sees every packed row: attention, MLP (not routed experts), head."""
    head = module.get_output_embeddings()
    found = {}
    for name, child in module.named_modules():
        if not isinstance(child, nn.Linear):
            continue
        last = name.rsplit(".", 1)[-1]
        routed = re.search(r"\bexperts\b", name) is not None
        if child is head or (last in ATTN_MODULES | MLP_MODULES and not routed):
            found[name] = child
    return found


def _decoder_layers(module: PreTrainedModel, num_layers: int) -> nn.ModuleList:
    """Raises ValueError for an architecture whose layers are not one list."""
    for child in module.base_model.modules():
        if isinstance(child, nn.ModuleList) and len(child) == num_layers:
            return child
    raise ValueError(f"{module.config.model_type} has no list of {num_layers} layers.")


def module_kind(name: str) -> str:
    """ "attn", "mlp" or "unembed" for the name of an adaptable module."""
    last = name.rsplit(".", 1)[-1]
    if last in ATTN_MODULES:
        return "attn"
    return "mlp" if last in MLP_MODULES else "unembed"


def _install(module: PreTrainedModel, context: ForwardContext) -> None:
    for name, linear in adaptable_linears(module).items():
        parent_name, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent_name), attribute, LoraLinear(linear, name=name, context=context))
    for child in module.modules():
        if hasattr(child, "layer_idx"):
            # Not a submodule: a plain attribute that the attention function finds.
            object.__setattr__(child, "opentinker_context", context)


def _lora_linears(module: nn.Module) -> dict[str, LoraLinear]:
    return {name: child for name, child in module.named_modules() if isinstance(child, LoraLinear)}


def _describe(module: PreTrainedModel, config: PreTrainedConfig, *, source: ModelSource, tied_head: bool) -> ModelInfo:
    text = config.get_text_config()
    kinds = {module_kind(name) for name in _lora_linears(module)}
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelInfo(
        name=source.name,
        arch=config.model_type,
        vocab_size=text.vocab_size,
        max_context_length=text.max_position_embeddings,
        eos_token_ids=_eos_token_ids(module, text),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        head_dim=head_dim,
        num_attention_heads=text.num_attention_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        tied_head=tied_head,
        accepts_images=hasattr(config, "vision_config"),
        tokenizer_directory=source.directory,
        adaptable=tuple(kind for kind in ("attn", "mlp", "unembed") if kind in kinds),
    )


def _eos_token_ids(module: PreTrainedModel, config: PreTrainedConfig) -> tuple[int, ...]:
    generation = getattr(module, "generation_config", None)
    ids = []
    for value in (getattr(generation, "eos_token_id", None), config.eos_token_id):
        if value is not None:
            ids += list(value) if isinstance(value, list | tuple) else [value]
    return tuple(dict.fromkeys(ids))


def _refuse_batch_dependent_rope(config: PreTrainedConfig) -> None:
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = {parameters.get("rope_type")} | {
        value.get("rope_type") for value in parameters.values() if isinstance(value, dict)
    }
    for kind in kinds & _BATCH_DEPENDENT_ROPE:
        raise ValueError(
            f"Rotary embedding {kind!r} depends on the longest sequence of a batch, so an answer would "
            "depend on its company; not supported."
        )
