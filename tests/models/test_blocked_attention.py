"""The CPU's attention and its gradients are those of the plain formula."""

import pytest
import torch
from torch import Tensor

from opentinker_server.models.blocked_attention import blocked_attention


def plain(query_SLHD: Tensor, key_SLGD: Tensor, value_SLGD: Tensor, *, scaling: float, window: int | None) -> Tensor:
    """In float64, every product written out."""
    shared = query_SLHD.shape[2] // key_SLGD.shape[2]
    key_SLHD, value_SLHD = (rows.repeat_interleave(shared, dim=2) for rows in (key_SLGD, value_SLGD))
    scores_SHLL = torch.einsum("slhd,smhd->shlm", query_SLHD, key_SLHD) * scaling
    rows_L = torch.arange(query_SLHD.shape[1])
    distance_LL = rows_L[:, None] - rows_L
    seen_LL = (distance_LL >= 0) & (distance_LL < (window or len(rows_L)))
    probs_SHLL = scores_SHLL.masked_fill(~seen_LL, -torch.inf).softmax(-1)
    return torch.einsum("shlm,smhd->slhd", probs_SHLL, value_SLHD)


@pytest.mark.parametrize("length", [1, 5, 64, 65, 200, 530])
@pytest.mark.parametrize("window", [None, 3, 64, 100])
def test_output_and_gradients_are_those_of_the_formula(length: int, window: int | None) -> None:
    """530 rows are above the length whose probabilities are kept."""
    torch.manual_seed(length)
    num_segments = 3 if length < 100 else 1
    rows = [torch.randn(num_segments, length, heads, 8, requires_grad=True) for heads in (6, 2, 2)]
    out = blocked_attention(*rows, scaling=0.3, window=window)
    exact = [tensor.detach().double().requires_grad_() for tensor in rows]
    wanted = plain(*exact, scaling=0.3, window=window)
    torch.testing.assert_close(out.double(), wanted, atol=2e-6, rtol=1e-5)
    g = torch.randn_like(out)
    found = torch.autograd.grad(out, rows, g)
    for ours, theirs in zip(found, torch.autograd.grad(wanted, exact, g.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-4)


def test_bfloat16_keeps_its_dtype_and_is_near() -> None:
    torch.manual_seed(0)
    rows = [torch.randn(2, 70, heads, 16).bfloat16() for heads in (4, 4, 4)]
    out = blocked_attention(*rows, scaling=0.25, window=None)
    assert out.dtype == torch.bfloat16
    wanted = plain(*[tensor.double() for tensor in rows], scaling=0.25, window=None)
    torch.testing.assert_close(out.double(), wanted, atol=3e-2, rtol=3e-2)
