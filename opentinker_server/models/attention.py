"""Attention over one packed row axis, chosen per call.

transformers' own attention modules project, normalise and rotate; then they call the function registered here, which
hands queries, keys and values to whatever `Attention` the caller of the base model passed: packed segments in
training, a cache in sampling.

Shape legend: N token rows, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

IMPLEMENTATION = "opentinker"


class Attention(Protocol):
    """Where the rows of a pass look."""

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
        """Attention output [N, H, D] of one layer, in the dtype of the query.

        `sliding_window` w lets position p see positions p - w + 1 to p; `softcap` c bounds scores by c * tanh(s / c).
        """
        ...


def _forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    attention: Attention = kwargs["opentinker_attention"]
    out_NHD = attention.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
    )
    return out_NHD.unsqueeze(0), None


def register() -> None:
    """Make the implementation known to transformers; repeating it changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, _forward)


def causal_attention(
    query_BHTD: torch.Tensor,
    key_BGTD: torch.Tensor,
    value_BGTD: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention of equally long sequences [B, H, T, D], differentiable."""
    num_rows = query_BHTD.shape[2]
    groups = query_BHTD.shape[1] // key_BGTD.shape[1]
    key = key_BGTD.repeat_interleave(groups, dim=1) if groups > 1 else key_BGTD
    value = value_BGTD.repeat_interleave(groups, dim=1) if groups > 1 else value_BGTD
    windowed = sliding_window is not None and num_rows > sliding_window
    if not windowed and softcap is None:
        return F.scaled_dot_product_attention(query_BHTD, key, value, is_causal=True, scale=scaling)
    position = torch.arange(num_rows, device=query_BHTD.device)
    distance = position[:, None] - position[None, :]
    visible = distance >= 0
    if windowed:
        visible &= distance < sliding_window
    if softcap is None:
        return F.scaled_dot_product_attention(query_BHTD, key, value, attn_mask=visible, scale=scaling)
    scores = query_BHTD @ key.transpose(-1, -2) * scaling
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query_BHTD.dtype) @ value


class PackedCausalAttention:
    """Causal attention inside each segment of the pack and nowhere else.

    `segments`: (start, end) row ranges that tile the rows of the pass in order. Segments of one length are computed
    together.
    """

    def __init__(self, segments: Sequence[tuple[int, int]]):
        end = 0
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, (start, stop) in enumerate(segments):
            if start != end or stop <= start:
                raise ValueError(
                    f"segment {index} is ({start}, {stop}); segments must tile the rows, in order"
                )
            end = stop
            by_length[stop - start].append(index)
        self.segments = list(segments)
        self.num_rows = end
        self._by_length = dict(by_length)

    def attend(self, layer_idx, query_NHD, key_NGD, value_NGD, *, scaling, sliding_window, softcap):
        """See `Attention.attend`."""
        options = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
        if query_NHD.shape[0] != self.num_rows:
            raise ValueError(f"{query_NHD.shape[0]} rows for segments over {self.num_rows}")
        lengths = [end - start for start, end in self.segments]
        parts = [tensor.split(lengths) for tensor in (query_NHD, key_NGD, value_NGD)]
        outputs: list[torch.Tensor | None] = [None] * len(lengths)
        for indices in self._by_length.values():
            query, key, value = (torch.stack([part[i] for i in indices]).transpose(1, 2) for part in parts)
            out_BTHD = causal_attention(query, key, value, **options).transpose(1, 2)
            for place, index in enumerate(indices):
                outputs[index] = out_BTHD[place]
        return torch.cat([out for out in outputs if out is not None])
