"""The live state of one adapter: weights, accumulated gradient, optimizer state.

All parameters of an adapter lie end to end in one tensor, its gradient and moments likewise, so that an optimizer
step is one operation however many modules there are; the factors are views.

Shape legend: R rank, P parameters of an adapter.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch

from opentinker_server.models.base import BaseModel
from opentinker_server.models.lora import LoraWeights
from opentinker_server.models.peft_adapter import LoraSettings, init_adapter
from opentinker_server.training.optimizer import AdamState

Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(kw_only=True)
class LiveAdapter:
    """Everything that training changes."""

    lora: LoraSettings
    """How it is built."""

    flat_P: torch.Tensor
    """float32: A and B of each module, modules in sorted order. Optimizer steps write into it."""

    weights: LoraWeights
    """Views of `flat_P`, leaf tensors that require gradients."""

    adam: AdamState
    """Moments, each one tensor [P], and step count."""

    gradient_P: torch.Tensor | None = None
    """Sum over the calls since the last step; absent before the first."""

    def alias(self, dtype: torch.dtype) -> LoraWeights:
        """The weights once more in the dtype of the model, as leaves: calls that share a pass get a gradient each."""
        return _as_leaves(self.flat_P.to(dtype), like=self.weights)

    def accumulate(self, gradient_P: torch.Tensor) -> None:
        """Adds the gradient of one call; takes ownership of it."""
        self.gradient_P = gradient_P if self.gradient_P is None else self.gradient_P.add_(gradient_P)

    def take_gradient(self) -> torch.Tensor:
        """The accumulated gradient [P], zero where there is none; forgets it."""
        gradient_P, self.gradient_P = self.gradient_P, None
        return torch.zeros_like(self.flat_P) if gradient_P is None else gradient_P

    def moments(self) -> dict[str, Factors]:
        """ "first" and "second" by module, views."""
        return {
            "first": split(self.adam.first[0], like=self.weights.factors),
            "second": split(self.adam.second[0], like=self.weights.factors),
        }

    def copy_weights(self) -> LoraWeights:
        """A copy without gradients that later steps do not reach."""
        return LoraWeights(scale=self.weights.scale, factors=split(self.flat_P.clone(), like=self.weights.factors))


def fresh_adapter(base: BaseModel, lora: LoraSettings) -> LiveAdapter:
    """An adapter with seeded initial weights and an optimizer that has not stepped."""
    return adapter_from(lora, init_adapter(lora, base))


def adapter_from(
    lora: LoraSettings, factors: Factors, *, moments: dict[str, Factors] | None = None, step: int = 0
) -> LiveAdapter:
    """An adapter with the given weights (copied) and optimizer state; without `moments` these start at zero."""
    flat_P = flatten(factors)
    adam = AdamState.fresh([flat_P])
    if moments is not None:
        adam = AdamState(first=[flatten(moments["first"])], second=[flatten(moments["second"])], step=step)
    weights = _as_leaves(flat_P, like=LoraWeights(scale=lora.scale, factors=factors))
    return LiveAdapter(lora=lora, flat_P=flat_P, weights=weights, adam=adam)


@torch.no_grad()
def flatten(factors: Factors) -> torch.Tensor:
    """A copy [P], float32: A and B of each module, modules in sorted order."""
    return torch.cat([tensor.reshape(-1) for name in sorted(factors) for tensor in factors[name]]).float()


def split(flat_P: torch.Tensor, *, like: Factors) -> Factors:
    """Views of `flat_P` in the shapes of `like`; inverse of `flatten`."""
    shapes = [tensor.shape for name in sorted(like) for tensor in like[name]]
    ends = list(accumulate(shape.numel() for shape in shapes))
    views = [flat_P[end - shape.numel() : end].view(shape) for shape, end in zip(shapes, ends, strict=True)]
    return {name: (views[2 * index], views[2 * index + 1]) for index, name in enumerate(sorted(like))}


def _as_leaves(flat_P: torch.Tensor, *, like: LoraWeights) -> LoraWeights:
    factors = split(flat_P.detach(), like=like.factors)
    return LoraWeights(
        scale=like.scale,
        factors={name: (a.detach().requires_grad_(), b.detach().requires_grad_()) for name, (a, b) in factors.items()},
    )
