"""Metrics of a call, gathered part by part."""

import math
import operator
from collections.abc import Callable

import numpy as np
import torch

from opentinker_server.training.losses import METRICS

_PARTIALS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float, float], float]]] = {
    "sum": (torch.sum, operator.add),
    "max": (torch.max, np.maximum),
    "log_sum": (lambda logs: logs.logsumexp(0), np.logaddexp),
    "log_sum_of_squares": (lambda logs: (2 * logs).logsumexp(0), np.logaddexp),
}
"""What is kept of the values of a part, and how that of two parts is joined. Sums of weights stay logarithms: the
square of a large ratio has no float."""

_NEEDED = {"sum": ("sum",), "mean": ("sum",), "max": ("max",), "share": ("log_sum", "log_sum_of_squares")}
"""Partials of each reduction."""


class MetricAccumulator:
    """Folds the observations of a loss into "<name>:<reduction>" values, whatever the split into parts."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._partials: dict[tuple[str, str], float] = {}

    def add(self, observations: dict[str, torch.Tensor]) -> None:
        """Takes in the values, of any length, that a loss observed in one part; one transfer from the device."""
        found: dict[tuple[str, str], torch.Tensor] = {}
        for name, values in observations.items():
            if values.numel() == 0:
                continue
            self._counts[name] = self._counts.get(name, 0) + values.numel()
            for partial in {partial for reduction in METRICS[name] for partial in _NEEDED[reduction]}:
                found[name, partial] = _PARTIALS[partial][0](values.double())
        if not found:
            return
        for key, value in zip(found, torch.stack(list(found.values())).tolist(), strict=True):
            join = _PARTIALS[key[1]][1]
            self._partials[key] = float(join(self._partials[key], value)) if key in self._partials else value

    def result(self) -> dict[str, float]:
        """The reductions of `losses.METRICS`; a quantity that was never observed is left out."""
        return {
            f"{name}:{reduction}": self._reduced(name, reduction)
            for name in self._counts
            for reduction in METRICS[name]
        }

    def _reduced(self, name: str, reduction: str) -> float:
        partials = [self._partials[name, partial] for partial in _NEEDED[reduction]]
        if reduction == "mean":
            return partials[0] / self._counts[name]
        if reduction == "share":
            return math.exp(2 * partials[0] - partials[1]) / self._counts[name]
        return partials[0]
