"""The trainer: live adapters on one frozen base model, whose calls may share a pass.

Owned by the worker's loop thread; nothing here is safe to call from two threads.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from opentinker_server.models.base import BaseModel
from opentinker_server.models.lora import LoraWeights
from opentinker_server.models.peft_adapter import LoraSettings
from opentinker_server.training import state_files
from opentinker_server.training.adapter import LiveAdapter, fresh_adapter
from opentinker_server.training.call import ForwardBackwardOutput, TrainingCall
from opentinker_server.training.datum import TrainDatum
from opentinker_server.training.errors import NonFiniteGradient, TrainingError
from opentinker_server.training.loss_specs import LOSS_SPECS, resolve_config
from opentinker_server.training.memory import plan_memory
from opentinker_server.training.optimizer import AdamSettings, AdamStep, adam_steps
from opentinker_server.training.passes import run_pass
from opentinker_server.training.state_files import SavedState


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Limits of memory and number."""

    max_tokens_per_micro_batch: int = 2048
    """Token rows of one forward and backward; a longer datum runs alone."""

    head_chunk_rows: int = 256
    """Rows whose logits exist at one time; one chunk takes rows * vocabulary * 4 bytes, twice in backward."""

    recompute: Literal["auto", "always", "never"] = "auto"
    """Compute each layer again in the backward pass instead of keeping it: auto where a datum needs it to fit."""

    memory_bytes: int = 0
    """For one forward and backward; 0 takes 0.6 of what is free once the model is loaded."""

    max_adapters: int = 32
    """Live adapters at one time."""

    max_rank: int = 128
    """Largest LoRA rank."""


class Trainer:
    """Creates, trains, saves and loads adapters; every method that raises has changed nothing."""

    def __init__(self, base: BaseModel, config: TrainerConfig) -> None:
        self._base = base
        self._config = config
        self._adapters: dict[str, LiveAdapter] = {}
        self.memory = plan_memory(base, budget_bytes=config.memory_bytes, head_chunk_rows=config.head_chunk_rows)
        """How many token rows fit."""

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

    def begin(
        self,
        adapter_id: str,
        data: Sequence[TrainDatum],
        loss_fn: str,
        config: dict[str, float],
        *,
        backward: bool,
        trained_only: bool = False,
    ) -> TrainingCall:
        """A call whose micro-batches `run` carries out and whose gradient `finish` adds.

        Raises TrainingError NOT_FOUND, INVALID_LOSS, LIMIT_EXCEEDED when a datum cannot fit into memory, or
        INVALID_ARGUMENT when `data` is empty.
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
        recompute = backward and self._needs_recomputation(data)
        return TrainingCall(
            adapter_id=adapter_id,
            weights=adapter.alias(self._base.dtype),
            spec=spec,
            config=resolved,
            data=data,
            backward=backward,
            trained_only=trained_only,
            max_tokens=self.max_rows(recompute=recompute) if backward else self._config.max_tokens_per_micro_batch,
            recompute=recompute,
        )

    def max_rows(self, *, recompute: bool = False) -> int:
        """Token rows of a pass with backward, by memory and configuration."""
        return max(1, min(self._config.max_tokens_per_micro_batch, self.memory.max_rows(recompute=recompute)))

    def _needs_recomputation(self, data: Sequence[TrainDatum]) -> bool:
        longest = max(range(len(data)), key=lambda index: len(data[index].tokens))
        length = len(data[longest].tokens)
        recompute = self._config.recompute == "always" or (
            self._config.recompute == "auto" and length > self.memory.max_rows(recompute=False)
        )
        limit = self.memory.max_rows(recompute=recompute)
        if length > limit:
            needed = self.memory.needed_bytes(length, recompute=recompute)
            raise TrainingError(
                f"datum {longest}: its {length} tokens need {needed / 2**30:.2f} GiB in a backward pass"
                f"{' with recomputation' if recompute else ''}, {self.memory.budget_bytes / 2**30:.2f} GiB are there; "
                f"at most {limit} tokens fit",
                reason="LIMIT_EXCEEDED",
                datum_index=longest,
                field="model_input",
                actual=length,
                limit=limit,
            )
        return recompute

    def run(self, calls: Sequence[TrainingCall]) -> None:
        """The next micro-batch of each call, all in one pass; none of them is done, all or none run backward.

        What a call gets does not depend on the others beyond rounding. When this raises, nothing has changed.
        """
        shares = [call.next_share() for call in calls]
        results = run_pass(
            self._base,
            shares,
            backward=calls[0].backward,
            head_chunk_rows=self._config.head_chunk_rows,
            recompute=any(call.recompute for call in calls),
        )
        for call, result in zip(calls, results, strict=True):
            call.add(result)

    def finish(self, call: TrainingCall) -> ForwardBackwardOutput:
        """Adds the gradient of a call that is done to its adapter's. Raises TrainingError NOT_FOUND."""
        adapter = self._get(call.adapter_id)
        if call.gradient_P is not None:
            adapter.accumulate(call.gradient_P)
        return call.output()

    def forward_backward(
        self,
        adapter_id: str,
        data: Sequence[TrainDatum],
        loss_fn: str,
        config: dict[str, float],
        *,
        backward: bool,
    ) -> Generator[int, None, ForwardBackwardOutput]:
        """One call alone, from `begin` to `finish`; yields the number of datums done after each micro-batch.

        The gradient is added when the generator is resumed after its last yield: a failure or a `close()` before
        leaves the adapter as it was.
        """
        call = self.begin(adapter_id, data, loss_fn, config, backward=backward)
        while not call.is_done:
            self.run([call])
            yield call.num_done
        return self.finish(call)

    def optim_step(self, adapter_id: str, adam: AdamSettings) -> dict[str, float]:
        """`optim_steps` for one adapter. Raises NonFiniteGradient."""
        (outcome,) = self.optim_steps([(adapter_id, adam)])
        if isinstance(outcome, NonFiniteGradient):
            raise outcome
        return outcome

    def optim_steps(self, steps: Sequence[tuple[str, AdamSettings]]) -> list[dict[str, float] | NonFiniteGradient]:
        """One step of each adapter, all different, over its accumulated gradient, which is then dropped.

        Without an accumulated gradient the gradient is zero: moments decay, and the step counts. Gives
        `grad_norm` (before clipping), `step` (steps taken, this one included) and `learning_rate`, or a
        NonFiniteGradient: that adapter's weights, moments and step stay, its gradient is dropped all the same.
        Raises TrainingError NOT_FOUND before anything is done.
        """
        adapters = [self._get(adapter_id) for adapter_id, _ in steps]
        outcomes = adam_steps(
            [
                AdamStep(
                    weights=[adapter.flat_P], gradients=[adapter.take_gradient()], state=adapter.adam, settings=settings
                )
                for adapter, (_, settings) in zip(adapters, steps, strict=True)
            ]
        )
        return [
            outcome
            if isinstance(outcome, NonFiniteGradient)
            else {
                "grad_norm": outcome,
                "step": float(adapter.adam.step),
                "learning_rate": settings.learning_rate,
            }
            for adapter, (_, settings), outcome in zip(adapters, steps, outcomes, strict=True)
        ]

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
