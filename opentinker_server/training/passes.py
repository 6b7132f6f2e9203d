"""One forward, or forward and backward, over packed datums of one or several adapters.

Every row meets its own adapter only, attention never leaves a datum, and losses are sums over tokens: what an
adapter gets does not depend on the company its rows travel in.

Shape legend: N token rows of the pack, M target entries that take part in a loss, E all target entries, D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from opentinker_kernels import FactorGradients

from opentinker_server.models.attention import PackedCausalAttention
from opentinker_server.models.base import BaseModel
from opentinker_server.models.lora import LoraRows, LoraWeights
from opentinker_server.training.datum import Pack, TrainDatum, pack_datums
from opentinker_server.training.head import HEAD_MODULE, AdapterSegment, Head
from opentinker_server.training.loss_specs import LossSpec
from opentinker_server.training.losses import LOSS_FUNCTIONS, LossInputs

Gradients = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Module name -> gradients of its (A, B), shaped and typed like them."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """One call's part of a pass."""

    weights: LoraWeights
    """Leaf tensors that require gradients, of this share alone: two calls of one adapter bring aliases of their own."""

    spec: LossSpec
    """The loss."""

    config: dict[str, float]
    """Its configuration, every key present."""

    data: Sequence[TrainDatum]
    """At least one."""

    trained_only: bool = False
    """Log-probabilities of entries that take no part in the loss are not wanted: 0 stands for them."""


@dataclass(frozen=True, kw_only=True)
class ShareResult:
    """What a pass computed for one share."""

    logprobs: list[np.ndarray]
    """Per datum, float32, shaped like its targets; natural log at temperature 1."""

    losses: list[float]
    """Per datum: the sum of its terms."""

    observations: list[dict[str, torch.Tensor]]
    """What the loss observed, part by part; see `losses.LossTerms`."""

    gradients: Gradients | None
    """Absent in a pass without backward."""


def run_pass(
    base: BaseModel, shares: Sequence[Share], *, backward: bool, head_chunk_rows: int, recompute: bool = False
) -> list[ShareResult]:
    """Runs `shares` as one pack; results in their order. Nothing is accumulated anywhere.

    recompute: the backward pass computes each layer again, for less memory.
    """
    packs = [pack_datums(share.data, share.spec, device=base.device) for share in shares]
    offsets = [0, *accumulate(len(pack.tokens_N) for pack in packs)]
    segments = [
        AdapterSegment(start=start, end=end, weights=share.weights)
        for start, end, share in zip(offsets, offsets[1:], shares, strict=False)
    ]
    attention = PackedCausalAttention(
        [
            (offset + start, offset + end)
            for pack, offset in zip(packs, offsets, strict=False)
            for start, end in pack.segments
        ]
    )
    body = FactorGradients(base.device)
    with torch.set_grad_enabled(backward):
        hidden_ND = base.hidden_states(
            torch.cat([pack.tokens_N for pack in packs]),
            torch.cat([pack.positions_N for pack in packs]),
            attention=attention,
            lora=LoraRows.from_segments([(part.start, part.end, part.weights) for part in segments], gradients=body),
            recompute=recompute,
        )
    head = Head(base=base, segments=segments, chunk_rows=head_chunk_rows)
    evaluations = [_Evaluation(share, pack) for share, pack in zip(shares, packs, strict=True)]
    whole = hidden_ND.detach()
    for evaluation, offset in zip(evaluations, offsets, strict=False):
        pack = evaluation.pack
        if not backward or not evaluation.share.spec.per_token:
            evaluation.take_all(head.logprobs(whole, pack.rows_M + offset, pack.targets_M), backward=backward)
        if not evaluation.share.trained_only:
            evaluation.take_rest(head.logprobs(whole, pack.rest.rows_M + offset, pack.rest.targets_M))
    gradients: list[Gradients | None] = [None] * len(shares)
    if backward:
        gradients = [*_backward(evaluations, hidden_ND, head, body, offsets)]
    return [evaluation.result(gradient) for evaluation, gradient in zip(evaluations, gradients, strict=True)]


class _Evaluation:
    """The loss of one share, evaluated at once or, where its terms stand alone, chunk by chunk."""

    def __init__(self, share: Share, pack: Pack) -> None:
        self.share = share
        self.pack = pack
        num_entries = len(pack.targets_M)
        self._terms_M = np.zeros(num_entries)
        self._logprobs_E = np.zeros(sum(pack.entry_counts), np.float32)
        self._observations: list[dict[str, torch.Tensor]] = []
        self._grad_M: torch.Tensor | None = None

    def take_all(self, logprobs_M: torch.Tensor, *, backward: bool) -> None:
        """Evaluates the whole loss; keeps its gradient for `gradient`."""
        self._grad_M = self._evaluate(slice(0, len(logprobs_M)), logprobs_M, backward=backward)

    def take_rest(self, logprobs_M: torch.Tensor) -> None:
        """Takes in the log-probabilities of the entries that take no part."""
        self._logprobs_E[self.pack.rest.places_M] = logprobs_M.cpu().numpy()

    def gradient(self, entries: slice, logprobs_m: torch.Tensor) -> torch.Tensor:
        """Gradient of the loss by the log-probabilities of some entries, float32 [m]."""
        if self._grad_M is not None:
            return self._grad_M[entries]
        return self._evaluate(entries, logprobs_m, backward=True)

    def _evaluate(self, entries: slice, logprobs_m: torch.Tensor, *, backward: bool) -> torch.Tensor:
        leaf_m = logprobs_m.detach().requires_grad_(backward)
        inputs = LossInputs(
            values_M={name: values[entries] for name, values in self.pack.inputs_M.items()},
            datums_M=self.pack.datums_M[entries],
            num_datums=len(self.share.data),
        )
        with torch.set_grad_enabled(backward):
            terms = LOSS_FUNCTIONS[self.share.spec.name](leaf_m, inputs, self.share.config)
        self._observations.append(terms.observations)
        self._terms_M[entries] = terms.terms_M.detach().cpu().numpy()
        self._logprobs_E[self.pack.places_M[entries]] = leaf_m.detach().cpu().numpy()
        if not backward or len(leaf_m) == 0:
            return torch.zeros_like(logprobs_m)
        (grad_m,) = torch.autograd.grad(terms.terms_M.sum(), leaf_m)
        return grad_m

    def result(self, gradients: Gradients | None) -> ShareResult:
        losses_D = np.zeros(len(self.share.data))
        np.add.at(losses_D, self.pack.datums_M.cpu().numpy(), self._terms_M)
        parts = np.split(self._logprobs_E, np.cumsum(self.pack.entry_counts)[:-1])
        return ShareResult(
            logprobs=[part.reshape(datum.targets.shape) for part, datum in zip(parts, self.share.data, strict=True)],
            losses=losses_D.tolist(),
            observations=self._observations,
            gradients=gradients,
        )


def _backward(
    evaluations: Sequence[_Evaluation],
    hidden_ND: torch.Tensor,
    head: Head,
    body: FactorGradients,
    offsets: Sequence[int],
) -> list[Gradients]:
    """Gradients of each share's factors; a factor that the loss does not reach gets zeros."""
    packs = [evaluation.pack for evaluation in evaluations]
    starts = [0, *accumulate(len(pack.targets_M) for pack in packs)]
    shares = [evaluation.share for evaluation in evaluations]
    with_head = [index for index, share in enumerate(shares) if HEAD_MODULE in share.weights.factors]

    def gradient(entries: slice, logprobs_m: torch.Tensor) -> torch.Tensor:
        parts = []
        for evaluation, start, end in zip(evaluations, starts, starts[1:], strict=False):
            first, last = max(entries.start, start), min(entries.stop, end)
            if first < last:
                own = logprobs_m[first - entries.start : last - entries.start]
                parts.append(evaluation.gradient(slice(first - start, last - start), own))
        return torch.cat(parts)

    found = head.gradients(
        hidden_ND,
        torch.cat([pack.rows_M + offset for pack, offset in zip(packs, offsets, strict=False)]),
        torch.cat([pack.targets_M for pack in packs]),
        gradient,
        [factor for index in with_head for factor in shares[index].weights.factors[HEAD_MODULE]],
    )
    if hidden_ND.requires_grad and found.any_nonzero:
        torch.autograd.grad(hidden_ND, body.anchor, found.hidden_ND, allow_unused=True)
    # Every share has rows and weights of its own: its place is its slot.
    gradients: list[Gradients] = [
        {module: _body_gradient(body, module, index, *pair) for module, pair in share.weights.factors.items()}
        for index, share in enumerate(shares)
    ]
    for place, index in enumerate(with_head):
        gradients[index][HEAD_MODULE] = (found.factors[2 * place], found.factors[2 * place + 1])
    return gradients


def _body_gradient(
    body: FactorGradients, module: str, slot: int, a_RI: torch.Tensor, b_OR: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    found = body.of(module, slot, a_RI.shape[0])
    if found is None:
        return torch.zeros_like(a_RI, requires_grad=False), torch.zeros_like(b_OR, requires_grad=False)
    return found[0].to(a_RI.dtype), found[1].to(b_OR.dtype)
