"""The one entry point: chooses the path by device, kind of weights and need of gradients."""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch

from opentinker_kernels.batched import FactorGradients, Weights, add_delta_, add_delta_with_grad
from opentinker_kernels.grouping import RowGroups
from opentinker_kernels.weights import SlotFactors, StackedSlots


def lora_linear(
    x: torch.Tensor,
    linear: torch.nn.Linear,
    weights: Sequence[SlotFactors | None],
    groups: RowGroups,
    *,
    gather: tuple[FactorGradients, str] | None = None,
) -> torch.Tensor:
    """A frozen linear layer with each row's low-rank delta, [..., O]; differentiable as `lora_delta_` is.

    One autograd node carries the gradient through both. x and weights: as `lora_delta_`. gather: where the backward
    pass puts the gradients of the factors, under which name, instead of giving them to the factors.
    """
    if not torch.is_grad_enabled() or all(weights[slot] is None for slot in groups.slots):
        return lora_delta_(linear(x), x, weights, groups)
    fused = type(linear) is torch.nn.Linear and "forward" not in vars(linear) and not linear.weight.requires_grad
    with torch.set_grad_enabled(not fused):
        out = linear(x)
    _check(out, x, weights, groups)
    return add_delta_with_grad(out, x, weights, groups, base_OK=linear.weight if fused else None, gather=gather)


def lora_delta_(out: torch.Tensor, x: torch.Tensor, weights: Weights, groups: RowGroups) -> torch.Tensor:
    """Add each row's low-rank delta to `out` in place and return it; use the returned tensor.

    out: [..., O], the base projection of `x`; rows of slot -1 keep their bits.
    x: [..., K], same dtype and leading dimensions, `groups.num_rows` rows in all.
    weights: one entry per slot. A sequence of `SlotFactors` (None: no factors in this linear) is
        differentiable, with gradients to `out`, `x` and the factors of the slots that have rows; the others
        get none at all. `StackedSlots` is for inference and refuses inputs that need gradients.
    groups: from `group_rows`, on the device of `x`.

    Path: `StackedSlots` on CUDA in float32, float16 or bfloat16 -> the Triton kernels, where Triton is
    installed. Everything else -> torch operations (`batched`), the fast path of the CPU and of training.
    Accumulates in float32; the torch path rounds the shrunk rows to the dtype of `x`, the kernels do not.

    Raises ValueError where shapes, dtypes or devices do not fit.
    """
    _check(out, x, weights, groups)
    if groups.is_empty:
        return out
    if not isinstance(weights, StackedSlots) and all(weights[slot] is None for slot in groups.slots):
        return out
    if _needs_grad(out, x, weights, groups):
        if isinstance(weights, StackedSlots):
            raise ValueError("StackedSlots are for inference; pass SlotFactors where gradients are needed")
        return add_delta_with_grad(out, x, weights, groups)
    # No input needs a gradient: in-place operations record nothing.
    out_NO = out if out.dim() == 2 else out.view(-1, out.shape[-1])
    x_NK = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if isinstance(weights, StackedSlots) and x_NK.is_cuda and _triton_fits(out_NO, x_NK):
        from opentinker_kernels import triton_kernels

        triton_kernels.add_delta_(out_NO, x_NK, weights, groups)
    else:
        add_delta_(out_NO, x_NK, weights, groups)
    return out


def _needs_grad(out: torch.Tensor, x: torch.Tensor, weights: Weights, groups: RowGroups) -> bool:
    if not torch.is_grad_enabled():
        return False
    if out.requires_grad or x.requires_grad:
        return True
    if isinstance(weights, StackedSlots):
        return False
    own_G = (weights[slot] for slot in groups.slots)
    return any(own is not None and (own.A_RK.requires_grad or own.B_OR.requires_grad) for own in own_G)


def _triton_fits(out_NO: torch.Tensor, x_NK: torch.Tensor) -> bool:
    adjacent = x_NK.stride(1) == 1 and out_NO.stride(1) == 1
    return adjacent and x_NK.dtype in (torch.float32, torch.float16, torch.bfloat16) and _triton_installed()


@cache
def _triton_installed() -> bool:
    return find_spec("triton") is not None


def _check(out: torch.Tensor, x: torch.Tensor, weights: Weights, groups: RowGroups) -> None:
    num_slots = weights.num_slots if isinstance(weights, StackedSlots) else len(weights)
    if out.shape[:-1] != x.shape[:-1] or x.shape[:-1].numel() != groups.num_rows:
        raise ValueError(
            f"out {list(out.shape)} and x {list(x.shape)} do not have the {groups.num_rows} rows of the groups"
        )
    if out.dtype != x.dtype:
        raise ValueError(f"out is {out.dtype}, x is {x.dtype}")
    if out.device != x.device or groups.device != x.device:
        raise ValueError(f"out is on {out.device}, x on {x.device}, the groups on {groups.device}")
    if num_slots < groups.num_slots:
        raise ValueError(f"weights for {num_slots} slots, groups over {groups.num_slots}")
