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


@torch.no_grad()
def adam_step(
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    state: AdamState,
    settings: AdamSettings,
) -> float:
    """One step in place on `weights` (float32) and `state`; returns the gradient norm before clipping.

    `gradients` may be overwritten. Raises NonFiniteGradient, with weights and state untouched, when the norm
    is NaN, infinite, or so large (1.8e19 after clipping) that its square would be.
    """
    norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float64)
    norm = float(torch.linalg.vector_norm(torch.stack(list(norms))))
    clip = settings.grad_clip_norm
    applied_norm = clip if 0 < clip < norm else norm
    if not applied_norm < _LARGEST_NORM or not math.isfinite(norm):
        raise NonFiniteGradient(
            f"The gradient's norm is {norm}: the optimizer step was refused and the gradient dropped; "
            "weights, moments and step are as before. Look for extreme ratios or advantages in the data."
        )
    gradients = list(gradients)
    if applied_norm < norm:
        torch._foreach_mul_(gradients, applied_norm / norm)
    state.step += 1
    torch._foreach_mul_(state.first, settings.beta1)
    torch._foreach_add_(state.first, gradients, alpha=1 - settings.beta1)
    torch._foreach_mul_(state.second, settings.beta2)
    torch._foreach_addcmul_(state.second, gradients, gradients, value=1 - settings.beta2)
    if settings.weight_decay != 0:
        torch._foreach_mul_(list(weights), 1 - settings.learning_rate * settings.weight_decay)
    denominators = torch._foreach_sqrt(state.second)
    torch._foreach_div_(denominators, math.sqrt(1 - settings.beta2**state.step))
    torch._foreach_add_(denominators, settings.eps)
    step_size = settings.learning_rate / (1 - settings.beta1**state.step)
    torch._foreach_addcdiv_(list(weights), state.first, denominators, value=-step_size)
    return norm
