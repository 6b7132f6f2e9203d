"""The low-rank factors of the slots, in the two forms that the grouped delta takes.

Shape legend: S slots, R rank (of one slot, or the largest a stack can hold), K input features, O output
features.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class SlotFactors:
    """One slot's own tensors: delta = scale * (x A^T) B^T. The differentiable form."""

    A_RK: torch.Tensor
    B_OR: torch.Tensor
    scale: float

    def __post_init__(self) -> None:
        if self.A_RK.dim() != 2 or self.B_OR.dim() != 2 or self.A_RK.shape[0] != self.B_OR.shape[1]:
            raise ValueError(f"A [r, in] and B [out, r] do not fit: {self.A_RK.shape}, {self.B_OR.shape}")


class StackedSlots:
    """Factors of all slots of one linear, padded to the largest rank. The form for inference.

    Slots change hands, so the invariant is kept by `write` and `clear`: beyond a slot's rank both factors are
    zero, and nothing of its last owner remains. Not differentiable.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_rank: int,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.A_SRK = torch.zeros(num_slots, max_rank, in_features, dtype=dtype, device=device)
        # Rank before output: the layout in which the expand reads whole rows, on the CPU up to twice as fast.
        self.B_SRO = torch.zeros(num_slots, max_rank, out_features, dtype=dtype, device=device)
        self.rank_S = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.scale_S = torch.zeros(num_slots, dtype=torch.float32, device=device)
        # The same two on the host, to plan a launch without reading the device.
        self.ranks = [0] * num_slots
        self.scales = [0.0] * num_slots

    @property
    def num_slots(self) -> int:
        return self.A_SRK.shape[0]

    @property
    def max_rank(self) -> int:
        return self.A_SRK.shape[1]

    @torch.no_grad()
    def write(self, slot: int, A_RK: torch.Tensor, B_OR: torch.Tensor, *, scale: float) -> None:
        """Give `slot` to new factors. Raises ValueError if they do not fit; the slot then keeps its old ones."""
        rank = A_RK.shape[0]
        in_features, out_features = self.A_SRK.shape[2], self.B_SRO.shape[2]
        if A_RK.shape != (rank, in_features) or B_OR.shape != (out_features, rank) or rank > self.max_rank:
            raise ValueError(
                f"A {list(A_RK.shape)} and B {list(B_OR.shape)} do not fit a slot of rank <= {self.max_rank}, "
                f"A [r, {in_features}], B [{out_features}, r]"
            )
        self.clear(slot)
        self.A_SRK[slot, :rank].copy_(A_RK)
        self.B_SRO[slot, :rank].copy_(B_OR.t())
        self._set_header(slot, rank, scale)

    @torch.no_grad()
    def clear(self, slot: int) -> None:
        """Empty `slot`: rank 0, its rows get no delta from this linear."""
        self._set_header(slot, 0, 0.0)
        self.A_SRK[slot].zero_()
        self.B_SRO[slot].zero_()

    def _set_header(self, slot: int, rank: int, scale: float) -> None:
        self.rank_S[slot] = self.ranks[slot] = rank
        self.scale_S[slot] = self.scales[slot] = scale
