"""One node for the frozen layer and the delta: the same numbers as two."""

import pytest
import torch
from opentinker_kernels import SlotFactors, group_rows, lora_delta_, lora_linear


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
