"""Where the time of a training step goes, part by part, against the matrix product rate of the same minutes.

One step of the trainer that a device worker runs (forward and backward in one pass over all adapters, then Adam),
without client and control plane, under torch's profiler. Each operation's own time goes to the part that its name,
its shapes or the operations around it tell:

- head: touches the vocabulary; attention: inside an attention function; LoRA: a product with the rank as one side,
  or inside the grouped delta; optimizer: inside the optimizer step
- base GEMM: the other matrix products, those of the frozen layers
- elementwise: all other operations: norms, activations, rotary embedding, residuals, copies
- outside operations: the wall time that is left, Python and the profiler itself
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from common import MODEL
from torch.profiler import ProfilerActivity, profile, record_function

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent
    from training import Shape

PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::baddbmm_"}
PARTS = ("base GEMM", "head", "attention", "LoRA", "elementwise", "optimizer", "outside operations")
_OPTIMIZER = "benchmark::optimizer"
_ROUNDS = 3


@dataclass(kw_only=True)
class Part:
    """One part of a step."""

    milliseconds: float = 0.0
    share: float = 0.0
    """Of the profiled step."""
    product_milliseconds: float = 0.0
    """In matrix products alone."""
    product_gflop: float = 0.0
    """Operations of these, 2 per multiply and add."""

    @property
    def product_gflops(self) -> float:
        """Rate of the matrix products."""
        return 1e3 * self.product_gflop / self.product_milliseconds if self.product_milliseconds else 0.0


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """A step taken apart."""

    step_milliseconds: float
    """Median without the profiler."""
    profiled_milliseconds: float
    """Of the step under the profiler, which the parts add up to."""
    limit_gflops: float
    """Rate of a 2048 x 2048 matrix product in turn with the steps."""
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def floor_milliseconds(self) -> float:
        """All matrix products of the step at the limit."""
        return 1e3 * sum(part.product_gflop for part in self.parts.values()) / self.limit_gflops

    def __str__(self) -> str:
        lines = [
            f"a step takes {self.step_milliseconds:.0f} ms ({self.profiled_milliseconds:.0f} ms profiled); its matrix "
            f"products alone, at the limit of {self.limit_gflops:.0f} GFLOP/s, {self.floor_milliseconds:.0f} ms",
            f"  {'part':20} {'ms':>8} {'share':>6} {'in products':>12} {'GFLOP':>8} {'GFLOP/s':>8} {'of limit':>8}",
        ]
        for name, part in self.parts.items():
            line = f"  {name:20} {part.milliseconds:8.1f} {part.share:6.2f}"
            if part.product_gflop:
                line += f" {part.product_milliseconds:12.1f} {part.product_gflop:8.1f} {part.product_gflops:8.0f}"
                line += f" {part.product_gflops / self.limit_gflops:8.2f}"
            lines.append(line)
        return "\n".join(lines)


def profile_step(
    shape: Shape, dtype: str, *, rows_of: Callable[[Shape, int], list[list[int]]], rank: int, alpha: int
) -> StepProfile:
    """Takes a few steps, then one under the profiler. rows_of: token ids of the datums of an adapter."""
    step, vocabulary = _make_step(shape, dtype, rows_of=rows_of, rank=rank, alpha=alpha)
    left, right = torch.randn(2, 2048, 2048).to(getattr(torch, dtype))
    for _ in range(2):
        step()
    step_s, limit_s = [], []
    for _ in range(_ROUNDS):
        step_s.append(_seconds(step))
        limit_s.append(_seconds(lambda: [torch.mm(left, right) for _ in range(5)]) / 5)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        profiled_s = _seconds(step)
    parts = _parts(list(recorded.events() or ()), rank=rank, vocabulary=vocabulary, total_ms=1e3 * profiled_s)
    return StepProfile(
        step_milliseconds=1e3 * statistics.median(step_s),
        profiled_milliseconds=1e3 * profiled_s,
        limit_gflops=2e-9 * 2048**3 / statistics.median(limit_s),
        parts=parts,
    )


def _make_step(
    shape: Shape, dtype: str, *, rows_of: Callable[[Shape, int], list[list[int]]], rank: int, alpha: int
) -> tuple[Callable[[], None], int]:
    """The worker's trainer with the adapters of `shape`, and the size of the vocabulary."""
    from opentinker_server.models.base import BaseModel
    from opentinker_server.models.peft_adapter import LoraSettings
    from opentinker_server.models.registry import resolve_model
    from opentinker_server.training.datum import TrainDatum
    from opentinker_server.training.optimizer import AdamSettings
    from opentinker_server.training.trainer import Trainer, TrainerConfig

    source = resolve_model(MODEL, cache_dir=Path("~/.cache/opentinker").expanduser())
    base = BaseModel.load(source, dtype=getattr(torch, dtype), device="cpu")
    trainer = Trainer(base, TrainerConfig())
    weights = (np.arange(shape.tokens) >= shape.tokens * (1 - shape.trained)).astype(np.float32)
    data: dict[str, list[TrainDatum]] = {}
    for adapter in range(shape.adapters):
        lora = LoraSettings(rank=rank, alpha=alpha, seed=adapter, train_unembed=False)
        trainer.create_adapter(f"a{adapter}", lora, directory=None, with_optimizer=False)
        data[f"a{adapter}"] = [
            TrainDatum(tokens=np.array(row[:-1]), targets=np.array(row[1:]), inputs={"weights": weights})
            for row in rows_of(shape, adapter)
        ]

    def step() -> None:
        calls = [
            trainer.begin(name, own, "cross_entropy", {}, backward=True, trained_only=True)
            for name, own in data.items()
        ]
        while left := [call for call in calls if not call.is_done]:
            trainer.run(left)
        for call in calls:
            trainer.finish(call)
        with record_function(_OPTIMIZER):
            trainer.optim_steps([(name, AdamSettings()) for name in data])

    return step, base.info.vocab_size


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _parts(events: list[FunctionEvent], *, rank: int, vocabulary: int, total_ms: float) -> dict[str, Part]:
    """Own times of all operations by part; what is left of `total_ms` is outside them."""
    parts = {name: Part() for name in PARTS}
    for event in events:
        if event.name.startswith(("autograd::engine", "benchmark::")) or event.is_async:
            continue  # wrappers: their own time is bookkeeping
        part = parts[_part_of(event, rank=rank, vocabulary=vocabulary)]
        part.milliseconds += event.self_cpu_time_total / 1e3
        if event.name in PRODUCTS:
            part.product_milliseconds += event.self_cpu_time_total / 1e3
            part.product_gflop += _product_flop(event) / 1e9
    parts["outside operations"].milliseconds = total_ms - sum(part.milliseconds for part in parts.values())
    for part in parts.values():
        part.share = part.milliseconds / total_ms
    return parts


def _part_of(event: FunctionEvent, *, rank: int, vocabulary: int) -> str:
    around = list(_outwards(event))
    names = " ".join(outer.name for outer in around).lower()
    if _OPTIMIZER in names:
        return "optimizer"
    if "embedding" not in names and any(vocabulary in shape for outer in around for shape in _shapes(outer)):
        return "head"
    if "attention" in names:
        return "attention"
    if event.name in PRODUCTS:
        return "LoRA" if any(rank in shape[-2:] for shape in _shapes(event)) else "base GEMM"
    return "LoRA" if "delta" in names or "lora" in names else "elementwise"


def _outwards(event: FunctionEvent | None) -> Iterator[FunctionEvent]:
    while event is not None:
        yield event
        event = event.cpu_parent


def _shapes(event: FunctionEvent) -> list[list[int]]:
    """Of the tensor arguments; anything else has none."""
    return [list(shape) for shape in event.input_shapes or () if isinstance(shape, Sequence)]


def _product_flop(event: FunctionEvent) -> float:
    """2 * batch * rows * inner * columns; an added matrix, which comes first, is not a factor."""
    left, right = [shape for shape in _shapes(event) if len(shape) >= 2][-2:]
    return 2.0 * float(np.prod(left)) * right[-1]
