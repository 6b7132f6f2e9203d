"""Adam with decoupled weight decay, one state per adapter.

Step t on weight w with gradient g (Kingma & Ba 2015, arXiv:1412.6980; decay after Loshchilov & Hutter 2019,
arXiv:1711.05101):

    g <- g * min(1, grad_clip_norm / |g|)           |g| over all of the adapter's tensors; 0 turns it off
    m <- beta1 * m + (1 - beta1) * g
    v <- beta2 * v + (1 - beta2) * g^2
    w <- w * (1 - learning_rate * weight_decay)
    w <- w - learning_rate * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

eps is added outside the square root, as torch.optim.Adam does. A zero gradient on zero moments leaves w as it
is, bit for bit, when there is no decay (0 / (0 + eps) = 0).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from opentinker_server.training.errors import NonFiniteGradient

_LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)
"""Above it the second moment could overflow and stay infinite for ever."""
_NORM_PIECE = 2**16


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """Settings of one step; nothing of them is remembered for the next."""

    learning_rate: float = 1e-4
    """Step size."""

    beta1: float = 0.9
    """Decay of the first moment, in [0, 1)."""

    beta2: float = 0.95
    """Decay of the second moment, in [0, 1)."""

    eps: float = 1e-12
    """Added to the square root of the second moment."""

    weight_decay: float = 0.0
    """Decoupled: weights are multiplied by 1 - learning_rate * weight_decay."""

    grad_clip_norm: float = 0.0
    """Largest L2 norm of the adapter's whole gradient; 0 turns clipping off."""


@dataclass(kw_only=True)
class AdamState:
    """Moments and step count of one adapter; float32, shaped like the weights."""

    first: list[torch.Tensor]
    """Running mean of the gradient, m."""

    second: list[torch.Tensor]
    """Running mean of its square, v."""

    step: int = field(default=0)
    """Steps taken, t."""

    @staticmethod
    def fresh(weights: Sequence[torch.Tensor]) -> "AdamState":
        """Zero moments for `weights`."""
        return AdamState(
            first=[torch.zeros_like(weight, requires_grad=False) for weight in weights],
            second=[torch.zeros_like(weight, requires_grad=False) for weight in weights],
        )


@dataclass(frozen=True, kw_only=True)
class AdamStep:
    """What one adapter's step needs."""

    weights: Sequence[torch.Tensor]
    """float32, changed in place."""

    gradients: Sequence[torch.Tensor]
    """float32, shaped like the weights; may be overwritten."""

    state: AdamState
    """Changed in place."""

    settings: AdamSettings
    """Of this step."""


@torch.no_grad()
def adam_steps(steps: Sequence[AdamStep]) -> list[float | NonFiniteGradient]:
    """One step for each adapter: its gradient norm before clipping, or why it was refused.

    Steps of equal settings are one fused operation over all their tensors, each with its own count. A step is
    refused, its weights and state untouched, when its norm is NaN, infinite, or so large (1.8e19 after clipping) that
    its square would be.
    """
    outcomes = [_clip(step) for step in steps]
    by_settings: dict[AdamSettings, list[AdamStep]] = {}
    for step, outcome in zip(steps, outcomes, strict=True):
        if not isinstance(outcome, NonFiniteGradient):
            by_settings.setdefault(step.settings, []).append(step)
    for settings, together in by_settings.items():
        _apply(together, settings)
    return outcomes


def _clip(step: AdamStep) -> float | NonFiniteGradient:
    norm = _norm(step.gradients, torch.float32)
    if norm == math.inf:  # of squares that only float64 can hold
        norm = _norm(step.gradients, torch.float64)
    clip = step.settings.grad_clip_norm
    applied_norm = clip if 0 < clip < norm else norm
    if not applied_norm < _LARGEST_NORM or not math.isfinite(norm):
        return NonFiniteGradient(
            f"The gradient's norm is {norm}: the optimizer step was refused and the gradient dropped; "
            "weights, moments and step are as before. Look for extreme ratios or advantages in the data."
        )
    if applied_norm < norm:
        torch._foreach_mul_(list(step.gradients), applied_norm / norm)
    return norm


def _norm(gradients: Sequence[torch.Tensor], dtype: torch.dtype) -> float:
    """L2 norm over all tensors: of pieces in `dtype`, of the pieces' norms in float64."""
    pieces = [piece for tensor in gradients for piece in tensor.reshape(-1).split(_NORM_PIECE)]
    norms = torch._foreach_norm(pieces, 2, dtype=dtype)
    return float(torch.linalg.vector_norm(torch.stack(list(norms)).double()))


def _apply(steps: Sequence[AdamStep], settings: AdamSettings) -> None:
    """torch.optim.AdamW's fused kernel, which reads and writes each tensor once."""
    counts = []
    for step in steps:
        step.state.step += 1
        counts += [torch.tensor(float(step.state.step), device=step.weights[0].device)] * len(step.weights)
    torch._fused_adamw_(
        [tensor for step in steps for tensor in step.weights],
        [tensor for step in steps for tensor in step.gradients],
        [tensor for step in steps for tensor in step.state.first],
        [tensor for step in steps for tensor in step.state.second],
        [],
        counts,
        lr=settings.learning_rate,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=None,
    )
