"""Attention of one engine step over the slab cache: prefill chunks and decode rows of many sequences.

Legend: N token rows, R decode rows, S slots, H query heads, G key/value heads, Q = H / G query heads that
share a key/value head, L attended length, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from opentinker_server.sampler.kv_cache import SizeClass, Slab


@dataclass(frozen=True, kw_only=True)
class CachedSpan:
    """Consecutive tokens of one sequence on the packed row axis."""

    slab: Slab
    first_row: int
    start: int
    """Position of the first token; those before it are in the slab."""
    num_tokens: int

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens


class KvCacheAttention:
    """Writes a step's keys and values into the cache and attends causally to each sequence's own.

    Implements `opentinker_server.models.attention.Attention`. The spans tile the rows.
    """

    def __init__(self, spans: Sequence[CachedSpan], *, device: torch.device) -> None:
        decode: dict[SizeClass, list[CachedSpan]] = {}
        self._parts: list[_PrefillSpan | _DecodeGroup] = []
        for span in spans:
            span.slab.num_written = max(span.slab.num_written, span.end)
            if span.num_tokens == 1:
                decode.setdefault(span.slab.size_class, []).append(span)
            else:
                self._parts.append(_PrefillSpan(span, device=device))
        self._parts += [_DecodeGroup(group, device=device) for group in decode.values()]

    def attend(
        self,
        layer_idx: int,
        query_NHD: torch.Tensor,
        key_NGD: torch.Tensor,
        value_NGD: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """out_NHD, dtype of the query. A window of w lets position i attend to (i - w, i]."""
        out_NHD = torch.empty_like(query_NHD, memory_format=torch.contiguous_format)
        for part in self._parts:
            part.write(layer_idx, key_NGD, value_NGD)
            out_NHD[part.rows] = part.attend(
                layer_idx,
                query_NHD[part.rows],
                scaling=scaling,
                sliding_window=sliding_window,
                softcap=softcap,
            )
        return out_NHD


class _PrefillSpan:
    """Several tokens of one sequence."""

    def __init__(self, span: CachedSpan, *, device: torch.device) -> None:
        self.rows = slice(span.first_row, span.first_row + span.num_tokens)
        self._span = span
        self._device = device
        self._biases: dict[int | None, torch.Tensor | None] = {}

    def write(self, layer_idx: int, key_NGD: torch.Tensor, value_NGD: torch.Tensor) -> None:
        keys_GCD, values_GCD = self._layer(layer_idx)
        keys_GCD[:, self._span.start : self._span.end] = key_NGD[self.rows].transpose(0, 1)
        values_GCD[:, self._span.start : self._span.end] = value_NGD[self.rows].transpose(0, 1)

    def attend(
        self,
        layer_idx: int,
        query_NHD: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        keys_GCD, values_GCD = self._layer(layer_idx)
        length = self._span.end
        num_rows, num_heads, head_dim = query_NHD.shape
        num_kv_heads = keys_GCD.shape[0]
        shared = num_heads // num_kv_heads
        query_GQND = query_NHD.view(num_rows, num_kv_heads, shared, head_dim).permute(1, 2, 0, 3)
        keys_GQLD = keys_GCD[:, None, :length].expand(-1, shared, -1, -1)
        values_GQLD = values_GCD[:, None, :length].expand(-1, shared, -1, -1)
        bias_NL = self._bias(sliding_window, query_NHD.dtype, explicit=softcap is not None)
        out_GQND = _attend(
            query_GQND,
            keys_GQLD,
            values_GQLD,
            bias_NL,
            causal=bias_NL is None,
            scaling=scaling,
            softcap=softcap,
        )
        return out_GQND.permute(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim)

    def _layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys_SGCD, values_SGCD = _storage(self._span.slab.size_class)[layer_idx]
        return keys_SGCD[self._span.slab.slot], values_SGCD[self._span.slab.slot]

    def _bias(self, sliding_window: int | None, dtype: torch.dtype, *, explicit: bool) -> torch.Tensor | None:
        """None where plain causal attention from position 0 says it all."""
        if sliding_window is not None and sliding_window >= self._span.end:
            sliding_window = None
        if self._span.start == 0 and sliding_window is None and not explicit:
            return None
        if sliding_window not in self._biases:
            queries_N1 = torch.arange(self._span.start, self._span.end, device=self._device)[:, None]
            keys_L = torch.arange(self._span.end, device=self._device)
            self._biases[sliding_window] = _bias(keys_L, queries_N1, sliding_window, dtype)
        return self._biases[sliding_window]


class _DecodeGroup:
    """One token each of sequences whose slabs have one capacity."""

    def __init__(self, spans: Sequence[CachedSpan], *, device: torch.device) -> None:
        spans = sorted(spans, key=lambda span: span.slab.slot)
        slots = [span.slab.slot for span in spans]
        rows = [span.first_row for span in spans]
        in_order = rows == list(range(rows[0], rows[0] + len(rows)))
        self.rows = slice(rows[0], rows[0] + len(rows)) if in_order else torch.tensor(rows, device=device)
        self._size_class = spans[0].slab.size_class
        self._slots_R = torch.tensor(slots, device=device)
        self._positions_R = torch.tensor([span.start for span in spans], device=device)
        self._length = max(span.end for span in spans)
        self._same_length = all(span.end == self._length for span in spans)
        self._dense = slots[-1] + 1 == len(slots)
        # A view over idle slots beats gathering while at least half of the slots it covers are wanted.
        self._num_viewed = slots[-1] + 1 if slots[-1] + 1 <= 2 * len(slots) else None
        self._biases: dict[int | None, torch.Tensor | None] = {}

    def write(self, layer_idx: int, key_NGD: torch.Tensor, value_NGD: torch.Tensor) -> None:
        keys_SGCD, values_SGCD = _storage(self._size_class)[layer_idx]
        keys_SGCD[self._slots_R, :, self._positions_R] = key_NGD[self.rows]
        values_SGCD[self._slots_R, :, self._positions_R] = value_NGD[self.rows]

    def attend(
        self,
        layer_idx: int,
        query_RHD: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        storage_SGCD = _storage(self._size_class)[layer_idx]
        if self._num_viewed is None:
            keys_SGLD, values_SGLD = storage_SGCD[:, self._slots_R, :, : self._length]
        else:
            keys_SGLD, values_SGLD = storage_SGCD[:, : self._num_viewed, :, : self._length]
        num_kv_heads = keys_SGLD.shape[1]
        query_RGQD = query_RHD.reshape(query_RHD.shape[0], num_kv_heads, -1, query_RHD.shape[2])
        scattered = self._num_viewed is not None and not self._dense
        if scattered:
            query_SGQD = query_RGQD.new_zeros(keys_SGLD.shape[0], *query_RGQD.shape[1:])
            query_SGQD[self._slots_R] = query_RGQD
        else:
            query_SGQD = query_RGQD
        bias_S11L = self._bias(sliding_window, query_RHD.dtype)
        out_SGQD = _attend(
            query_SGQD, keys_SGLD, values_SGLD, bias_S11L, causal=False, scaling=scaling, softcap=softcap
        )
        out_RGQD = out_SGQD[self._slots_R] if scattered else out_SGQD
        return out_RGQD.reshape(query_RHD.shape)

    def _bias(self, sliding_window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """None where every row attends to all of the common length."""
        if sliding_window is not None and sliding_window >= self._length:
            sliding_window = None
        if sliding_window is None and self._same_length:
            return None
        if sliding_window not in self._biases:
            positions_S = self._positions_R
            if self._num_viewed is not None and not self._dense:
                # Idle slots attend to their first position only: finite, and discarded.
                positions_S = torch.zeros(self._num_viewed, dtype=torch.long, device=self._slots_R.device)
                positions_S[self._slots_R] = self._positions_R
            keys_L = torch.arange(self._length, device=self._slots_R.device)
            bias_SL = _bias(keys_L, positions_S[:, None], sliding_window, dtype)
            self._biases[sliding_window] = bias_SL[:, None, None, :]
        return self._biases[sliding_window]


def _storage(size_class: SizeClass) -> torch.Tensor:
    assert size_class.storage is not None
    return size_class.storage


def _bias(
    keys_L: torch.Tensor, queries_N1: torch.Tensor, sliding_window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """[N, L]: 0 where the key's position may be seen, else -inf."""
    hidden_NL = keys_L > queries_N1
    if sliding_window is not None:
        hidden_NL = hidden_NL | (keys_L <= queries_N1 - sliding_window)
    zeros_NL = torch.zeros(hidden_NL.shape, dtype=dtype, device=keys_L.device)
    return zeros_NL.masked_fill_(hidden_NL, float("-inf"))


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    causal: bool,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """softmax(cap(scaling * Q K^T) + bias) V over the last two axes; cap(x) = softcap * tanh(x / softcap)."""
    if softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, is_causal=causal, scale=scaling)
    scores = (query @ keys.transpose(-1, -2)).float() * scaling
    scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.float()
    return torch.softmax(scores, dim=-1).to(query.dtype) @ values
