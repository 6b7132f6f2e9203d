"""Runs one step's chunks: one call of the model for all rows of all adapters, then the head where needed.

Legend: N token rows of the step, M rows that need logits, V vocabulary, K entries of a top-k list.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from opentinker_server.models.base import BaseModel
from opentinker_server.models.lora import LoraRows
from opentinker_server.sampler.attention import CachedSpan, KvCacheAttention
from opentinker_server.sampler.sampling import RowSettings, sample, top_logprobs
from opentinker_server.sampler.scheduler import Chunk
from opentinker_server.sampler.sequence import Request, Sequence
from opentinker_server.sampler.snapshots import Snapshot

_MAX_LOGIT_ROWS = 128
"""Rows whose logits are held at once: 25 MB of float32 for a vocabulary of 49,152."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The next token of a sequence; logprob is NaN where the model's output is not finite."""

    sequence: Sequence
    token: int
    logprob: float
    topk_ids: list[int] | None
    topk_logprobs: list[float] | None


@dataclass(frozen=True, kw_only=True)
class ScoredPrompt:
    """Log-probabilities of prompt positions [first, first + len(logprobs))."""

    request: Request
    first: int
    logprobs: np.ndarray
    """float32."""
    topk_ids: np.ndarray
    """int64 [positions, K]."""
    topk_logprobs: np.ndarray
    """float32 [positions, K]."""


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What a step computed."""

    draws: list[Draw]
    scored_prompts: list[ScoredPrompt]


@dataclass(frozen=True, kw_only=True)
class _PlacedChunk:
    chunk: Chunk
    first_row: int

    @property
    def snapshot(self) -> Snapshot:
        return self.chunk.sequence.request.snapshot


@dataclass(frozen=True, kw_only=True)
class _DrawRow:
    row: int
    sequence: Sequence

    @property
    def snapshot(self) -> Snapshot:
        return self.sequence.request.snapshot


class ModelRunner:
    """Turns chunks into drawn tokens and prompt log-probabilities."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base

    @torch.inference_mode()
    def run(self, chunks: Rows[Chunk]) -> StepOutput:
        """Computes the chunks, whose slabs have room for them."""
        placed = _place(chunks)
        hidden_ND = self._hidden_states(placed)
        return StepOutput(
            draws=[draw for rows in _draw_rows(placed) for draw in self._draw(hidden_ND, rows)],
            scored_prompts=[scored for item in placed for scored in self._score_prompt(hidden_ND, item)],
        )

    def _hidden_states(self, placed: Rows[_PlacedChunk]) -> torch.Tensor:
        tokens: list[int] = []
        positions: list[int] = []
        spans = []
        for item in placed:
            chunk, slab = item.chunk, item.chunk.sequence.slab
            assert slab is not None and slab.capacity >= chunk.end
            tokens += chunk.sequence.tokens_between(chunk.start, chunk.end)
            positions += range(chunk.start, chunk.end)
            spans.append(
                CachedSpan(slab=slab, first_row=item.first_row, start=chunk.start, num_tokens=chunk.num_tokens)
            )
        tokens_N = torch.tensor(tokens, device=self._base.device)
        positions_N = torch.tensor(positions, device=self._base.device)
        attention = KvCacheAttention(spans, device=self._base.device)
        lora = _lora_rows([(item.snapshot, item.chunk.num_tokens) for item in placed])
        return self._base.hidden_states(tokens_N, positions_N, attention=attention, lora=lora)

    def _logits(
        self, hidden_ND: torch.Tensor, rows_M: torch.Tensor, owners: list[tuple[Snapshot, int]]
    ) -> torch.Tensor:
        """float32 [M, V]. owners: whose weights consecutive runs of the M rows use, and their lengths."""
        return self._base.logits(hidden_ND[rows_M], lora=_lora_rows(owners)).float()

    def _draw(self, hidden_ND: torch.Tensor, rows: list[_DrawRow]) -> list[Draw]:
        device = self._base.device
        unique = [next(same) for _, same in groupby(rows, key=lambda row: row.row)]
        rows_M = torch.tensor([row.row for row in unique], device=device)
        logits = self._logits(hidden_ND, rows_M, [(row.snapshot, 1) for row in unique])
        if len(unique) < len(rows):
            counts = [len(list(same)) for _, same in groupby(rows, key=lambda row: row.row)]
            logits = logits.repeat_interleave(torch.tensor(counts, device=device), dim=0)
        settings = RowSettings.build(
            [row.sequence.request.task.settings for row in rows],
            sample_indices=[row.sequence.sample_index for row in rows],
            positions=[row.sequence.num_tokens for row in rows],
            vocab_size=logits.shape[1],
            device=device,
        )
        topk = max(row.sequence.request.task.topk_sample for row in rows)
        sampled = sample(logits, settings, topk=topk)
        tokens, logprobs = sampled.tokens_R.tolist(), sampled.logprobs_R.tolist()
        ids = sampled.topk_ids_RK.tolist() if sampled.topk_ids_RK is not None else [None] * len(rows)
        values = sampled.topk_logprobs_RK.tolist() if sampled.topk_logprobs_RK is not None else [None] * len(rows)
        return [
            Draw(sequence=row.sequence, token=token, logprob=logprob, topk_ids=i, topk_logprobs=v)
            for row, token, logprob, i, v in zip(rows, tokens, logprobs, ids, values, strict=True)
        ]

    def _score_prompt(self, hidden_ND: torch.Tensor, item: _PlacedChunk) -> Iterator[ScoredPrompt]:
        """Row p predicts position p + 1; positions known from an earlier step are left out."""
        request, chunk = item.chunk.sequence.request, item.chunk
        if request.scores is None:
            return
        first = max(chunk.start + 1, request.scores.num_scored)
        last = min(chunk.end + 1, len(request.prompt))
        for start in range(first, last, _MAX_LOGIT_ROWS):
            end = min(start + _MAX_LOGIT_ROWS, last)
            first_row = item.first_row + start - 1 - chunk.start
            rows_M = torch.arange(first_row, first_row + end - start, device=self._base.device)
            logits_MV = self._logits(hidden_ND, rows_M, [(item.snapshot, len(rows_M))])
            logprobs_MV = torch.log_softmax(logits_MV, dim=-1)
            targets_M = torch.tensor(request.prompt[start:end], device=self._base.device)
            ids_MK, values_MK = top_logprobs(logprobs_MV, request.task.topk_prompt)
            yield ScoredPrompt(
                request=request,
                first=start,
                logprobs=logprobs_MV.gather(1, targets_M[:, None]).squeeze(1).cpu().numpy(),
                topk_ids=ids_MK.cpu().numpy(),
                topk_logprobs=values_MK.cpu().numpy(),
            )


def _place(chunks: Rows[Chunk]) -> list[_PlacedChunk]:
    """Lays chunks out on the row axis, those of one snapshot side by side, in them by slab."""
    placed = []
    first_row = 0
    for chunk in sorted(chunks, key=_row_order):
        placed.append(_PlacedChunk(chunk=chunk, first_row=first_row))
        first_row += chunk.num_tokens
    return placed


def _row_order(chunk: Chunk) -> tuple[int, int, int]:
    slab = chunk.sequence.slab
    assert slab is not None
    return chunk.sequence.request.snapshot.order, slab.capacity, slab.slot


def _draw_rows(placed: Rows[_PlacedChunk]) -> Iterator[list[_DrawRow]]:
    """Rows that yield tokens, in batches; the end of a prompt yields one for every sample of the request."""
    batch: list[_DrawRow] = []
    for item in placed:
        if not item.chunk.is_last:
            continue
        sequence = item.chunk.sequence
        sequences = [sequence] if sequence.generated else sequence.request.sequences
        row = item.first_row + item.chunk.num_tokens - 1
        for drawn in sequences:
            batch.append(_DrawRow(row=row, sequence=drawn))
            if len(batch) == _MAX_LOGIT_ROWS:
                yield batch
                batch = []
    if batch:
        yield batch


def _lora_rows(owners: list[tuple[Snapshot, int]]) -> LoraRows | None:
    """owners: snapshot and number of its rows, in row order."""
    segments = []
    row = 0
    for snapshot, items in groupby(owners, key=lambda owner: owner[0]):
        end = row + sum(num_rows for _, num_rows in items)
        segments.append((row, end, snapshot.weights))
        row = end
    if all(weights is None for _, _, weights in segments):
        return None
    return LoraRows.from_segments(segments)
