"""Log-probabilities of target tokens and their gradient, without ever holding all logits.

The head runs over chunks of rows. A chunk's logits become its probabilities in place and then, where the loss can
say its gradient at once, the gradient of the logits: one projection forwards, one backwards, nothing kept. Memory
is that of one chunk of logits in float32, whatever the size of the batch.

Shape legend: N token rows of a pack, L rows with target entries, C rows of a chunk, M target entries, D hidden,
V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from opentinker_server.models.base import BaseModel
from opentinker_server.models.lora import LoraRows, LoraWeights

HEAD_MODULE = "lm_head"
"""Name of the output head among the modules of an adapter."""

EntryGradient = Callable[[slice, torch.Tensor], torch.Tensor]
"""(which entries, their log-probabilities [m]) -> gradient of the loss by these, float32 [m]."""


@dataclass(frozen=True, kw_only=True)
class AdapterSegment:
    """Rows [start, end) of a pack that run through one adapter."""

    start: int
    end: int
    weights: LoraWeights


@dataclass(frozen=True, kw_only=True)
class HeadGradients:
    """What the head hands back to the rest of the model."""

    logprobs_M: torch.Tensor
    """Natural-log probabilities at temperature 1, float32."""

    hidden_ND: torch.Tensor
    """Gradient by the hidden rows, zero in rows without entries; dtype of the model."""

    factors: list[torch.Tensor]
    """Gradients by the head's LoRA factors, float32."""

    any_nonzero: bool
    """Whether any entry had a gradient."""


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    rows_C: torch.Tensor
    """int64, ascending rows of the pack."""

    entries: slice
    """Their entries."""

    places_m: torch.Tensor
    """int64 [m]: index in `rows_C` of each entry."""


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
        """Natural-log probabilities at temperature 1, float32 [M]; `rows_M` ascending."""
        parts = [
            _to_probabilities_(self._logits(hidden_ND[chunk.rows_C], chunk.rows_C), chunk, targets_M[chunk.entries])[1]
            for chunk in self._chunks(rows_M)
        ]
        return torch.cat(parts) if parts else hidden_ND.new_zeros(0, dtype=torch.float32)

    def gradients(
        self,
        hidden_ND: torch.Tensor,
        rows_M: torch.Tensor,
        targets_M: torch.Tensor,
        gradient: EntryGradient,
        parameters: Sequence[torch.Tensor],
    ) -> HeadGradients:
        """Log-probabilities, and the gradients of the loss whose gradient by them `gradient` tells.

        `hidden_ND` is taken without its graph. `parameters` are the factors of the head of every adapter in
        the pack; their gradients come back in the same order. `gradient` is called once for every entry, in order.
        """
        hidden_ND = hidden_ND.detach()
        grad_ND = torch.zeros_like(hidden_ND)
        totals = [torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False) for parameter in parameters]
        logprobs = [hidden_ND.new_zeros(0, dtype=torch.float32)]
        any_nonzero = False
        for chunk in self._chunks(rows_M):
            with torch.enable_grad():
                hidden_CD = hidden_ND[chunk.rows_C].requires_grad_()
                logits_CV = self._logits(hidden_CD, chunk.rows_C)
            targets_m = targets_M[chunk.entries]
            with torch.no_grad():
                probs_CV, logprobs_m = _to_probabilities_(logits_CV.detach(), chunk, targets_m)
            logprobs.append(logprobs_m)
            grad_m = gradient(chunk.entries, logprobs_m)
            if not bool((grad_m != 0).any()):
                continue
            any_nonzero = True
            with torch.no_grad():
                grad_CV = _to_gradient_(probs_CV, chunk, targets_m, grad_m)
            found = torch.autograd.grad(logits_CV, [hidden_CD, *parameters], grad_CV, allow_unused=True)
            grad_ND[chunk.rows_C] = found[0]
            for total, grad in zip(totals, found[1:], strict=True):
                if grad is not None:
                    total += grad
        return HeadGradients(logprobs_M=torch.cat(logprobs), hidden_ND=grad_ND, factors=totals, any_nonzero=any_nonzero)

    def _chunks(self, rows_M: torch.Tensor) -> Iterator[_Chunk]:
        rows_L, places_M = torch.unique_consecutive(rows_M, return_inverse=True)
        for start in range(0, len(rows_L), self.chunk_rows):
            end = min(start + self.chunk_rows, len(rows_L))
            bounds = torch.searchsorted(places_M, torch.tensor([start, end], device=rows_M.device)).tolist()
            entries = slice(*bounds)
            yield _Chunk(rows_C=rows_L[start:end], entries=entries, places_m=places_M[entries] - start)

    def _logits(self, hidden_CD: torch.Tensor, rows_C: torch.Tensor) -> torch.Tensor:
        """Logits float32 [C, V] of the given rows of the pack, ascending; the caller may overwrite them."""
        edges = [edge for segment in self.segments for edge in (segment.start, segment.end)]
        cuts = torch.searchsorted(rows_C, torch.tensor(edges, device=rows_C.device)).tolist()
        placed = [
            (start, end, segment.weights)
            for segment, start, end in zip(self.segments, cuts[::2], cuts[1::2], strict=True)
            if start < end
        ]
        return self.base.logits(hidden_CD, lora=LoraRows.from_segments(placed)).float()


def _to_probabilities_(
    logits_CV: torch.Tensor, chunk: _Chunk, targets_m: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax over V in the logits' own memory, and the log-probability of each entry.

    The normaliser comes from the largest probability, 1 / sum(exp(logits - max)): the softmax kernel makes one
    pass over the logits where logsumexp makes several, and no tiny probability is ever put through a logarithm.
    """
    chosen_m = logits_CV[chunk.places_m, targets_m]
    largest_C = logits_CV.amax(-1)
    torch.softmax(logits_CV, -1, out=logits_CV)
    normalisers_C = largest_C - logits_CV.amax(-1).log()
    return logits_CV, chosen_m - normalisers_C[chunk.places_m]


def _to_gradient_(probs_CV: torch.Tensor, chunk: _Chunk, targets_m: torch.Tensor, grad_m: torch.Tensor) -> torch.Tensor:
    """Gradient of sum(grad * logprob) by the logits, in the probabilities' own memory."""
    totals_C = probs_CV.new_zeros(len(chunk.rows_C)).index_add_(0, chunk.places_m, grad_m)
    probs_CV.mul_(-totals_C[:, None])
    return probs_CV.index_put_((chunk.places_m, targets_m), grad_m, accumulate=True)
