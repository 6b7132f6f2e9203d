"""Log-probabilities of target tokens and their gradient, without ever holding all logits.

The head runs over chunks of rows. Its forward pass keeps nothing but one number per target entry; the backward
pass computes the logits of a chunk again, and only for the rows whose gradient is not zero, so masked positions
cost no backward work. Memory is that of two chunks of logits, whatever the size of the batch.

Shape legend: N token rows of a pack, C rows of a chunk, M target entries, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from opentinker_server.models.base import BaseModel
from opentinker_server.models.lora import LoraRows, LoraWeights

HEAD_MODULE = "lm_head"
"""Name of the output head among the modules of an adapter."""


@dataclass(frozen=True, kw_only=True)
class AdapterSegment:
    """Rows [start, end) of a pack that run through one adapter."""

    start: int
    end: int
    weights: LoraWeights


class _TargetLogprobs(torch.autograd.Function):
    """log softmax(logits_CV) at (rows_M, targets_M), float32 [M]; the gradient reuses the logits' memory."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        logits_CV: torch.Tensor,
        rows_M: torch.Tensor,
        targets_M: torch.Tensor,
    ) -> torch.Tensor:
        normalisers_C = torch.logsumexp(logits_CV, dim=-1)
        ctx.save_for_backward(logits_CV, normalisers_C, rows_M, targets_M)
        return logits_CV[rows_M, targets_M] - normalisers_C[rows_M]

    @staticmethod
    def backward(ctx, grad_M: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        logits_CV, normalisers_C, rows_M, targets_M = ctx.saved_tensors
        totals_C = torch.zeros_like(normalisers_C).index_add_(0, rows_M, grad_M)
        grad_CV = (logits_CV - normalisers_C[:, None]).exp_().mul_(-totals_C[:, None])
        grad_CV.index_put_((rows_M, targets_M), grad_M, accumulate=True)
        return grad_CV, None, None


@dataclass(frozen=True, kw_only=True)
class Head:
    """The output head over the rows of one pack."""

    base: BaseModel
    segments: Sequence[AdapterSegment]
    """The adapter of each row, ascending; rows in none get the base head."""

    chunk_rows: int
    """Rows whose logits exist at one time."""

    @torch.no_grad()
    def logprobs(self, hidden_ND: torch.Tensor, rows_M: torch.Tensor, targets_M: torch.Tensor) -> torch.Tensor:
        """Natural-log probabilities at temperature 1, float32 [M]; `rows_M` ascending, every row occurring."""
        parts = []
        for start in range(0, len(hidden_ND), self.chunk_rows):
            end = min(start + self.chunk_rows, len(hidden_ND))
            entries = _entries_of(rows_M, start, end)
            chunk = torch.arange(start, end, device=hidden_ND.device)
            logits_CV = self._logits(hidden_ND[start:end], chunk)
            parts.append(_TargetLogprobs.apply(logits_CV, rows_M[entries] - start, targets_M[entries]))
        return torch.cat(parts)

    def backward(
        self,
        hidden_ND: torch.Tensor,
        rows_M: torch.Tensor,
        targets_M: torch.Tensor,
        grad_M: torch.Tensor,
        parameters: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Gradient of sum(grad_M * logprobs_M) by the hidden rows [N, D] and by the head's LoRA factors.

        `hidden_ND` is taken without its graph. `parameters` are the factors of the head of every adapter in
        the pack; their gradients come back in the same order, float32.
        """
        hidden_ND = hidden_ND.detach()
        grad_ND = torch.zeros_like(hidden_ND)
        totals = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]
        live_M = grad_M != 0
        live_rows, places = torch.unique(rows_M[live_M], return_inverse=True)
        targets, grads = targets_M[live_M], grad_M[live_M]
        for start in range(0, len(live_rows), self.chunk_rows):
            chunk = live_rows[start : start + self.chunk_rows]
            entries = _entries_of(places, start, start + len(chunk))
            with torch.enable_grad():
                hidden_CD = hidden_ND[chunk].requires_grad_()
                logits_CV = self._logits(hidden_CD, chunk)
                logprobs = _TargetLogprobs.apply(logits_CV, places[entries] - start, targets[entries])
            found = torch.autograd.grad(logprobs, [hidden_CD, *parameters], grads[entries], allow_unused=True)
            grad_ND[chunk] = found[0]
            for total, grad in zip(totals, found[1:], strict=True):
                if grad is not None:
                    total += grad
        return grad_ND, totals

    def _logits(self, hidden_CD: torch.Tensor, rows_C: torch.Tensor) -> torch.Tensor:
        """Logits float32 [C, V] of the given rows of the pack, ascending."""
        edges = [edge for segment in self.segments for edge in (segment.start, segment.end)]
        cuts = torch.searchsorted(rows_C, torch.tensor(edges, device=rows_C.device)).tolist()
        placed = [
            (start, end, segment.weights)
            for segment, start, end in zip(self.segments, cuts[::2], cuts[1::2], strict=True)
            if start < end
        ]
        return self.base.logits(hidden_CD, lora=LoraRows.from_segments(placed)).float()


def _entries_of(rows_M: torch.Tensor, start: int, end: int) -> slice:
    """The entries whose row, ascending, lies in [start, end)."""
    bounds = torch.searchsorted(rows_M, torch.tensor([start, end], device=rows_M.device)).tolist()
    return slice(bounds[0], bounds[1])
