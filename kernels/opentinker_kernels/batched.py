"""The grouped low-rank delta in torch operations: the fast path of the CPU, and the differentiable path.

Groups of similar height run together as one padded batched matmul, a single group as a plain matmul on a
slice of its rows where they are neighbours. Both add straight into the output.

Shape legend: N token rows, G groups of one batch, M rows of its tallest group, R largest rank of the batch,
K input features, O output features.
"""

from collections.abc import Sequence

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from opentinker_kernels.grouping import RowBatch, RowGroups
from opentinker_kernels.weights import BatchFactors, SlotFactors, StackedSlots, common_scale

Weights = Sequence[SlotFactors | None] | StackedSlots


def add_delta_(out_NO: torch.Tensor, x_NK: torch.Tensor, weights: Weights, groups: RowGroups) -> None:
    """Add every row's delta to `out_NO` in place, without autograd."""
    for batch in groups.batches:
        factors = _batch_factors(weights, batch, dtype=x_NK.dtype, device=x_NK.device)
        if factors is not None:
            h_GMR = _shrink(_take(x_NK, batch), factors, batch)
            _scatter_add_(out_NO, h_GMR, factors.B_GRO, batch)


class FactorGradients:
    """Gathers the gradients of many linears' factors, stacked as they are computed.

    For passes over many slots, where one autograd leaf per slot and factor would cost more than the arithmetic.
    `anchor` is the leaf to differentiate by; its own gradient means nothing.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self._parts: dict[str, list[tuple[tuple[int, ...], torch.Tensor, torch.Tensor]]] = {}

    def add(self, linear: str, slots: tuple[int, ...], dA_GRK: torch.Tensor, dB_GOR: torch.Tensor) -> None:
        """Called by the backward pass; 2-D, without G, for a single slot."""
        self._parts.setdefault(linear, []).append((slots, dA_GRK, dB_GOR))

    def of(self, linear: str, slot: int, rank: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Gradients of A [r, K] and B [O, r] of one slot, views; None where the slot had no rows there."""
        for slots, dA_GRK, dB_GOR in self._parts.get(linear, ()):
            if slot in slots:
                if dA_GRK.dim() == 2:
                    return dA_GRK, dB_GOR
                place = slots.index(slot)
                return dA_GRK[place, :rank], dB_GOR[place, :, :rank]
        return None


def add_delta_with_grad(
    out: torch.Tensor,
    x: torch.Tensor,
    weights: Sequence[SlotFactors | None],
    groups: RowGroups,
    *,
    base_OK: torch.Tensor | None = None,
    gather: tuple[FactorGradients, str] | None = None,
) -> torch.Tensor:
    """`add_delta_` as one autograd node: gradients to `out`, `x` and the factors of slots with rows.

    out: [..., O], x: [..., K]; modifies `out` and returns it. base_OK: the frozen weight by which `out` was made
    from `x` outside autograd; the node then carries that gradient to `x` as well. gather: where the gradients of the
    factors go, under which name, instead of to the factors. Keeps for the backward pass `x` and the shrunk rows; no
    intermediate of the output's size.
    """
    if gather is not None:
        return _GroupedDelta.apply(out, x, base_OK, weights, groups, gather, gather[0].anchor)
    tensors = [t for slot in groups.slots if (own := weights[slot]) is not None for t in (own.A_RK, own.B_OR)]
    return _GroupedDelta.apply(out, x, base_OK, weights, groups, None, *tensors)


def _batch_factors(
    weights: Weights, batch: RowBatch, *, dtype: torch.dtype, device: torch.device
) -> BatchFactors | None:
    """The batch's factors stacked in its order of slots; None where no slot of it has any."""
    if isinstance(weights, StackedSlots):
        return weights.read(batch, dtype=dtype)
    own_G = [weights[slot] for slot in batch.slots]
    present = [own for own in own_G if own is not None]
    if not present:
        return None
    if len(own_G) == 1:
        (own,) = present
        return BatchFactors(A_GKR=own.A_RK.to(dtype).t(), B_GRO=own.B_OR.to(dtype).t(), scale=own.scale)
    scale = common_scale([own.scale if own is not None else None for own in own_G], dtype=dtype, device=device)
    if len(present) == len(own_G) and len({own.A_RK.shape[0] for own in present}) == 1:
        A_GRK = torch.stack([own.A_RK for own in present]).to(dtype)
        B_GOR = torch.stack([own.B_OR for own in present]).to(dtype)
    else:
        max_rank = max(own.A_RK.shape[0] for own in present)
        A_GRK = torch.zeros(len(own_G), max_rank, present[0].A_RK.shape[1], dtype=dtype, device=device)
        B_GOR = torch.zeros(len(own_G), present[0].B_OR.shape[0], max_rank, dtype=dtype, device=device)
        for g, factors in enumerate(own_G):
            if factors is not None:
                A_GRK[g, : factors.A_RK.shape[0]] = factors.A_RK
                B_GOR[g, :, : factors.A_RK.shape[0]] = factors.B_OR
    return BatchFactors(A_GKR=A_GRK.transpose(1, 2), B_GRO=B_GOR.transpose(1, 2), scale=scale)


def _take(rows_NF: torch.Tensor, batch: RowBatch) -> torch.Tensor:
    """The batch's rows as [G, M, F], [M, F] for one group; a view where they lie in order."""
    taken = rows_NF[batch.rows] if isinstance(batch.rows, slice) else rows_NF.index_select(0, batch.rows)
    return taken if len(batch.slots) == 1 else taken.view(len(batch.slots), batch.height, -1)


def _matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.mm(left, right) if left.dim() == 2 else torch.bmm(left, right)


def _shrink(x_GMK: torch.Tensor, factors: BatchFactors, batch: RowBatch) -> torch.Tensor:
    """scale * x A^T [G, M, R], zero on padding: a padded row then adds nothing, forwards or backwards."""
    return _masked_scale_(_matmul(x_GMK, factors.A_GKR), factors, batch)


def _masked_scale_(h_GMR: torch.Tensor, factors: BatchFactors, batch: RowBatch) -> torch.Tensor:
    if batch.padding_GM1 is not None:
        h_GMR.masked_fill_(batch.padding_GM1, 0)
    return h_GMR.mul_(factors.scale)


def _scatter_add_(out_NF: torch.Tensor, h_GMR: torch.Tensor, right_GRF: torch.Tensor, batch: RowBatch) -> None:
    """out[rows] += h @ right, in place; the product is not materialised where the rows lie in order."""
    if not isinstance(batch.rows, slice):
        out_NF.index_add_(0, batch.rows, _matmul(h_GMR, right_GRF).view(len(batch.rows), -1))
    elif h_GMR.dim() == 2:
        out_NF[batch.rows].addmm_(h_GMR, right_GRF)
    else:
        out_NF[batch.rows].view(*h_GMR.shape[:2], -1).baddbmm_(h_GMR, right_GRF)


class _GroupedDelta(torch.autograd.Function):
    """out + scale * (x A^T) B^T per group. With h = scale * x A^T and the output's gradient g:

    dB = g^T h,   dh = scale * g B,   dA = dh^T x,   dx = dh A,   each over the group's own rows.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx,
        out: torch.Tensor,
        x: torch.Tensor,
        base_OK: torch.Tensor | None,
        weights: Sequence[SlotFactors | None],
        groups: RowGroups,
        gather: tuple[FactorGradients, str] | None,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """tensors: the factors of the slots that have any, or with `gather` its anchor."""
        out_NO, x_NK = out.view(-1, out.shape[-1]), x.reshape(-1, x.shape[-1])
        h_batches: list[torch.Tensor | None] = []
        # Kept for the backward pass: for one slot they are views, for several the copies cost more than their memory.
        ctx.factors = []  # type: ignore[attr-defined]
        for batch in groups.batches:
            factors = _batch_factors(weights, batch, dtype=x_NK.dtype, device=x_NK.device)
            ctx.factors.append(factors)  # type: ignore[attr-defined]
            if factors is None:
                h_batches.append(None)
                continue
            h_GMR = _shrink(_take(x_NK, batch), factors, batch)
            _scatter_add_(out_NO, h_GMR, factors.B_GRO, batch)
            h_batches.append(h_GMR)
        ctx.mark_dirty(out)
        # The factors too, so that autograd notices one that was changed in place since.
        ctx.save_for_backward(x, base_OK, *h_batches, *tensors)  # type: ignore[arg-type]
        ctx.groups, ctx.gather = groups, gather  # type: ignore[attr-defined]
        ctx.ranks = {  # type: ignore[attr-defined]
            slot: (own.A_RK.shape[0], own.A_RK.dtype) for slot in groups.slots if (own := weights[slot]) is not None
        }
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, g: torch.Tensor):  # type: ignore[no-untyped-def, override]
        batches = ctx.groups.batches
        x, base_OK, *saved = ctx.saved_tensors
        x_NK, g_NO = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        want_x, want_factors = ctx.needs_input_grad[1], any(ctx.needs_input_grad[6:])
        dx_NK = None
        if want_x:
            dx_NK = torch.zeros_like(x_NK, memory_format=torch.contiguous_format) if base_OK is None else g_NO @ base_OK
        grads: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for batch, factors, h_GMR in zip(batches, ctx.factors, saved[: len(batches)], strict=True):
            if factors is None:
                continue
            g_GMO = _take(g_NO, batch)
            dh_GMR = _masked_scale_(_matmul(g_GMO, factors.B_GRO.mT), factors, batch)
            if want_factors:
                dA_GRK, dB_GOR = _matmul(dh_GMR.mT, _take(x_NK, batch)), _matmul(g_GMO.mT, h_GMR)
                if ctx.gather is not None:
                    ctx.gather[0].add(ctx.gather[1], batch.slots, dA_GRK, dB_GOR)
                else:
                    _split_by_slot(dA_GRK, dB_GOR, batch, ctx.ranks, grads)
            if dx_NK is not None:
                _scatter_add_(dx_NK, dh_GMR, factors.A_GKR.mT, batch)
        found: list[torch.Tensor | None] = [None] if ctx.gather is not None else [None] * (2 * len(ctx.ranks))
        if grads:
            found = [grad for slot in ctx.ranks for grad in grads[slot]]
        dx = dx_NK.view_as(x) if dx_NK is not None else None
        return (g if ctx.needs_input_grad[0] else None, dx, None, None, None, None, *found)


def _split_by_slot(
    dA_GRK: torch.Tensor,
    dB_GOR: torch.Tensor,
    batch: RowBatch,
    ranks: dict[int, tuple[int, torch.dtype]],
    grads: dict[int, tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Sets `grads` (A, B) of the batch's slots, in the dtype of their factors."""
    for g, slot in enumerate(batch.slots):
        if slot in ranks:
            rank, dtype = ranks[slot]
            dA, dB = (dA_GRK, dB_GOR) if len(batch.slots) == 1 else (dA_GRK[g, :rank], dB_GOR[g, :, :rank])
            grads[slot] = (dA.to(dtype), dB.to(dtype))
