"""The low-rank factors of the slots, in the two forms that the grouped delta takes.

Shape legend: S slots, G slots of one batch of groups, R rank (of one slot, or the largest a stack can hold),
K input features, O output features.
"""

from dataclasses import dataclass

import torch

from opentinker_kernels.grouping import RowBatch

# Far more choices of slots than a decode goes through before the next write.
_MAX_VIEWS = 64


@dataclass(frozen=True, kw_only=True)
class SlotFactors:
    """One slot's own tensors: delta = scale * (x A^T) B^T. The differentiable form."""

    A_RK: torch.Tensor
    B_OR: torch.Tensor
    scale: float

    def __post_init__(self) -> None:
        if self.A_RK.dim() != 2 or self.B_OR.dim() != 2 or self.A_RK.shape[0] != self.B_OR.shape[1]:
            raise ValueError(f"A [r, in] and B [out, r] do not fit: {self.A_RK.shape}, {self.B_OR.shape}")


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class BatchFactors:
    """Factors of a batch, in its order of slots; 2-D, without G, for a batch of one group."""

    A_GKR: torch.Tensor
    B_GRO: torch.Tensor
    scale: float | torch.Tensor
    """[G, 1, 1] where the slots differ, at least float32: a scale is never rounded to a 16-bit dtype."""


def common_scale(scales: list[float | None], *, dtype: torch.dtype, device: torch.device) -> float | torch.Tensor:
    """One number where the slots agree; None stands for a slot without factors, which agrees with any."""
    distinct = {scale for scale in scales if scale is not None}
    if len(distinct) == 1:
        return distinct.pop()
    scale_dtype = torch.promote_types(dtype, torch.float32)
    return torch.tensor([scale or 0.0 for scale in scales], dtype=scale_dtype, device=device)[:, None, None]


class StackedSlots:
    """Factors of all slots of one linear, padded to the largest rank. The form for inference.

    Slots change hands, so the invariant is kept by `write` and `clear`: beyond a slot's rank both factors are
    zero, and nothing of its last owner remains. Not differentiable. Slots used together are read fastest where
    they have neighbouring numbers: hand out the lowest free slot.
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
        # Views of runs of slots, by slots: making them anew would cost a linear as much as its matmuls do.
        self._views: dict[tuple[int, ...], BatchFactors] = {}

    @property
    def num_slots(self) -> int:
        return self.A_SRK.shape[0]

    @property
    def max_rank(self) -> int:
        return self.A_SRK.shape[1]

    @torch.inference_mode()
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

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Empty `slot`: rank 0, its rows get no delta from this linear."""
        self._set_header(slot, 0, 0.0)
        self.A_SRK[slot].zero_()
        self.B_SRO[slot].zero_()

    def read(self, batch: RowBatch, *, dtype: torch.dtype) -> BatchFactors | None:
        """Factors of the batch's slots, up to their largest rank; None if all are empty.

        One slot or a run of ascending slots is read in place, any other choice is copied.
        """
        if dtype == self.A_SRK.dtype and batch.slots in self._views:
            return self._views[batch.slots]
        rank = max([self.ranks[slot] for slot in batch.slots])
        if rank == 0:
            return None
        first, last = batch.slots[0], batch.slots[-1]
        scale = common_scale(
            [self.scales[slot] if self.ranks[slot] else None for slot in batch.slots],
            dtype=dtype,
            device=self.A_SRK.device,
        )
        if not batch.slots_ascend_by_one:
            A_GRK = self.A_SRK.index_select(0, batch.slots_G)[:, :rank].to(dtype)
            B_GRO = self.B_SRO.index_select(0, batch.slots_G)[:, :rank].to(dtype)
            return BatchFactors(A_GKR=A_GRK.mT, B_GRO=B_GRO, scale=scale)
        A_GRK = self.A_SRK[first : last + 1, :rank].to(dtype)
        B_GRO = self.B_SRO[first : last + 1, :rank].to(dtype)
        if first == last:
            A_GRK, B_GRO = A_GRK[0], B_GRO[0]
        factors = BatchFactors(A_GKR=A_GRK.mT, B_GRO=B_GRO, scale=scale)
        if dtype == self.A_SRK.dtype:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            self._views[batch.slots] = factors
        return factors

    def _set_header(self, slot: int, rank: int, scale: float) -> None:
        self._views.clear()
        self.rank_S[slot] = self.ranks[slot] = rank
        self.scale_S[slot] = self.scales[slot] = scale
