"""Linear layers whose rows may each use another adapter.

The base projection runs once over all rows; each group of rows then adds its own adapter's scale * B(A x). Rows in no
group keep the base output. Gradients reach the factors of the adapters that took part, nothing else.

Adapter factors are float32 masters; they are cast to the dtype of the base where they meet it, so a float32 base is
computed in float32 throughout and a bfloat16 base in bfloat16, with gradients arriving in float32.

Shape legend: N rows, K input width, O output width, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

RowSet = slice | torch.Tensor
"""Rows of the packed axis: a slice with bounds, or int64 indices."""


@dataclass(frozen=True)
class LoraWeights:
    """Factors of one adapter."""

    scale: float
    """What the product of the factors is multiplied with."""

    factors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """Module name -> (A [r, in], B [out, r]); a module that is absent is not adapted."""


@dataclass(frozen=True)
class LoraRows:
    """Which rows of a pass use which adapter."""

    groups: tuple[tuple[RowSet, LoraWeights], ...]

    @classmethod
    def from_segments(cls, segments: Sequence[tuple[int, int, LoraWeights | None]]) -> LoraRows:
        """Row ranges [start, end); None means the base model. Neighbours of one adapter are joined."""
        groups: list[tuple[slice, LoraWeights]] = []
        for start, end, weights in segments:
            if weights is None or end <= start:
                continue
            if groups and groups[-1][1] is weights and groups[-1][0].stop == start:
                groups[-1] = (slice(groups[-1][0].start, end), weights)
            else:
                groups.append((slice(start, end), weights))
        return cls(tuple(groups))

    @classmethod
    def from_row_slots(cls, slots: Sequence[int], adapters: Sequence[LoraWeights]) -> LoraRows:
        """`slots[n]` is the index into `adapters` of row n, or -1 for the base model."""
        by_slot: dict[int, list[int]] = {}
        for row, slot in enumerate(slots):
            if slot >= 0:
                by_slot.setdefault(slot, []).append(row)
        groups: list[tuple[RowSet, LoraWeights]] = []
        for slot, rows in by_slot.items():
            contiguous = rows[-1] - rows[0] + 1 == len(rows)
            row_set = slice(rows[0], rows[-1] + 1) if contiguous else torch.tensor(rows)
            groups.append((row_set, adapters[slot]))
        return cls(tuple(groups))


@dataclass
class LoraContext:
    """The rows of the pass that is running; shared by all adapted layers of one base model."""

    rows: LoraRows | None = field(default=None)


class LoraLinear(nn.Module):
    """A frozen linear layer and, for the rows of the running pass, their adapters."""

    def __init__(self, base: nn.Linear, name: str, context: LoraContext):
        super().__init__()
        self.base = base
        self.name = name
        self.context = context

    @property
    def weight(self) -> torch.Tensor:
        """The frozen weight [O, K]."""
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The frozen bias [O], where there is one."""
        return self.base.bias

    @property
    def in_features(self) -> int:
        """K."""
        return self.base.in_features

    @property
    def out_features(self) -> int:
        """O."""
        return self.base.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., N, K] -> [..., N, O]; leading axes have length 1."""
        out = self.base(x)
        rows = self.context.rows
        if rows is None:
            return out
        groups = [
            (row_set, weights.scale, *weights.factors[self.name])
            for row_set, weights in rows.groups
            if self.name in weights.factors
        ]
        if not groups:
            return out
        x_NK, out_NO = x.reshape(-1, x.shape[-1]), out.reshape(-1, out.shape[-1])
        deltas = [
            (row_set, (x_NK[row_set] @ a_RK.to(x.dtype).T) @ b_OR.to(x.dtype).T * scale)
            for row_set, scale, a_RK, b_OR in groups
        ]
        return add_rows(out_NO, deltas).view(out.shape)


def add_rows(out_NO: torch.Tensor, deltas: Sequence[tuple[RowSet, torch.Tensor]]) -> torch.Tensor:
    """Adds each delta to its rows; differentiable, and in place when nothing needs a gradient."""
    if not torch.is_grad_enabled():
        for row_set, delta in deltas:
            if isinstance(row_set, slice):
                out_NO[row_set] += delta
            else:
                out_NO.index_add_(0, row_set, delta)
        return out_NO
    if len(deltas) == 1 and isinstance(deltas[0][0], slice) and len(deltas[0][1]) == len(out_NO):
        return out_NO + deltas[0][1]
    for row_set, delta in deltas:
        index = torch.arange(row_set.start, row_set.stop) if isinstance(row_set, slice) else row_set
        out_NO = out_NO.index_add(0, index.to(out_NO.device), delta)
    return out_NO
