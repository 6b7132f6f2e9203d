"""Attention over one packed row axis, called by every attention module of a transformers model.

Legend: N token rows, S segments of one length, L their length, H query heads, G key/value heads,
D head dimension.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from opentinker_server.models.blocked_attention import blocked_attention


class Attention(Protocol):
    """Says which rows see which; owned by the caller of `BaseModel.hidden_states`, one per call."""

    def attend(
        self,
        layer_idx: int,
        query_NHD: Tensor,
        key_NGD: Tensor,
        value_NGD: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """out_NHD, dtype of the query. H is a multiple of G; a window of w shows row i the rows (i - w, i]."""
        ...


class PackedCausalAttention:
    """Block-diagonal causal attention: each row sees itself and the earlier rows of its own segment.

    Differentiable. Segments of one length run as one batch.
    """

    def __init__(self, segments: Sequence[tuple[int, int]]) -> None:
        """segments: (first row, row after the last), not overlapping; rows in none get zeros.

        Raises ValueError for an empty, negative or overlapping segment.
        """
        self._segments = sorted(segments)
        end_before = 0
        for start, end in self._segments:
            if start < end_before or end <= start:
                raise ValueError(f"Segment ({start}, {end}) is empty or overlaps the one before it.")
            end_before = end
        self._by_length: dict[int, list[int]] = {}
        for index, (start, end) in enumerate(self._segments):
            self._by_length.setdefault(end - start, []).append(index)
        self._masks: dict[tuple[int, int], Tensor] = {}

    def attend(
        self,
        layer_idx: int,
        query_NHD: Tensor,
        key_NGD: Tensor,
        value_NGD: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """out_NHD, dtype of the query."""
        outs: list[Tensor | None] = [None] * len(self._segments)
        for length, indices in self._by_length.items():
            window = sliding_window if sliding_window is not None and sliding_window < length else None
            query_SLHD, key_SLGD, value_SLGD = (self._stack(rows, indices) for rows in (query_NHD, key_NGD, value_NGD))
            if softcap is None and query_NHD.device.type == "cpu":
                out_SLHD = blocked_attention(query_SLHD, key_SLGD, value_SLGD, scaling=scaling, window=window)
            else:
                mask_LL = None if window is None else self._window_mask(length, window, query_NHD.device)
                query_SHLD, key_SGLD, value_SGLD = (rows.transpose(1, 2) for rows in (query_SLHD, key_SLGD, value_SLGD))
                out_SLHD = _causal(query_SHLD, key_SGLD, value_SGLD, mask_LL, scaling=scaling, softcap=softcap)
            if len(indices) == len(self._segments) and out_SLHD.shape[:2].numel() == query_NHD.shape[0]:
                return out_SLHD.flatten(0, 1)
            for index, out_LHD in zip(indices, out_SLHD.unbind(), strict=True):
                outs[index] = out_LHD
        return self._unpack(outs, like=query_NHD, head_dim=value_NGD.shape[-1])

    def _stack(self, rows_NHD: Tensor, indices: list[int]) -> Tensor:
        """[S, L, H, D]; a view where the segments are neighbours."""
        runs = [self._segments[index] for index in indices]
        if all(before[1] == after[0] for before, after in pairwise(runs)):
            return rows_NHD[runs[0][0] : runs[-1][1]].unflatten(0, (len(runs), -1))
        return torch.stack([rows_NHD[slice(*run)] for run in runs])

    def _window_mask(self, length: int, window: int, device: torch.device) -> Tensor:
        if (length, window) not in self._masks:
            distance_LL = _distance(length, device)
            self._masks[length, window] = (distance_LL >= 0) & (distance_LL < window)
        return self._masks[length, window]

    def _unpack(self, outs: list[Tensor | None], *, like: Tensor, head_dim: int) -> Tensor:
        pieces = []
        row = 0
        for (start, end), out_LHD in zip(self._segments, outs, strict=True):
            assert out_LHD is not None
            if start > row:
                pieces.append(like.new_zeros(start - row, like.shape[1], head_dim))
            pieces.append(out_LHD)
            row = end
        if row < like.shape[0]:
            pieces.append(like.new_zeros(like.shape[0] - row, like.shape[1], head_dim))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _distance(length: int, device: torch.device) -> Tensor:
    """int64 [L, L]: query row minus key row."""
    rows_L = torch.arange(length, device=device)
    return rows_L[:, None] - rows_L


def _causal(
    query_SHLD: Tensor,
    key_SGLD: Tensor,
    value_SGLD: Tensor,
    mask_LL: Tensor | None,
    *,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """out [S, L, H, D]; the mask, where given, includes causality."""
    shared = query_SHLD.shape[1] // key_SGLD.shape[1]
    key_SHLD = key_SGLD.repeat_interleave(shared, dim=1) if shared > 1 else key_SGLD
    value_SHLD = value_SGLD.repeat_interleave(shared, dim=1) if shared > 1 else value_SGLD
    if softcap is None:
        out_SHLD = F.scaled_dot_product_attention(
            query_SHLD, key_SHLD, value_SHLD, attn_mask=mask_LL, is_causal=mask_LL is None, scale=scaling
        )
        return out_SHLD.transpose(1, 2)
    scores_SHLL = torch.tanh(query_SHLD @ key_SHLD.transpose(-1, -2) * (scaling / softcap)) * softcap
    if mask_LL is None:
        mask_LL = _distance(query_SHLD.shape[2], query_SHLD.device) >= 0
    scores_SHLL = scores_SHLL.masked_fill(~mask_LL, float("-inf"))
    weights_SHLL = scores_SHLL.softmax(dim=-1, dtype=torch.float32).to(query_SHLD.dtype)
    return (weights_SHLL @ value_SHLD).transpose(1, 2)
