"""Causal attention of equally long segments in blocks of query rows: the CPU's path, differentiable.

A block of queries meets only the keys that it may see, so half of the products are never computed, and the query
heads that share a key head are rows of one matmul. Measured on two cores it takes 0.65 of the time of torch's flash
attention in float32 and 0.5 in bfloat16, forwards and backwards, at length 256; 0.15 at length 32.

Shape legend: S segments, L their length, H query heads, G key/value heads, r = H / G, B = S * G, n queries of a
block, k keys that the block sees, D head dimension.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

_BLOCK_ROWS = 64
KEEP_LENGTH = 512
"""Longest segment whose probabilities are kept for the backward pass; those of longer ones are computed again."""


def blocked_attention(
    query_SLHD: Tensor, key_SLGD: Tensor, value_SLGD: Tensor, *, scaling: float, window: int | None
) -> Tensor:
    """out_SLHD, dtype of the query; scores and softmax in float32. A window of w shows row i the rows (i - w, i]."""
    return _BlockedAttention.apply(query_SLHD, key_SLGD, value_SLGD, scaling, window)


class _BlockedAttention(torch.autograd.Function):
    """With P = softmax(scaling * q k^T) over what a row sees, o = P v, and the output's gradient g:

    dv = P^T g,   ds = scaling * P * (g v^T - rowsum(g * o)),   dq = ds k,   dk = ds^T q.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx,
        query_SLHD: Tensor,
        key_SLGD: Tensor,
        value_SLGD: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        num_segments, length, num_heads, _ = query_SLHD.shape
        key_BLD, value_BLD = _by_head(key_SLGD), _by_head(value_SLGD)
        out_SLHD = query_SLHD.new_empty(num_segments, length, num_heads, value_SLGD.shape[-1])
        keep = length <= KEEP_LENGTH and any(ctx.needs_input_grad)  # type: ignore[attr-defined]
        kept = []
        for rows, keys in _blocks(length, window):
            query_BnD = _gather(query_SLHD, rows, key_SLGD.shape[2])
            probs_Bnk = _probabilities(query_BnD, key_BLD[:, keys], rows, keys, scaling=scaling, window=window)
            _scatter(out_SLHD, rows, torch.bmm(probs_Bnk, value_BLD[:, keys]))
            if keep:
                kept.append(probs_Bnk)
        ctx.save_for_backward(query_SLHD, key_BLD, value_BLD, out_SLHD, *kept)
        ctx.scaling, ctx.window = scaling, window  # type: ignore[attr-defined]
        return out_SLHD

    @staticmethod
    @once_differentiable
    def backward(ctx, g_SLHD: Tensor):  # type: ignore[no-untyped-def, override]
        query_SLHD, key_BLD, value_BLD, out_SLHD, *kept = ctx.saved_tensors
        num_segments, length = query_SLHD.shape[:2]
        num_groups = key_BLD.shape[0] // num_segments
        dquery_SLHD = torch.empty_like(query_SLHD)
        dkey_BLD, dvalue_BLD = torch.zeros_like(key_BLD), torch.zeros_like(value_BLD)
        weighted_SLH1 = (g_SLHD * out_SLHD).sum(-1, keepdim=True, dtype=torch.float32)
        for index, (rows, keys) in enumerate(_blocks(length, ctx.window)):
            query_BnD = _gather(query_SLHD, rows, num_groups)
            g_BnD = _gather(g_SLHD, rows, num_groups)
            if kept:
                probs_Bnk = kept[index]
            else:
                probs_Bnk = _probabilities(
                    query_BnD, key_BLD[:, keys], rows, keys, scaling=ctx.scaling, window=ctx.window
                )
            dvalue_BLD[:, keys].baddbmm_(probs_Bnk.mT, g_BnD)
            ds_Bnk = torch.bmm(g_BnD, value_BLD[:, keys].mT)
            ds_Bnk.sub_(_gather(weighted_SLH1, rows, num_groups)).mul_(probs_Bnk).mul_(ctx.scaling)
            _scatter(dquery_SLHD, rows, torch.bmm(ds_Bnk, key_BLD[:, keys]))
            dkey_BLD[:, keys].baddbmm_(ds_Bnk.mT, query_BnD)
        return dquery_SLHD, _by_row(dkey_BLD, num_segments), _by_row(dvalue_BLD, num_segments), None, None


def _blocks(length: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Query rows of each block, and the keys that any of them sees."""
    for start in range(0, length, _BLOCK_ROWS):
        end = min(start + _BLOCK_ROWS, length)
        first = 0 if window is None else max(0, start - window + 1)
        yield slice(start, end), slice(first, end)


def _probabilities(
    query_BnD: Tensor, key_BkD: Tensor, rows: slice, keys: slice, *, scaling: float, window: int | None
) -> Tensor:
    """[B, r * n, k], dtype of the query: the rows of one query head after those of another."""
    scores_Bnk = torch.bmm(query_BnD, key_BkD.mT).float().mul_(scaling)
    num_rows = rows.stop - rows.start
    by_head = scores_Bnk.view(scores_Bnk.shape[0], -1, num_rows, scores_Bnk.shape[-1])
    device = query_BnD.device
    distance_nk = torch.arange(rows.start, rows.stop, device=device)[:, None] - torch.arange(
        keys.start, keys.stop, device=device
    )
    hidden_nk = distance_nk < 0 if window is None else (distance_nk < 0) | (distance_nk >= window)
    by_head.masked_fill_(hidden_nk, float("-inf"))
    torch.softmax(scores_Bnk, -1, out=scores_Bnk)
    return scores_Bnk.to(query_BnD.dtype)


def _by_head(rows_SLGD: Tensor) -> Tensor:
    """[B, L, D], contiguous."""
    return rows_SLGD.transpose(1, 2).flatten(0, 1).contiguous()


def _by_row(rows_BLD: Tensor, num_segments: int) -> Tensor:
    """Inverse of `_by_head`: [S, L, G, D]."""
    return rows_BLD.view(num_segments, -1, *rows_BLD.shape[1:]).transpose(1, 2)


def _gather(rows_SLHD: Tensor, rows: slice, num_groups: int) -> Tensor:
    """Rows of a block as [B, r * n, D]."""
    block = rows_SLHD[:, rows].unflatten(2, (num_groups, -1))  # [S, n, G, r, D]
    return block.permute(0, 2, 3, 1, 4).reshape(block.shape[0] * num_groups, -1, block.shape[-1])


def _scatter(out_SLHD: Tensor, rows: slice, block_BnD: Tensor) -> None:
    """Inverse of `_gather`, into `out`."""
    num_segments, num_rows = out_SLHD.shape[0], rows.stop - rows.start
    block_SHnD = block_BnD.view(num_segments, out_SLHD.shape[2], num_rows, block_BnD.shape[-1])
    out_SLHD[:, rows] = block_SHnD.transpose(1, 2)
