"""Metrics of a call, gathered micro-batch by micro-batch."""

import torch

from opentinker_server.training.losses import METRICS


class MetricAccumulator:
    """Folds the observations of a loss into "<name>:<reduction>" values, whatever the split into batches."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._maxima: dict[str, float] = {}

    def add(self, observations: dict[str, torch.Tensor]) -> None:
        """Takes in the values, float32 of any length, that a loss observed in one micro-batch."""
        for name, values in observations.items():
            if values.numel() == 0:
                continue
            self._sums[name] = self._sums.get(name, 0.0) + float(values.sum(dtype=torch.float64))
            self._counts[name] = self._counts.get(name, 0) + values.numel()
            largest = float(values.max())
            self._maxima[name] = max(self._maxima.get(name, largest), largest)

    def result(self) -> dict[str, float]:
        """The reductions of `losses.METRICS`; a quantity that was never observed is left out."""
        values: dict[str, float] = {}
        for name, total in self._sums.items():
            reduced = {
                "sum": total,
                "mean": total / self._counts[name],
                "max": self._maxima[name],
            }
            values |= {f"{name}:{reduction}": reduced[reduction] for reduction in METRICS[name]}
        return values
