"""How many token rows fit into memory at one time: measured once on the loaded model, then a matter of arithmetic.

Shape legend: N token rows, D hidden, V vocabulary, H query heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from opentinker_server.models.attention import PackedCausalAttention
from opentinker_server.models.base import BaseModel
from opentinker_server.models.blocked_attention import KEEP_LENGTH
from opentinker_server.models.lora import LoraRows, LoraWeights
from opentinker_server.models.peft_adapter import LoraSettings, init_adapter

_PROBE_ROWS = (16, 48)
_PROBE_RANK = 16
_SHARE_OF_FREE = 0.6
"""Of what is free once the model is loaded; the rest is for the sampler's cache, adapters and room to breathe."""
_UNKNOWN_FREE_BYTES = 4 * 2**30


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What a pass with backward takes."""

    budget_bytes: int
    """For one pass."""

    head_bytes: int
    """Of the output head's chunk, however many rows the pass has."""

    row_bytes: int
    """Kept per token row for the backward pass, at most."""

    row_bytes_recomputed: int
    """The same where the backward pass computes each layer again."""

    def max_rows(self, *, recompute: bool) -> int:
        """Token rows that fit into the budget."""
        row_bytes = self.row_bytes_recomputed if recompute else self.row_bytes
        return max(0, self.budget_bytes - self.head_bytes) // row_bytes

    def needed_bytes(self, rows: int, *, recompute: bool) -> int:
        """Of a pass over so many rows."""
        return self.head_bytes + rows * (self.row_bytes_recomputed if recompute else self.row_bytes)

    def __str__(self) -> str:
        return (
            f"training memory: {self.budget_bytes / 2**30:.1f} GiB a pass; {self.row_bytes / 2**20:.2f} MiB a token, "
            f"up to {self.max_rows(recompute=False)} tokens; {self.row_bytes_recomputed / 2**20:.2f} MiB with "
            f"recomputation, up to {self.max_rows(recompute=True)}; {self.head_bytes / 2**20:.0f} MiB for the head"
        )


def plan_memory(base: BaseModel, *, budget_bytes: int, head_chunk_rows: int) -> MemoryPlan:
    """Measures what two small passes keep. budget_bytes: 0 takes a share of what is free now."""
    lora = LoraSettings(rank=_PROBE_RANK)
    factors = {
        name: (a.to(base.dtype).requires_grad_(), b.to(base.dtype).requires_grad_())
        for name, (a, b) in init_adapter(lora, base).items()
        if name != "lm_head"
    }
    weights = LoraWeights(scale=lora.scale, factors=factors)

    def per_row(recompute: bool) -> int:
        few, many = (_kept_bytes(base, weights, rows, recompute=recompute) for rows in _PROBE_ROWS)
        return max(1, -(-(many - few) // (_PROBE_ROWS[1] - _PROBE_ROWS[0])))

    itemsize = base.dtype.itemsize
    attention = base.info.num_layers * base.info.num_attention_heads * (KEEP_LENGTH // 2) * itemsize
    row_bytes = per_row(False) + attention
    return MemoryPlan(
        budget_bytes=budget_bytes or int(_SHARE_OF_FREE * free_bytes(base.device)),
        head_bytes=head_chunk_rows * base.info.vocab_size * (4 if base.dtype == torch.float32 else 4 + 2 * itemsize),
        row_bytes=row_bytes,
        row_bytes_recomputed=per_row(True) + -(-row_bytes // base.info.num_layers),
    )


def _kept_bytes(base: BaseModel, weights: LoraWeights, rows: int, *, recompute: bool) -> int:
    """Bytes of the distinct storages that autograd keeps of a pass over one segment, the model's own aside."""
    own = {parameter.untyped_storage().data_ptr() for parameter in base.module.parameters()}
    own |= {buffer.untyped_storage().data_ptr() for buffer in base.module.buffers()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    identity: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor  # noqa: E731
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, identity):
        hidden_ND = base.hidden_states(
            torch.zeros(rows, dtype=torch.int64, device=base.device),
            torch.arange(rows, device=base.device),
            attention=PackedCausalAttention([(0, rows)]),
            lora=LoraRows.from_segments([(0, rows, weights)]),
            recompute=recompute,
        )
    del hidden_ND
    return sum(kept.values())


def free_bytes(device: torch.device) -> int:
    """Memory of the device that could be had now; of the host also within the limit of its control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return _UNKNOWN_FREE_BYTES
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text(), (group / "memory.current").read_text()
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):  # no group, or no limit
        return free
