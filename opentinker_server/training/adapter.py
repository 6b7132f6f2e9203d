"""The live state of one adapter: weights, accumulated gradient, optimizer state.

Shape legend: R rank.
"""

from dataclasses import dataclass

import torch

from opentinker_server.models.base import BaseModel
from opentinker_server.models.lora import LoraWeights
from opentinker_server.models.peft_adapter import LoraSettings, init_adapter
from opentinker_server.training.optimizer import AdamState
from opentinker_server.training.passes import Gradients


@dataclass(kw_only=True)
class LiveAdapter:
    """Everything that training changes."""

    lora: LoraSettings
    """How it is built."""

    weights: LoraWeights
    """float32 leaf tensors that require gradients; optimizer steps write into them."""

    adam: AdamState
    """Moments, in the order of `parameters`, and step count."""

    gradient: Gradients | None = None
    """Sum over the calls since the last step; absent before the first."""

    def parameters(self) -> list[torch.Tensor]:
        """A and B of each module, modules in sorted order: the order of every list over parameters."""
        return flatten(self.weights.factors)

    def accumulate(self, gradients: Gradients) -> None:
        """Adds the gradient of one call; takes ownership of its tensors."""
        if self.gradient is None:
            self.gradient = gradients
        else:
            add_gradients(self.gradient, gradients)

    def take_gradient(self) -> list[torch.Tensor]:
        """The accumulated gradient in the order of `parameters`, zero where there is none; forgets it."""
        gradient, self.gradient = self.gradient, None
        if gradient is None:
            return [torch.zeros_like(parameter, requires_grad=False) for parameter in self.parameters()]
        return flatten(gradient)

    def copy_weights(self) -> LoraWeights:
        """A copy without gradients that later steps do not reach."""
        return LoraWeights(
            scale=self.weights.scale,
            factors={name: (a.detach().clone(), b.detach().clone()) for name, (a, b) in self.weights.factors.items()},
        )


def fresh_adapter(base: BaseModel, lora: LoraSettings) -> LiveAdapter:
    """An adapter with seeded initial weights and an optimizer that has not stepped."""
    return adapter_from(lora, init_adapter(lora, base), adam=None)


def adapter_from(
    lora: LoraSettings,
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]],
    *,
    adam: AdamState | None,
) -> LiveAdapter:
    """An adapter with the given weights (copied) and optimizer state; None starts at zero."""
    weights = LoraWeights(
        scale=lora.scale,
        factors={
            name: (a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_())
            for name, (a, b) in factors.items()
        },
    )
    return LiveAdapter(lora=lora, weights=weights, adam=adam or AdamState.fresh(flatten(weights.factors)))


def flatten(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """A and B of each module, modules in sorted order."""
    return [tensor for name in sorted(pairs) for tensor in pairs[name]]


@torch.no_grad()
def add_gradients(total: Gradients, more: Gradients) -> None:
    """Adds `more` to `total` in place; both have the same modules."""
    torch._foreach_add_(flatten(total), flatten(more))
