"""The grouped low-rank delta in its plainest form: the oracle that every faster path is tested against."""

from collections.abc import Sequence

import torch

from opentinker_kernels.grouping import RowGroups


def lora_delta_reference(
    x_NK: torch.Tensor,
    A_S: Sequence[torch.Tensor | None] | torch.Tensor,
    B_S: Sequence[torch.Tensor | None] | torch.Tensor,
    scales: Sequence[float] | torch.Tensor,
    groups: RowGroups,
) -> torch.Tensor:
    """Delta [N, O] with delta[n] = scale_s * B_s (A_s x[n]) for the slot s of row n, zero for rows without one.

    A_S, B_S: per slot A [r_s, K] and B [O, r_s], or stacked [S, R, K] and [S, O, R]; None for a slot that
    has no factors here. Accumulates in float32 (float64 for float64 input) and returns that dtype.
    Differentiable in x, A and B by ordinary autograd.
    """
    dtype = torch.float64 if x_NK.dtype == torch.float64 else torch.float32
    num_out = next((B.shape[0] for B in B_S if B is not None), None)
    if num_out is None:
        raise ValueError("at least one slot must have factors: the output width is read from them")
    delta_NO = x_NK.new_zeros((x_NK.shape[0], num_out), dtype=dtype)
    for slot in groups.slots:
        A_RK, B_OR = A_S[slot], B_S[slot]
        if A_RK is None or B_OR is None:
            continue
        rows = (groups.slot_of_row_N == slot).nonzero().squeeze(1)
        h_PR = x_NK[rows].to(dtype) @ A_RK.to(dtype).t()
        delta_NO = delta_NO.index_copy(0, rows, float(scales[slot]) * (h_PR @ B_OR.to(dtype).t()))
    return delta_NO
