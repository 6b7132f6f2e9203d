"""LoRA on packed token rows: which adapter each row uses, and the linear layer that applies it.

Legend: N token rows, I input features, O output features, R rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from opentinker_kernels import FactorGradients, RowGroups, SlotFactors, group_rows, lora_linear
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
    """Which adapter each row of the packed axis uses; rows of none get the base model's output."""

    adapters: tuple[LoraWeights, ...]
    slot_of_row: tuple[int, ...]
    """Index in `adapters` of each row's adapter, -1 for the base; rows after the last are the base's."""
    gradients: FactorGradients | None = None
    """Where a backward pass puts the gradients of the factors, instead of giving them to the factors."""
    _groups: dict[tuple[int, torch.device], RowGroups] = field(default_factory=dict, repr=False)

    @classmethod
    def from_segments(
        cls, segments: Iterable[tuple[int, int, LoraWeights | None]], *, gradients: FactorGradients | None = None
    ) -> "LoraRows":
        """segments: (first row, row after the last, adapter or None for the base), not overlapping."""
        slots: dict[LoraWeights, int] = {}
        slot_of_row: list[int] = []
        for start, end, weights in sorted(segments, key=lambda segment: segment[:2]):
            if start < len(slot_of_row):
                raise ValueError(f"Segment ({start}, {end}) overlaps the one before it.")
            slot_of_row += [-1] * (start - len(slot_of_row))
            slot = -1 if weights is None or start == end else slots.setdefault(weights, len(slots))
            slot_of_row += [slot] * (end - start)
        return cls(adapters=tuple(slots), slot_of_row=tuple(slot_of_row), gradients=gradients)

    @classmethod
    def from_row_slots(cls, slots_N: Tensor | Sequence[int], weights: Sequence[LoraWeights]) -> "LoraRows":
        """slots_N: int64 [N], the index in `weights` of each row's adapter; -1 for the base."""
        slot_of_row = slots_N.tolist() if isinstance(slots_N, Tensor) else slots_N
        return cls(adapters=tuple(weights), slot_of_row=tuple(slot_of_row))

    def groups(self, num_rows: int, device: torch.device) -> RowGroups:
        """The rows sorted by adapter, worked out once for all modules."""
        key = (num_rows, device)
        if key not in self._groups:
            slots = list(self.slot_of_row) + [-1] * (num_rows - len(self.slot_of_row))
            assert len(slots) == num_rows, f"adapters for {len(slots)} rows, {num_rows} rows"
            self._groups[key] = group_rows(slots, len(self.adapters), device=device)
        return self._groups[key]

    def factors(self, name: str) -> list[SlotFactors | None]:
        """The factors of module `name`, one entry per adapter."""
        pairs = [(weights, weights.factors.get(name)) for weights in self.adapters]
        return [pair and SlotFactors(A_RK=pair[0], B_OR=pair[1], scale=weights.scale) for weights, pair in pairs]


@dataclass
class ForwardContext:
    """What the modules of one model see during a call; owned by its BaseModel, whose thread alone sets it."""

    attention: Attention | None = None
    lora: LoraRows | None = None
    num_rows: int = 0
    attention_layers: list[int] = field(default_factory=list)
    """Layers that have called the attention, in call order."""
    recompute: bool = False
    """Keep only each layer's input for the backward pass, which computes the layer again."""


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
    def weight(self) -> Tensor:
        """[O, I], shared with the linear layer it stands for."""
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        """[O], shared likewise."""
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., I], whose leading axes flatten to the call's rows. Returns [..., O]."""
        lora = self._context.lora
        if lora is None:
            return self.base(x)
        x_NI = x.reshape(-1, x.shape[-1])
        num_rows = self._context.num_rows
        assert x_NI.shape[0] == num_rows, f"{self.name} does not see the packed rows"
        gather = None if lora.gradients is None else (lora.gradients, self.name)
        groups = lora.groups(num_rows, x_NI.device)
        out_NO = lora_linear(x_NI, self.base, lora.factors(self.name), groups, gather=gather)
        return out_NO.view(*x.shape[:-1], -1)
