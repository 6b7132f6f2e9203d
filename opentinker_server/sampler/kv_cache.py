"""Keys and values of running sequences, in slabs of a few sizes.

Each sequence owns one contiguous slab. Slabs of one capacity lie side by side in one tensor, so that a decode
step attends over all of them in one call on a view, and sequences that share a call differ in length by less
than about two times. A sequence that outgrows its slab moves to one of the next size. Measured on CPU, this
beats a loop over sequences 1.2 to 3 times and gathering rows or pages 1.5 to 3 times.

Legend: S slots, G key/value heads, C capacity in tokens, D head dimension.
"""

import heapq
import math
from dataclasses import dataclass, field

import numpy as np
import torch

_SMALLEST_CAPACITY = 64


@dataclass(eq=False, kw_only=True)
class Slab:
    """Room for the keys and values of one sequence; `num_written` tokens of it have been written."""

    size_class: "SizeClass"
    slot: int
    num_written: int = 0

    @property
    def capacity(self) -> int:
        """Tokens."""
        return self.size_class.capacity


@dataclass(eq=False, kw_only=True)
class SizeClass:
    """All slabs of one capacity."""

    capacity: int
    num_slots: int
    shape: tuple[int, int, int]
    """(layers, key/value heads, head dimension)."""
    dtype: torch.dtype
    device: torch.device
    storage: torch.Tensor | None = None
    """[layers, 2 (keys, values), S, G, C, D]; finite everywhere. None while no slot is in use."""
    num_used: int = 0
    free_slots: list[int] = field(default_factory=list)

    def take(self) -> Slab:
        """The lowest free slot, so that the slots in use stay dense."""
        if self.storage is None:
            num_layers, num_kv_heads, head_dim = self.shape
            size = (num_layers, 2, self.num_slots, num_kv_heads, self.capacity, head_dim)
            self.storage = _zeros(size, dtype=self.dtype, device=self.device)
            self.free_slots = list(range(self.num_slots))
        self.num_used += 1
        return Slab(size_class=self, slot=heapq.heappop(self.free_slots))

    def give_back(self, slab: Slab) -> None:
        """Zeroes what was written: attention multiplies masked values by 0, which cannot hide a NaN."""
        assert self.storage is not None
        self.num_used -= 1
        if self.num_used == 0:
            self.storage = None
            return
        self.storage[:, :, slab.slot, :, : slab.num_written].zero_()
        heapq.heappush(self.free_slots, slab.slot)


class SlabCache:
    """Hands out slabs whose capacities add up to at most `capacity_tokens`."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        capacity_tokens: int,
        max_sequences: int,
        max_sequence_tokens: int,
    ) -> None:
        self.capacity_tokens = capacity_tokens
        self.used_tokens = 0
        largest = min(max_sequence_tokens, capacity_tokens)
        capacities: list[int] = []
        while not capacities or capacities[-1] < largest:
            capacities.append(min(2 * capacities[-1] if capacities else _SMALLEST_CAPACITY, largest))
        self._classes = [
            SizeClass(
                capacity=capacity,
                num_slots=min(max_sequences, capacity_tokens // capacity),
                shape=(num_layers, num_kv_heads, head_dim),
                dtype=dtype,
                device=device,
            )
            for capacity in capacities
        ]

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest sequence that fits an empty cache."""
        return self._classes[-1].capacity

    @property
    def free_tokens(self) -> int:
        """Capacity that is not handed out, in tokens."""
        return self.capacity_tokens - self.used_tokens

    def fits(self, num_tokens: int, *, instead_of: Slab | None = None) -> bool:
        """Whether a slab for num_tokens can be had, given that `instead_of` is returned for it."""
        returned = instead_of.capacity if instead_of is not None else 0
        return self._class_for(num_tokens).capacity <= self.free_tokens + returned

    def allocate(self, num_tokens: int, *, prefix_of: Slab | None = None, num_copied: int = 0) -> Slab:
        """A slab for num_tokens that begins with a copy of the first num_copied tokens of `prefix_of`."""
        assert self.fits(num_tokens)
        slab = self._class_for(num_tokens).take()
        self.used_tokens += slab.capacity
        if prefix_of is not None:
            _copy(prefix_of, slab, num_copied)
        return slab

    def grow(self, slab: Slab, num_tokens: int) -> Slab:
        """Moves a sequence to a slab for num_tokens."""
        assert self.fits(num_tokens, instead_of=slab)
        larger = self._class_for(num_tokens).take()
        assert larger.capacity > slab.capacity
        self.used_tokens += larger.capacity
        _copy(slab, larger, slab.num_written)
        self.free(slab)
        return larger

    def free(self, slab: Slab) -> None:
        """Returns a slab."""
        self.used_tokens -= slab.capacity
        slab.size_class.give_back(slab)

    def _class_for(self, num_tokens: int) -> SizeClass:
        return next(c for c in self._classes if c.capacity >= num_tokens)


def _zeros(size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros whose pages a CPU hands out when they are first written: idle slots take no memory and no time."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # torch.zeros writes every element; numpy asks the operating system for zeroed pages.
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(size)


def _copy(source: Slab, target: Slab, num_tokens: int) -> None:
    source_storage, target_storage = source.size_class.storage, target.size_class.storage
    assert source_storage is not None and target_storage is not None
    target_storage[:, :, target.slot, :, :num_tokens] = source_storage[:, :, source.slot, :, :num_tokens]
    target.num_written = num_tokens
