"""LoRA on packed token rows: which adapter each row uses, and the linear layer that applies it.

Legend: N token rows, I input features, O output features, R rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from opentinker_server.models.attention import Attention


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """One adapter: `y += scale * (x A^T) B^T` for each module it adapts. Compared by identity."""

    scale: float
    factors: dict[str, tuple[Tensor, Tensor]]
    """Module name of the base model -> (A [R, I], B [O, R]); a module that is absent is not adapted."""

    def to(self, device: torch.device, dtype: torch.dtype) -> "LoraWeights":
        """Copy of the factors where device or dtype differ; shares the tensors where they do not."""
        factors = {
            name: (a_RI.to(device, dtype), b_OR.to(device, dtype)) for name, (a_RI, b_OR) in self.factors.items()
        }
        return LoraWeights(scale=self.scale, factors=factors)


@dataclass(frozen=True, eq=False)
class LoraRows:
    """Which adapter each row of the packed axis uses; rows in no group get the base model's output."""

    groups: tuple[tuple[slice | Tensor, LoraWeights], ...]
    """Disjoint row sets: all slices, in row order, or all int64 index tensors."""

    @classmethod
    def from_segments(cls, segments: Iterable[tuple[int, int, LoraWeights | None]]) -> "LoraRows":
        """segments: (first row, row after the last, adapter or None for the base), not overlapping."""
        groups: list[tuple[slice, LoraWeights]] = []
        for start, end, weights in sorted(segments, key=lambda segment: segment[:2]):
            if groups and start < groups[-1][0].stop:
                raise ValueError(f"Segment ({start}, {end}) overlaps the one before it.")
            if weights is None or start == end:
                continue
            if groups and groups[-1][1] is weights and groups[-1][0].stop == start:
                start = groups.pop()[0].start
            groups.append((slice(start, end), weights))
        return cls(groups=tuple(groups))

    @classmethod
    def from_row_slots(cls, slots_N: Tensor, weights: Sequence[LoraWeights]) -> "LoraRows":
        """slots_N: int64 [N], the index in `weights` of each row's adapter; -1 for the base."""
        groups = []
        for slot, slot_weights in enumerate(weights):
            rows = torch.nonzero(slots_N == slot).squeeze(1)
            if len(rows):
                groups.append((rows, slot_weights))
        return cls(groups=tuple(groups))


@dataclass
class ForwardContext:
    """What the modules of one model see during a call; owned by its BaseModel, whose thread alone sets it."""

    attention: Attention | None = None
    lora: LoraRows | None = None
    num_rows: int = 0
    attention_layers: list[int] = field(default_factory=list)
    """Layers that have called the attention, in call order."""


class LoraLinear(nn.Module):
    """A frozen linear layer whose rows may each use an adapter.

    Computes in the base's dtype: float32 factors on a float32 base are used as they are; on a bfloat16 base
    input and factors are bfloat16 (the float32 masters are cast, and autograd returns float32 gradients).
    """

    def __init__(self, base: nn.Linear, *, name: str, context: ForwardContext) -> None:
        """name: the module's name in the model, the key of `LoraWeights.factors`."""
        super().__init__()
        self.base = base
        self.name = name
        self._context = context

    @property
    def weight(self) -> nn.Parameter:
        """[O, I], shared with the linear layer it stands for."""
        return self.base.weight

    @property
    def bias(self) -> nn.Parameter | None:
        """[O], shared likewise."""
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., I], whose leading axes flatten to the call's rows. Returns [..., O]."""
        out = self.base(x)
        lora = self._context.lora
        if lora is None:
            return out
        out_NO = out.reshape(-1, out.shape[-1])
        assert out_NO.shape[0] == self._context.num_rows, f"{self.name} does not see the packed rows"
        return add_lora(out_NO, x.reshape(-1, x.shape[-1]), lora, self.name).reshape(out.shape)


def add_lora(out_NO: Tensor, x_NI: Tensor, lora: LoraRows, name: str) -> Tensor:
    """`out_NO` plus each row's adapter for the module `name`; differentiable in x, A and B, never in place."""
    groups = [(rows, weights) for rows, weights in lora.groups if name in weights.factors]
    if not groups:
        return out_NO
    if isinstance(groups[0][0], Tensor):
        for rows, weights in groups:
            delta = _shrink(x_NI[rows], weights, name) @ _cast(weights.factors[name][1], x_NI).T
            out_NO = out_NO.index_add(0, rows, delta, alpha=weights.scale)
        return out_NO
    pieces = []
    row = 0
    for rows, weights in groups:
        b_RO = _cast(weights.factors[name][1], x_NI).T
        if rows.start > row:
            pieces.append(out_NO[row : rows.start])
        pieces.append(torch.addmm(out_NO[rows], _shrink(x_NI[rows], weights, name), b_RO, alpha=weights.scale))
        row = rows.stop
    if row < out_NO.shape[0]:
        pieces.append(out_NO[row:])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _shrink(x_NI: Tensor, weights: LoraWeights, name: str) -> Tensor:
    return x_NI @ _cast(weights.factors[name][0], x_NI).T


def _cast(factor: Tensor, x: Tensor) -> Tensor:
    return factor.to(x.dtype)
