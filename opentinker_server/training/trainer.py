"""The trainer: live adapters on one frozen base model, one call at a time.

Owned by the worker's loop thread; nothing here is safe to call from two threads.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from opentinker_server.models.base import BaseModel
from opentinker_server.models.lora import LoraWeights
from opentinker_server.models.peft_adapter import LoraSettings
from opentinker_server.training import state_files
from opentinker_server.training.adapter import LiveAdapter, add_gradients, fresh_adapter
from opentinker_server.training.datum import TrainDatum, plan_micro_batches
from opentinker_server.training.errors import TrainingError
from opentinker_server.training.loss_specs import LOSS_SPECS, resolve_config
from opentinker_server.training.metrics import MetricAccumulator
from opentinker_server.training.optimizer import AdamSettings, adam_step
from opentinker_server.training.passes import Gradients, Share, ShareResult, run_pass
from opentinker_server.training.state_files import SavedState


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Limits of memory and number."""

    max_tokens_per_micro_batch: int = 2048
    """Token rows of one forward and backward; a longer datum runs alone."""

    head_chunk_rows: int = 256
    """Rows whose logits exist at one time; one chunk takes rows * vocabulary * 4 bytes, twice in backward."""

    max_adapters: int = 32
    """Live adapters at one time."""

    max_rank: int = 128
    """Largest LoRA rank."""


@dataclass(frozen=True, kw_only=True)
class ForwardBackwardOutput:
    """Result of a forward or forward_backward call, datums in the caller's order."""

    logprobs: list[np.ndarray]
    """Per datum, float32, shaped like its targets; natural log at temperature 1."""

    losses: list[float]
    """Per datum; their sum is the metric `loss:sum`."""

    metrics: dict[str, float]
    """"<name>:<reduction>": `loss:sum`, and those of `losses.METRICS` that the loss observes."""


class Trainer:
    """Creates, trains, saves and loads adapters; every method that raises has changed nothing."""

    def __init__(self, base: BaseModel, config: TrainerConfig) -> None:
        self._base = base
        self._config = config
        self._adapters: dict[str, LiveAdapter] = {}

    def create_adapter(
        self, adapter_id: str, lora: LoraSettings, *, directory: Path | None, with_optimizer: bool
    ) -> None:
        """Makes an adapter live: fresh (seeded) weights, or those saved in `directory`.

        Raises TrainingError: ALREADY_EXISTS, LIMIT_EXCEEDED (adapters or rank), and those of `load_state`.
        """
        if adapter_id in self._adapters:
            raise TrainingError(f"Adapter {adapter_id} is live already.", reason="ALREADY_EXISTS")
        limit = self._config.max_adapters
        if len(self._adapters) >= limit:
            raise TrainingError(
                f"The worker trains {limit} adapters at most (limit {limit}), and that many are live: unload "
                "one first.",
                reason="LIMIT_EXCEEDED",
                limit=limit,
            )
        if not 1 <= lora.rank <= self._config.max_rank:
            raise TrainingError(
                f"LoRA rank {lora.rank} is not in [1, {self._config.max_rank}].",
                reason="LIMIT_EXCEEDED",
                field="rank",
                actual=lora.rank,
                limit=self._config.max_rank,
            )
        if directory is None:
            adapter = fresh_adapter(self._base, lora)
        else:
            adapter = state_files.read_state(directory, base=self._base, lora=lora, with_optimizer=with_optimizer)
        self._adapters[adapter_id] = adapter

    def drop_adapter(self, adapter_id: str) -> None:
        """Frees an adapter's weights, gradient and optimizer state. Raises TrainingError NOT_FOUND."""
        self._get(adapter_id)
        del self._adapters[adapter_id]

    def forward_backward(
        self,
        adapter_id: str,
        data: Sequence[TrainDatum],
        loss_fn: str,
        config: dict[str, float],
        *,
        backward: bool,
    ) -> Generator[int, None, ForwardBackwardOutput]:
        """Loss, log-probabilities and, with `backward`, a gradient that is added to the adapter's.

        Runs in micro-batches and yields the number of datums done after each, so that other work can come
        between. The gradient is added when the generator is resumed after its last yield: a failure or a
        `close()` before leaves the adapter as it was. Raises, at the first resumption, TrainingError
        NOT_FOUND, INVALID_LOSS, or INVALID_ARGUMENT when `data` is empty.
        """
        adapter = self._get(adapter_id)
        if loss_fn not in LOSS_SPECS:
            raise TrainingError(
                f"Unknown loss '{loss_fn}'; there are: {', '.join(sorted(LOSS_SPECS))}.",
                reason="INVALID_LOSS",
                field=loss_fn,
            )
        if not data:
            raise TrainingError("data is empty", reason="INVALID_ARGUMENT", field="data")
        spec = LOSS_SPECS[loss_fn]
        try:
            resolved = resolve_config(spec, config)
        except ValueError as error:
            raise TrainingError(str(error), reason="INVALID_LOSS", field=loss_fn) from error
        gathered = _Gathered(len(data))
        plan = plan_micro_batches(
            [len(datum.tokens) for datum in data], max_tokens=self._config.max_tokens_per_micro_batch
        )
        for indices in plan:
            share = Share(weights=adapter.weights, spec=spec, config=resolved, data=[data[index] for index in indices])
            (result,) = run_pass(self._base, [share], backward=backward, head_chunk_rows=self._config.head_chunk_rows)
            gathered.add(indices, result)
            yield gathered.num_done
        if gathered.gradients is not None:
            adapter.accumulate(gathered.gradients)
        return gathered.output()

    def optim_step(self, adapter_id: str, adam: AdamSettings) -> dict[str, float]:
        """One step over the accumulated gradient, which is then dropped.

        Without an accumulated gradient the gradient is zero: moments decay, and the step counts. Returns
        `grad_norm` (before clipping), `step` (steps taken, this one included) and `learning_rate`. Raises
        NonFiniteGradient: weights, moments and step stay, the gradient is dropped all the same.
        """
        adapter = self._get(adapter_id)
        gradients = adapter.take_gradient()
        norm = adam_step(adapter.parameters(), gradients, adapter.adam, adam)
        return {"grad_norm": norm, "step": float(adapter.adam.step), "learning_rate": adam.learning_rate}

    def save_state(self, adapter_id: str, directory: Path) -> SavedState:
        """Writes weights and optimizer state into the empty folder `directory`, durably.

        The accumulated gradient is not part of it. Raises TrainingError NOT_FOUND or DISK_FULL; a failed
        write leaves the folder empty.
        """
        return state_files.write_state(directory, base=self._base, adapter=self._get(adapter_id))

    def load_state(self, adapter_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Replaces an adapter's weights by those saved in `directory` and drops its accumulated gradient.

        With `with_optimizer` moments and step come from there too, exactly; otherwise both start at zero.
        Every file's hash and every tensor's name, shape and dtype is checked before the adapter is touched.
        Raises TrainingError: NOT_FOUND, CORRUPT_DATA naming the file or tensor, WRONG_KIND for a snapshot
        where optimizer state is wanted or for another base model or configuration.
        """
        lora = self._get(adapter_id).lora
        self._adapters[adapter_id] = state_files.read_state(
            directory, base=self._base, lora=lora, with_optimizer=with_optimizer
        )

    def snapshot(self, adapter_id: str) -> LoraWeights:
        """An immutable copy of the adapter's weights."""
        return self._get(adapter_id).copy_weights()

    def write_snapshot(self, adapter_id: str, directory: Path) -> SavedState:
        """Writes the weights alone into the empty folder `directory`, durably.

        The returned sha256 is that of the tensors (`state_files.content_hash`). Raises as `save_state`.
        """
        return state_files.write_snapshot(directory, base=self._base, adapter=self._get(adapter_id))

    def step(self, adapter_id: str) -> int:
        """Optimizer steps taken by the adapter's state. Raises TrainingError NOT_FOUND."""
        return self._get(adapter_id).adam.step

    def _get(self, adapter_id: str) -> LiveAdapter:
        if adapter_id not in self._adapters:
            raise TrainingError(f"No live adapter {adapter_id} on this worker.", reason="NOT_FOUND")
        return self._adapters[adapter_id]


class _Gathered:
    """Results of a call's micro-batches, put back into the caller's order."""

    def __init__(self, num_data: int) -> None:
        self.num_done = 0
        self.gradients: Gradients | None = None
        self._logprobs: list[np.ndarray | None] = [None] * num_data
        self._losses = [0.0] * num_data
        self._metrics = MetricAccumulator()

    def add(self, indices: Sequence[int], result: ShareResult) -> None:
        for index, logprobs, loss in zip(indices, result.logprobs, result.losses, strict=True):
            self._logprobs[index], self._losses[index] = logprobs, loss
        for observations in result.observations:
            self._metrics.add(observations)
        self.num_done += len(indices)
        if self.gradients is None:
            self.gradients = result.gradients
        elif result.gradients is not None:
            add_gradients(self.gradients, result.gradients)

    def output(self) -> ForwardBackwardOutput:
        logprobs = [values for values in self._logprobs if values is not None]
        assert len(logprobs) == len(self._losses)
        return ForwardBackwardOutput(
            logprobs=logprobs,
            losses=self._losses,
            metrics={"loss:sum": _exact_sum(self._losses)} | self._metrics.result(),
        )


def _exact_sum(values: Sequence[float]) -> float:
    """The sum, rounded once, so that it does not depend on any order; NaN and infinities pass through."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
