"""The snapshots an engine holds, each alive until it was dropped and the last request using it ended."""

from collections.abc import Mapping

import torch

from opentinker_server.models.lora import LoraWeights
from opentinker_server.sampler.base import SamplingError


class Snapshot:
    """Weights that requests refer to by object, so that a key taken anew never changes a running request."""

    def __init__(self, key: str, weights: LoraWeights | None, *, order: int) -> None:
        self.key = key
        self.weights = weights
        self.order = order
        self.num_users = 0
        self.dropped = False

    @property
    def size_bytes(self) -> int:
        """Memory of the factors; 0 for the base model."""
        if self.weights is None:
            return 0
        return sum(a.nbytes + b.nbytes for a, b in self.weights.factors.values())


class SnapshotTable:
    """Key -> snapshot; the empty key is the base model and is always there."""

    def __init__(
        self,
        *,
        lora_shapes: Mapping[str, tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
        max_lora_rank: int,
    ) -> None:
        """lora_shapes: module name -> (inputs, outputs) of each linear that can be adapted."""
        self._lora_shapes = lora_shapes
        self._dtype = dtype
        self._device = device
        self._max_lora_rank = max_lora_rank
        self._by_key: dict[str, Snapshot] = {"": Snapshot("", None, order=0)}
        self._dropped: list[Snapshot] = []
        self._num_added = 0

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    def __len__(self) -> int:
        """Snapshots that new requests may name, without the base model."""
        return len(self._by_key) - 1

    @property
    def num_dropped_in_use(self) -> int:
        """Dropped snapshots that a request still uses."""
        return len(self._dropped)

    @property
    def size_bytes(self) -> int:
        """Memory of all factors held."""
        return sum(snapshot.size_bytes for snapshot in (*self._by_key.values(), *self._dropped))

    def add(self, key: str, weights: LoraWeights) -> None:
        """Factors are kept in the dtype of the base, converted once here rather than in every step."""
        if key in self._by_key:
            return
        for name, (a_RK, b_OR) in weights.factors.items():
            self._check(key, name, a_RK, b_OR)
        self._num_added += 1
        self._by_key[key] = Snapshot(key, weights.to(self._device, self._dtype), order=self._num_added)

    def drop(self, key: str) -> None:
        """Memory is freed now, or when the last user releases it."""
        if key == "" or key not in self._by_key:
            raise _unknown(key)
        snapshot = self._by_key.pop(key)
        snapshot.dropped = True
        if snapshot.num_users:
            self._dropped.append(snapshot)

    def acquire(self, key: str) -> Snapshot:
        """Pins the snapshot of `key`; pair with `release`."""
        if key not in self._by_key:
            raise _unknown(key)
        snapshot = self._by_key[key]
        snapshot.num_users += 1
        return snapshot

    def release(self, snapshot: Snapshot) -> None:
        """Unpins."""
        assert snapshot.num_users > 0
        snapshot.num_users -= 1
        if snapshot.dropped and snapshot.num_users == 0:
            self._dropped.remove(snapshot)

    def _check(self, key: str, name: str, a_RK: torch.Tensor, b_OR: torch.Tensor) -> None:
        if name not in self._lora_shapes:
            raise SamplingError(
                f"snapshot {key!r} adapts {name!r}, which the base model does not have",
                reason="WRONG_KIND",
                field=name,
            )
        num_inputs, num_outputs = self._lora_shapes[name]
        rank = a_RK.shape[0]
        if tuple(a_RK.shape) != (rank, num_inputs) or tuple(b_OR.shape) != (num_outputs, rank):
            raise SamplingError(
                f"snapshot {key!r}: factors of {name!r} have shapes {tuple(a_RK.shape)} and "
                f"{tuple(b_OR.shape)}, not ({rank}, {num_inputs}) and ({num_outputs}, {rank})",
                reason="WRONG_KIND",
                field=name,
            )
        if rank > self._max_lora_rank:
            raise SamplingError(
                f"snapshot {key!r} has rank {rank}, the sampler allows at most {self._max_lora_rank}",
                reason="LIMIT_EXCEEDED",
                field=name,
                actual=rank,
                limit=self._max_lora_rank,
            )


def _unknown(key: str) -> SamplingError:
    return SamplingError(f"no snapshot {key!r}", reason="NOT_FOUND", field=key)
