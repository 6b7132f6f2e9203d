"""The replaced normalisations are those of the model, forwards and backwards."""

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from opentinker_server.models.norm import RmsNorm, install_norms


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_a_replaced_norm_computes_what_it_stood_for(kind: type[nn.Module], scale: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(48, 1e-6))
    stock = model[0]
    stock.weight.data.normal_()
    stock.weight.requires_grad_(False)
    install_norms(model)
    assert isinstance(model[0], RmsNorm) and model[0].weight is stock.weight
    x = (torch.randn(2, 7, 48) * scale).requires_grad_()
    torch.testing.assert_close(model(x), stock(x), atol=1e-5, rtol=1e-5)
    g = torch.randn(2, 7, 48)
    (ours,) = torch.autograd.grad(model(x), x, g)
    (theirs,) = torch.autograd.grad(stock(x), x, g)
    torch.testing.assert_close(ours, theirs, atol=float(1e-5 * theirs.abs().max()), rtol=1e-4)


def test_what_only_has_the_name_is_left_alone() -> None:
    class OddRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states).abs()

    model = nn.Sequential(OddRMSNorm(16))
    install_norms(model)
    assert type(model[0]) is OddRMSNorm
