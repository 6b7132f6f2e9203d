"""One forward, or forward and backward, over packed datums of one or several adapters.

Every row meets its own adapter only, attention never leaves a datum, and losses are sums over tokens: what an
adapter gets does not depend on the company its rows travel in.

Shape legend: N token rows of the pack, M target entries, D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from opentinker_server.models.attention import PackedCausalAttention
from opentinker_server.models.base import BaseModel
from opentinker_server.models.lora import LoraRows, LoraWeights
from opentinker_server.training.datum import Pack, TrainDatum, pack_datums
from opentinker_server.training.head import HEAD_MODULE, AdapterSegment, Head
from opentinker_server.training.loss_specs import LossSpec
from opentinker_server.training.losses import LOSS_FUNCTIONS, LossInputs

Gradients = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Module name -> gradients of its (A, B), float32, shaped like them."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """One adapter's part of a pass. An adapter takes part in a pass at most once."""

    weights: LoraWeights
    """Leaf tensors that require gradients."""

    spec: LossSpec
    """The loss."""

    config: dict[str, float]
    """Its configuration, every key present."""

    data: Sequence[TrainDatum]
    """At least one."""


@dataclass(frozen=True, kw_only=True)
class ShareResult:
    """What a pass computed for one share."""

    logprobs: list[np.ndarray]
    """Per datum, float32, shaped like its targets; natural log at temperature 1."""

    losses: list[float]
    """Per datum: the sum of its terms."""

    observations: dict[str, torch.Tensor]
    """See `losses.LossTerms`."""

    gradients: Gradients | None
    """Absent in a pass without backward."""


def run_pass(base: BaseModel, shares: Sequence[Share], *, backward: bool, head_chunk_rows: int) -> list[ShareResult]:
    """Runs `shares` as one pack; results in their order. Nothing is accumulated anywhere."""
    packs = [pack_datums(share.data, share.spec, device=base.device) for share in shares]
    segments, row_offsets = _place(shares, packs)
    attention = PackedCausalAttention(
        [
            (offset + start, offset + end)
            for pack, offset in zip(packs, row_offsets, strict=True)
            for start, end in pack.segments
        ]
    )
    rows_M = torch.cat([pack.rows_M + offset for pack, offset in zip(packs, row_offsets, strict=True)])
    targets_M = torch.cat([pack.targets_M for pack in packs])
    with torch.set_grad_enabled(backward):
        hidden_ND = base.hidden_states(
            torch.cat([pack.tokens_N for pack in packs]),
            torch.cat([pack.positions_N for pack in packs]),
            attention=attention,
            lora=LoraRows.from_segments([(part.start, part.end, part.weights) for part in segments]),
        )
    head = Head(base=base, segments=segments, chunk_rows=head_chunk_rows)
    logprobs_M = head.logprobs(hidden_ND.detach(), rows_M, targets_M)
    results, grads = [], []
    for share, pack, part_M in zip(shares, packs, _split(logprobs_M, packs), strict=True):
        result, grad_M = _evaluate(share, pack, part_M, backward=backward)
        results.append(result)
        grads.append(grad_M)
    if not backward:
        return results
    gradients = _backward(shares, hidden_ND, head, rows_M, targets_M, torch.cat(grads))
    return [
        ShareResult(
            logprobs=result.logprobs,
            losses=result.losses,
            observations=result.observations,
            gradients=gradient,
        )
        for result, gradient in zip(results, gradients, strict=True)
    ]


def _place(shares: Sequence[Share], packs: Sequence[Pack]) -> tuple[list[AdapterSegment], list[int]]:
    """The rows of each share, one after the other, and where each begins."""
    segments: list[AdapterSegment] = []
    for share, pack in zip(shares, packs, strict=True):
        start = segments[-1].end if segments else 0
        segments.append(AdapterSegment(start=start, end=start + len(pack.tokens_N), weights=share.weights))
    return segments, [segment.start for segment in segments]


def _split(logprobs_M: torch.Tensor, packs: Sequence[Pack]) -> tuple[torch.Tensor, ...]:
    return logprobs_M.split([len(pack.targets_M) for pack in packs])


def _evaluate(
    share: Share, pack: Pack, logprobs_M: torch.Tensor, *, backward: bool
) -> tuple[ShareResult, torch.Tensor]:
    """The loss of one share, and its gradient by the log-probabilities [M] (zeros without backward)."""
    leaf_M = logprobs_M.detach().requires_grad_(backward)
    inputs = LossInputs(values_M=pack.inputs_M, datums_M=pack.datums_M, num_datums=len(share.data))
    with torch.set_grad_enabled(backward):
        terms = LOSS_FUNCTIONS[share.spec.name](leaf_M, inputs, share.config)
    if backward:
        (grad_M,) = torch.autograd.grad(terms.terms_M.sum(), leaf_M)
    else:
        grad_M = torch.zeros_like(leaf_M)
    values_M = leaf_M.detach().cpu().numpy()
    terms_M = terms.terms_M.detach().cpu().numpy().astype(np.float64)
    ends = np.cumsum(pack.entry_counts)[:-1]
    result = ShareResult(
        logprobs=[
            part.reshape(datum.targets.shape).copy()
            for part, datum in zip(np.split(values_M, ends), share.data, strict=True)
        ],
        losses=[float(part.sum()) for part in np.split(terms_M, ends)],
        observations=terms.observations,
        gradients=None,
    )
    return result, grad_M


def _backward(
    shares: Sequence[Share],
    hidden_ND: torch.Tensor,
    head: Head,
    rows_M: torch.Tensor,
    targets_M: torch.Tensor,
    grad_M: torch.Tensor,
) -> list[Gradients]:
    """Gradients of each share's factors; a factor that the loss does not reach gets zeros."""
    names = [(index, module) for index, share in enumerate(shares) for module in share.weights.factors]
    head_names = [name for name in names if name[1] == HEAD_MODULE]
    body_names = [name for name in names if name[1] != HEAD_MODULE]

    def factors(of: list[tuple[int, str]]) -> list[torch.Tensor]:
        return [factor for index, module in of for factor in shares[index].weights.factors[module]]

    grad_ND, head_grads = head.backward(hidden_ND, rows_M, targets_M, grad_M, factors(head_names))
    body = factors(body_names)
    body_grads: list[torch.Tensor | None] = [None] * len(body)
    if body and hidden_ND.requires_grad and bool((grad_M != 0).any()):
        body_grads = list(torch.autograd.grad(hidden_ND, body, grad_ND, allow_unused=True))
    flat = [
        torch.zeros_like(factor, requires_grad=False) if grad is None else grad
        for grad, factor in zip([*head_grads, *body_grads], factors(head_names) + body, strict=True)
    ]
    gradients: list[Gradients] = [{} for _ in shares]
    for place, (index, module) in enumerate([*head_names, *body_names]):
        gradients[index][module] = (flat[2 * place], flat[2 * place + 1])
    return gradients
