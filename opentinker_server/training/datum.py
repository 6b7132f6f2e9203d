"""Training examples, and how they are packed into one row axis without padding.

Shape legend: T target tokens of one datum, K targets per token, N token rows of a pack, M target entries of a
pack (one per token, or K per token for two-dimensional targets), D datums of a pack.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from opentinker_server.training.loss_specs import LossSpec

_FALLBACK = {"weights": 1.0, "mask": 1.0, "clip_low": math.nan, "clip_high": math.nan}
"""Value of an optional input where a datum does not have it; a bound that is NaN is that of the configuration."""


@dataclass(frozen=True, kw_only=True)
class TrainDatum:
    """One validated example. Row t belongs to input position t, which predicts targets[t]."""

    tokens: np.ndarray
    """int64 [T]: what the model reads."""

    targets: np.ndarray
    """int64 [T] or [T, K]: ids whose log-probabilities are wanted."""

    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    """Further inputs of the loss by name: float32 [T], or the shape of `targets`."""

    def entries(self, name: str) -> np.ndarray:
        """Input `name` as float32 [M] over this datum's target entries, row by row.

        An absent `weights` or `mask` is all ones, an absent `clip_low` or `clip_high` all NaN; an absent
        `sequence_ratio_mask` is the mask.
        """
        if name not in self.inputs:
            if name == "sequence_ratio_mask":
                return self.entries("mask")
            return np.full(self.targets.size, _FALLBACK[name], dtype=np.float32)
        values = self.inputs[name]
        if values.ndim < self.targets.ndim:
            values = values[:, None]
        return np.ascontiguousarray(np.broadcast_to(values, self.targets.shape), dtype=np.float32).reshape(-1)


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Datums laid end to end on one row axis, positions restarting at each."""

    segments: tuple[tuple[int, int], ...]
    """Rows [start, end) of each datum: the blocks that attention may not leave."""

    tokens_N: torch.Tensor
    """int64 [N]."""

    positions_N: torch.Tensor
    """int64 [N], from 0 in each datum."""

    rows_M: torch.Tensor
    """int64 [M], ascending: the row of each target entry that takes part in the loss."""

    targets_M: torch.Tensor
    """int64 [M]: the token id of each such entry."""

    datums_M: torch.Tensor
    """int64 [M], ascending: index within the pack of the datum that each entry belongs to."""

    inputs_M: dict[str, torch.Tensor]
    """The loss's inputs by name, float32 [M]."""

    places_M: np.ndarray
    """int64 [M], ascending: index of each entry among all entries of the pack, [E]."""

    rest: "Rest"
    """The entries that take no part: their log-probabilities may be wanted all the same."""

    entry_counts: tuple[int, ...]
    """Number of entries of each datum; they add up to E."""


@dataclass(frozen=True, kw_only=True)
class Rest:
    """Entries without weight: their terms and gradients are exactly zero."""

    rows_M: torch.Tensor
    """int64, ascending."""

    targets_M: torch.Tensor
    """int64."""

    places_M: np.ndarray
    """int64, ascending: index among all entries of the pack."""


def pack_datums(data: Sequence[TrainDatum], spec: LossSpec, *, device: torch.device) -> Pack:
    """Lays `data` end to end, in the given order, with the inputs that the loss declares."""
    lengths = [len(datum.tokens) for datum in data]
    starts = np.cumsum([0, *lengths])
    entry_counts = tuple(datum.targets.size for datum in data)
    rows = np.concatenate(
        [
            np.repeat(np.arange(start, start + length), count // length)
            for start, length, count in zip(starts[:-1], lengths, entry_counts, strict=True)
        ]
    )
    targets = np.concatenate([datum.targets.reshape(-1) for datum in data])
    names = (spec.required | spec.optional) - {"target_tokens"}
    inputs = {name: np.concatenate([datum.entries(name) for datum in data]) for name in sorted(names)}
    taking_part = _taking_part(inputs, len(rows))
    places, rest = np.flatnonzero(taking_part), np.flatnonzero(~taking_part)

    def tensor(values: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype)

    return Pack(
        segments=tuple((int(start), int(end)) for start, end in pairwise(starts)),
        tokens_N=tensor(np.concatenate([datum.tokens for datum in data])),
        positions_N=tensor(np.concatenate([np.arange(length) for length in lengths])),
        rows_M=tensor(rows[places]),
        targets_M=tensor(targets[places]),
        datums_M=tensor(np.repeat(np.arange(len(data)), entry_counts)[places]),
        inputs_M={name: tensor(values[places], torch.float32) for name, values in inputs.items()},
        places_M=places,
        rest=Rest(rows_M=tensor(rows[rest]), targets_M=tensor(targets[rest]), places_M=rest),
        entry_counts=entry_counts,
    )


def _taking_part(inputs: dict[str, np.ndarray], num_entries: int) -> np.ndarray:
    """bool [E]: not left out by the mask (nor by that of a sequence ratio), and not of weight zero."""
    masks = [inputs[name] != 0 for name in ("mask", "sequence_ratio_mask") if name in inputs]
    taking_part = np.logical_or.reduce(masks) if masks else np.ones(num_entries, dtype=bool)
    return taking_part & (inputs["weights"] != 0) if "weights" in inputs else taking_part


def plan_micro_batches(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Splits datums into micro-batches of at most `max_tokens` rows; no datum is ever split.

    Longest first, so that memory peaks in the first micro-batch and datums of equal length, whose attention
    can run as one batch, meet. A datum longer than the budget gets a micro-batch of its own. Returns datum
    indices; each occurs exactly once.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batches: list[list[int]] = []
    room = 0
    for index in order:
        if not batches or lengths[index] > room:
            batches.append([])
            room = max(max_tokens, lengths[index])
        batches[-1].append(index)
        room -= lengths[index]
    return batches
