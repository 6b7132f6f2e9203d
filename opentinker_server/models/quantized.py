"""A base model whose linear layers are kept in four bits: NF4 (arXiv:2305.14314), by bitsandbytes.

Weights alone are quantised, in blocks of 64, so a row's answer depends on that row only; eight-bit schemes that
quantise activations across a batch do not have this property and are not offered. The head and the embeddings stay as
they are. Adapters see an ordinary linear layer.
"""

import functools
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from transformers import BitsAndBytesConfig

NF4 = "nf4"


def nf4_config(dtype: torch.dtype) -> BitsAndBytesConfig:
    """For `from_pretrained`; products are computed in `dtype`. Raises ValueError when bitsandbytes is missing."""
    if find_spec("bitsandbytes") is None:
        raise ValueError("quantization nf4 needs bitsandbytes: pip install 'opentinker[quantized]'")
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=NF4, bnb_4bit_compute_dtype=dtype)


def use_exact_products(module: nn.Module) -> None:
    """Every four-bit layer multiplies with the numbers that its bits stand for, in the dtype of its input.

    The library's own forward rounds to bfloat16 where its input needs no gradient, and not elsewhere: a trainer and a
    sampler would disagree.
    """
    for child in module.modules():
        if _quant_state(child) is not None:
            child.forward = functools.partial(_forward, child)


def _quant_state(module: nn.Module):  # type: ignore[no-untyped-def]
    return getattr(getattr(module, "weight", None), "quant_state", None)


def _dense_weight(linear: nn.Linear, dtype: torch.dtype) -> Tensor:
    """[O, I]."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(linear.weight.data, _quant_state(linear)).to(dtype)


def _forward(linear: nn.Linear, x: Tensor) -> Tensor:
    out = _Product.apply(x, linear)
    return out if linear.bias is None else out + linear.bias.to(out.dtype)


class _Product(torch.autograd.Function):
    """x W^T; the backward pass makes W dense again instead of keeping it."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, linear: nn.Linear) -> Tensor:  # type: ignore[override]
        ctx.linear = linear  # type: ignore[attr-defined]
        return torch.nn.functional.linear(x, _dense_weight(linear, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor):  # type: ignore[no-untyped-def, override]
        return g @ _dense_weight(ctx.linear, g.dtype), None


def dense_state(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The model's tensors by name, those of four bits as the numbers that they stand for."""
    state = module.state_dict()
    for name, child in module.named_modules():
        if _quant_state(child) is not None:
            for key in [key for key in state if key.startswith(f"{name}.weight.")]:
                del state[key]
            state[f"{name}.weight"] = _dense_weight(child, dtype)
    return state
