"""A forward or forward_backward call on its way: the micro-batches that are left, and what is gathered so far."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from opentinker_server.models.lora import LoraWeights
from opentinker_server.training.adapter import flatten
from opentinker_server.training.datum import TrainDatum, plan_micro_batches
from opentinker_server.training.loss_specs import LossSpec
from opentinker_server.training.metrics import MetricAccumulator
from opentinker_server.training.passes import Share, ShareResult


@dataclass(frozen=True, kw_only=True)
class ForwardBackwardOutput:
    """Result of a forward or forward_backward call, datums in the caller's order."""

    logprobs: list[np.ndarray]
    """Per datum, float32, shaped like its targets; natural log at temperature 1."""

    losses: list[float]
    """Per datum; their sum is the metric `loss:sum`."""

    metrics: dict[str, float]
    """"<name>:<reduction>": `loss:sum`, and those of `losses.METRICS` that the loss observes."""


class TrainingCall:
    """Validated; made by `Trainer.begin`. Dropping it before `Trainer.finish` leaves no trace."""

    def __init__(
        self,
        *,
        adapter_id: str,
        weights: LoraWeights,
        spec: LossSpec,
        config: dict[str, float],
        data: Sequence[TrainDatum],
        backward: bool,
        trained_only: bool,
        max_tokens: int,
        recompute: bool,
    ) -> None:
        """weights: aliases of the adapter's, this call's own leaves. max_tokens: rows of a micro-batch."""
        self.adapter_id = adapter_id
        self.backward = backward
        self.recompute = recompute
        """Its backward passes compute each layer again."""
        self.num_data = len(data)
        self.num_tokens = sum(len(datum.tokens) for datum in data)
        self.num_done = 0
        """Datums that have been through."""
        self._share = Share(weights=weights, spec=spec, config=config, data=data, trained_only=trained_only)
        self._parts = deque(plan_micro_batches([len(datum.tokens) for datum in data], max_tokens=max_tokens))
        self._gradient_P: torch.Tensor | None = None
        self._logprobs: list[np.ndarray | None] = [None] * len(data)
        self._losses = [0.0] * len(data)
        self._metrics = MetricAccumulator()

    @property
    def is_done(self) -> bool:
        """No micro-batch is left."""
        return not self._parts

    @property
    def next_rows(self) -> int:
        """Token rows of the next micro-batch."""
        return sum(len(self._share.data[index].tokens) for index in self._parts[0])

    def next_share(self) -> Share:
        """The next micro-batch as a part of a pass; asked again, the same one."""
        share = self._share
        return Share(
            weights=share.weights,
            spec=share.spec,
            config=share.config,
            data=[share.data[index] for index in self._parts[0]],
            trained_only=share.trained_only,
        )

    def add(self, result: ShareResult) -> None:
        """Takes in what the pass computed for `next_share`."""
        indices = self._parts.popleft()
        for index, logprobs, loss in zip(indices, result.logprobs, result.losses, strict=True):
            self._logprobs[index], self._losses[index] = logprobs, loss
        for observations in result.observations:
            self._metrics.add(observations)
        if result.gradients is not None:
            flat_P = flatten(result.gradients)
            self._gradient_P = flat_P if self._gradient_P is None else self._gradient_P.add_(flat_P)
        self.num_done += len(indices)

    @property
    def gradient_P(self) -> torch.Tensor | None:
        """Sum over the micro-batches so far, flat as the adapter's weights; absent without backward."""
        return self._gradient_P

    def output(self) -> ForwardBackwardOutput:
        """Of a call that is done."""
        logprobs = [values for values in self._logprobs if values is not None]
        assert len(logprobs) == self.num_data
        return ForwardBackwardOutput(
            logprobs=logprobs,
            losses=self._losses,
            metrics={"loss:sum": _exact_sum(self._losses)} | self._metrics.result(),
        )


def _exact_sum(values: Sequence[float]) -> float:
    """The sum, rounded once, so that it does not depend on any order; NaN and infinities pass through."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
