"""The oracle against a row-by-row formula, and the import contract."""

import subprocess
import sys

import pytest
import torch
from opentinker_kernels import group_rows, lora_delta_reference


def test_reference_equals_the_formula_row_by_row(make):
    case = make(slot_of_row=[1, -1, 0, 1, 3], ranks=[2, 5, 4, None], num_in=7, num_out=3, dtype=torch.float64)
    for n, slot in enumerate([1, -1, 0, 1, 3]):
        own = case.own[slot] if slot >= 0 else None
        expected = torch.zeros(3, dtype=torch.float64)
        if own is not None:
            expected = own.scale * own.B_OR @ (own.A_RK @ case.x_NK[n])
        torch.testing.assert_close(case.delta_NO[n], expected, rtol=1e-12, atol=1e-12)


def test_reference_takes_stacks_and_accumulates_in_float32():
    x, A, B = torch.randn(4, 6).bfloat16(), torch.randn(2, 3, 6).bfloat16(), torch.randn(2, 5, 3).bfloat16()
    delta = lora_delta_reference(x, A, B, torch.tensor([2.0, 0.5]), group_rows([0, 1, -1, 1], 2))
    assert delta.dtype == torch.float32 and delta[2].eq(0).all()
    torch.testing.assert_close(delta[1], 0.5 * (B[1].float() @ (A[1].float() @ x[1].float())))


def test_reference_without_any_factors_is_refused():
    with pytest.raises(ValueError, match="output width"):
        lora_delta_reference(torch.zeros(1, 2), [None], [None], [1.0], group_rows([0], 1))


def test_package_and_torch_path_import_no_triton():
    code = (
        "import sys, torch, opentinker_kernels as k\n"
        "s = k.StackedSlots(num_slots=1, max_rank=2, in_features=3, out_features=4, dtype=torch.float32)\n"
        "k.lora_delta_(torch.zeros(2, 4), torch.zeros(2, 3), s, k.group_rows([0, -1], 1))\n"
        "assert 'triton' not in sys.modules and 'opentinker_kernels.triton_kernels' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
