"""One node for the frozen layer and the delta: the same numbers as two."""

import pytest
import torch
from opentinker_kernels import FactorGradients, SlotFactors, group_rows, lora_delta_, lora_linear


@pytest.mark.parametrize("slots", [[0, 0, 1, -1, 1, 0, -1], [-1, -1, -1], [1, 1, 1, 1], [2, 2, 0]])
def test_outputs_and_gradients_equal_those_of_two_nodes(slots: list[int]) -> None:
    """Slot 2 has no factors in this layer."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(6, 5).requires_grad_(False)
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((3, 6), (5, 3), (2, 6), (5, 2))]
    weights = [
        SlotFactors(A_RK=leaves[0], B_OR=leaves[1], scale=0.5),
        SlotFactors(A_RK=leaves[2], B_OR=leaves[3], scale=2.0),
        None,
    ]
    groups = group_rows(slots, 3)
    x = torch.randn(len(slots), 6, requires_grad=True)
    g = torch.randn(len(slots), 5)
    results = []
    for out in (lora_linear(x, linear, weights, groups), lora_delta_(linear(x), x, weights, groups)):
        results.append((out, *torch.autograd.grad(out, [x, *leaves], g, allow_unused=True)))
    for ours, theirs in zip(*results, strict=True):
        if theirs is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_gathered_gradients_are_those_of_the_factors() -> None:
    """Ranks 3 and 2 side by side, a slot without factors, and one without rows."""
    torch.manual_seed(1)
    linear = torch.nn.Linear(6, 5).requires_grad_(False)
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((3, 6), (5, 3), (2, 6), (5, 2))]
    weights = [
        SlotFactors(A_RK=leaves[0], B_OR=leaves[1], scale=0.5),
        SlotFactors(A_RK=leaves[2], B_OR=leaves[3], scale=2.0),
        None,
        SlotFactors(A_RK=leaves[0], B_OR=leaves[1], scale=1.0),
    ]
    groups = group_rows([0, 1, 1, 2, 0, -1], 4)
    x, g = torch.randn(6, 6), torch.randn(6, 5)
    plain = torch.autograd.grad(lora_linear(x, linear, weights, groups), leaves, g)
    gathered = FactorGradients()
    out = lora_linear(x, linear, weights, groups, gather=(gathered, "q_proj"))
    assert torch.autograd.grad(out, gathered.anchor, g, allow_unused=True) == (None,)
    found = [grad for slot, rank in ((0, 3), (1, 2)) for grad in gathered.of("q_proj", slot, rank)]
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert gathered.of("q_proj", 3, 3) is None and gathered.of("k_proj", 0, 3) is None
