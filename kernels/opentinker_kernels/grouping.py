"""Which token rows belong to which slot, worked out once per step and shared by every adapted linear.

Shape legend: N token rows, P rows that have a slot, G slots present in the step (groups), M rows of the
tallest group of a batch, T tiles.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch

# One more batch costs about as much time as this many padding rows (two matmul calls on two CPU cores,
# hidden size 576, rank 16: about 70 in bfloat16, about 15 in float32).
_PADDING_ROWS_PER_LAUNCH = 32
# From about this height a matmul in place on a slice of rows beats copying the rows into a padded batch.
_TALL_ROWS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class RowBatch:
    """Groups of similar height, run as one padded batched matmul (or as one plain matmul if single)."""

    slots: tuple[int, ...]
    slots_G: torch.Tensor
    """`slots` as int64 [G], on the device of the groups."""
    slots_ascend_by_one: bool
    """The slots can be read from a stack as one slice."""
    height: int
    """Rows per slot, padding included."""
    rows: slice | torch.Tensor
    """Rows of the activation, `height` for each slot in turn: a slice if they already lie so, otherwise
    int64 [G * M]. A short group is padded with its own last row, so that no slot ever sees another's values."""
    padding_GM1: torch.Tensor | None
    """bool [G, M, 1], True on padding; None without any."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowTiles:
    """Groups cut into tiles of at most `block_rows` rows, one tile for one kernel program."""

    slot_T: torch.Tensor
    """int32 [T], slot of the tile's rows."""
    start_T: torch.Tensor
    """int32 [T], position of the tile's first row in `RowGroups.row_order_P`."""
    rows_T: torch.Tensor
    """int32 [T], number of rows, 1..block_rows."""

    @property
    def num_tiles(self) -> int:
        return self.slot_T.shape[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowGroups:
    """Token rows sorted by slot. Immutable; derived plans are computed on first use and kept."""

    num_rows: int
    num_slots: int
    slots: tuple[int, ...]
    """Slots that have rows in this step, ascending; empty groups do not exist."""
    counts: tuple[int, ...]
    """Rows of each slot in `slots`, all positive."""
    starts: tuple[int, ...]
    """Position of each slot's first row in `row_order_P`."""
    runs: tuple[slice | None, ...]
    """For each slot in `slots`, its rows as a slice where they are neighbours, else None."""
    slot_of_row_N: torch.Tensor
    """int64 [N], -1 for rows without a slot."""
    row_order_P: torch.Tensor
    """int64 [P], the rows that have a slot, in stable order of slot."""
    _tiles: dict[int, RowTiles] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> torch.device:
        return self.row_order_P.device

    @property
    def is_empty(self) -> bool:
        """No row has a slot: there is nothing to compute."""
        return not self.slots

    @property
    def covers_all(self) -> bool:
        """One slot holds every row."""
        return self.counts == (self.num_rows,) and self.num_rows > 0

    @cached_property
    def segments(self) -> tuple[slice, ...] | None:
        """Each slot's rows as a slice, parallel to `slots`; None if some slot's rows are not neighbours."""
        segments = tuple(run for run in self.runs if run is not None)
        return segments if len(segments) == len(self.slots) else None

    @cached_property
    def inverse_N(self) -> torch.Tensor:
        """int64 [N], position of each row in `row_order_P`, -1 for rows without a slot."""
        inverse_N = torch.full((self.num_rows,), -1, dtype=torch.int64, device=self.device)
        inverse_N[self.row_order_P] = torch.arange(len(self.row_order_P), device=self.device)
        return inverse_N

    @cached_property
    def batches(self) -> tuple[RowBatch, ...]:
        """Groups gathered by height: a new batch begins where padding would cost more than a launch.

        Tall groups whose rows are neighbours stay apart, each a plain matmul in place, unless they are equally
        tall and side by side.
        """
        tall = [
            g
            for g, run in enumerate(self.runs)
            if run is not None and self.counts[g] >= _TALL_ROWS and len(self.slots) > 1
        ]
        if tall and (side_by_side := self._side_by_side(tall)) is not None:
            batches = [side_by_side]
        else:
            batches = [self._batch([g]) for g in tall]
        rest = sorted(set(range(len(self.slots))) - set(tall), key=lambda g: -self.counts[g])
        members: list[list[int]] = []
        for i, g in enumerate(rest):
            if not members or (
                (self.counts[members[-1][0]] - self.counts[g]) * (len(rest) - i) > _PADDING_ROWS_PER_LAUNCH
            ):
                members.append([])
            members[-1].append(g)
        return (*batches, *(self._batch(batch) for batch in members))

    def _batch(self, members: list[int]) -> RowBatch:
        """One batch of the groups `members`, tallest first."""
        if (side_by_side := self._side_by_side(members)) is not None:
            return side_by_side
        height = self.counts[members[0]]
        members = sorted(members)
        counts_G1 = torch.tensor([self.counts[g] for g in members])[:, None]
        starts_G1 = torch.tensor([self.starts[g] for g in members])[:, None]
        place_1M = torch.arange(height)[None]
        position_GM = starts_G1 + torch.minimum(place_1M, counts_G1 - 1)
        padding_GM = place_1M >= counts_G1
        slots = tuple(self.slots[g] for g in members)
        return RowBatch(
            slots=slots,
            slots_G=torch.tensor(slots, device=self.device),
            slots_ascend_by_one=slots == tuple(range(slots[0], slots[0] + len(slots))),
            height=height,
            rows=self.row_order_P[position_GM.flatten().to(self.device)],
            padding_GM1=padding_GM[:, :, None].to(self.device) if padding_GM.any() else None,
        )

    def _side_by_side(self, members: list[int]) -> RowBatch | None:
        """The batch as one slice of rows, if its groups are equally tall and adjoin each other.

        Short groups must also lie in ascending order of slot: reading slots out of order costs a copy of their
        factors, which outweighs the copy of a few rows.
        """
        height = self.counts[members[0]]
        runs = [(run.start, run.stop, g) for g in members if (run := self.runs[g]) is not None]
        if len(runs) != len(members) or any(self.counts[g] != height for g in members):
            return None
        runs.sort()
        order = [g for _, _, g in runs]
        if any(before[1] != after[0] for before, after in pairwise(runs)):
            return None
        if height < _TALL_ROWS and order != sorted(order):
            return None
        slots = tuple(self.slots[g] for g in order)
        return RowBatch(
            slots=slots,
            slots_G=torch.tensor(slots, device=self.device),
            slots_ascend_by_one=slots == tuple(range(slots[0], slots[0] + len(slots))),
            height=height,
            rows=slice(runs[0][0], runs[-1][1]),
            padding_GM1=None,
        )

    def tiles(self, block_rows: int) -> RowTiles:
        """Tiles of at most `block_rows` rows; no tile mixes slots, and no slot without rows has one."""
        if block_rows not in self._tiles:
            tiles = [
                (slot, start + offset, min(block_rows, count - offset))
                for slot, start, count in zip(self.slots, self.starts, self.counts, strict=True)
                for offset in range(0, count, block_rows)
            ]
            packed_3T = torch.tensor(tiles, dtype=torch.int32).reshape(-1, 3).t().contiguous().to(self.device)
            self._tiles[block_rows] = RowTiles(slot_T=packed_3T[0], start_T=packed_3T[1], rows_T=packed_3T[2])
        return self._tiles[block_rows]


def group_rows(
    slot_of_row: Sequence[int] | torch.Tensor, num_slots: int, *, device: torch.device | str | None = None
) -> RowGroups:
    """Group token rows by slot.

    slot_of_row: integers [N], the slot of each row, -1 for rows without one. A list or a CPU tensor is
        grouped without waiting for a device; a tensor on another device is read back once.
    num_slots: slots are 0..num_slots-1.
    device: where the index tensors go; by default where `slot_of_row` lives, the CPU for a list.

    Raises ValueError for a slot outside -1..num_slots-1 or an input that is not one-dimensional.
    """
    given = torch.as_tensor(slot_of_row)
    device = torch.device(device) if device is not None else given.device
    if given.dim() != 1 or (given.numel() and given.is_floating_point()):
        raise ValueError(f"slot_of_row must be integers [N], got {given.dtype} {list(given.shape)}")
    slot_of_row_N = given.to(device="cpu", dtype=torch.int64)
    num_rows = slot_of_row_N.shape[0]
    wrong_N = (slot_of_row_N < -1) | (slot_of_row_N >= num_slots)
    if wrong_N.any():
        row = int(wrong_N.nonzero()[0])
        raise ValueError(f"row {row} names slot {int(slot_of_row_N[row])}, slots are -1..{num_slots - 1}")

    order_N = torch.argsort(slot_of_row_N, stable=True)
    count_by_slot = torch.bincount(slot_of_row_N + 1, minlength=num_slots + 1).tolist()
    row_order_P = order_N[count_by_slot[0] :]
    slots = tuple(slot for slot in range(num_slots) if count_by_slot[slot + 1])
    counts = tuple(count_by_slot[slot + 1] for slot in slots)
    starts = tuple(sum(counts[:g]) for g in range(len(slots)))
    firsts = row_order_P[list(starts)].tolist()
    lasts = row_order_P[[start + count - 1 for start, count in zip(starts, counts, strict=True)]].tolist()
    return RowGroups(
        num_rows=num_rows,
        num_slots=num_slots,
        slots=slots,
        counts=counts,
        starts=starts,
        # Rows ascend inside a group, so neighbours are told by the two ends.
        runs=tuple(
            slice(first, last + 1) if last - first == count - 1 else None
            for first, last, count in zip(firsts, lasts, counts, strict=True)
        ),
        slot_of_row_N=slot_of_row_N.to(device, non_blocking=True),
        row_order_P=row_order_P.to(device, non_blocking=True),
    )
