"""From logits to tokens and log-probabilities, vectorised over rows.

A row's token is a function of its own logits, settings and uniform number only. Order of the filters:
temperature, top-k, top-p over what top-k left. Legend: R rows, V vocabulary, K entries of a top-k list.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from opentinker_server.sampler.base import SamplingSettings
from opentinker_server.sampler.philox import uniforms

MASS_TOLERANCE = 1e-6
"""Probabilities carry float32 rounding: a set whose mass is this close to top_p reaches it."""
_SORTED_PREFIXES = (256, 4096)
_CDF_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Settings of R rows, one entry a row, on the device of the logits."""

    temperatures_R: torch.Tensor
    """float32; 0 is greedy."""
    top_ks_R: torch.Tensor
    """int64, in [1, V]; V keeps all."""
    top_ps_R: torch.Tensor
    """float64, in (0, 1]."""
    processed_R: torch.Tensor
    """bool: report the distribution sampled from."""
    uniforms_R: torch.Tensor
    """float64, in [0, 1)."""

    @classmethod
    def build(
        cls,
        settings: Sequence[SamplingSettings],
        *,
        sample_indices: Sequence[int],
        positions: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> "RowSettings":
        """positions: index of the token about to be drawn within its whole sequence, prompt included."""
        seeds_R = np.array([s.seed for s in settings], dtype=np.uint64)
        uniforms_R = uniforms(seeds_R, np.array(sample_indices, dtype=np.uint64), np.array(positions, dtype=np.uint64))
        top_ks = [vocab_size if s.top_k == -1 else min(s.top_k, vocab_size) for s in settings]
        return cls(
            temperatures_R=torch.tensor([s.temperature for s in settings], dtype=torch.float32, device=device),
            top_ks_R=torch.tensor(top_ks, device=device),
            top_ps_R=torch.tensor([s.top_p for s in settings], dtype=torch.float64, device=device),
            processed_R=torch.tensor([s.logprobs_mode == "processed" for s in settings], device=device),
            uniforms_R=torch.from_numpy(uniforms_R).to(device),
        )

    def take(self, index: torch.Tensor) -> "RowSettings":
        """The rows at `index`."""
        return RowSettings(
            temperatures_R=self.temperatures_R[index],
            top_ks_R=self.top_ks_R[index],
            top_ps_R=self.top_ps_R[index],
            processed_R=self.processed_R[index],
            uniforms_R=self.uniforms_R[index],
        )


@dataclass(frozen=True, kw_only=True)
class SampledRows:
    """What `sample` drew. A row whose distribution is not finite has NaN log-probability."""

    tokens_R: torch.Tensor
    """int64."""
    logprobs_R: torch.Tensor
    """float32, natural log."""
    topk_ids_RK: torch.Tensor | None
    """int64, most likely first, ties to the lower id; None when no row asked."""
    topk_logprobs_RK: torch.Tensor | None
    """float32, natural log."""


def sample(logits_RV: torch.Tensor, rows: RowSettings, *, topk: int) -> SampledRows:
    """Draws one token per row. logits_RV: float32 [R, V]; topk: entries to list per row, 0 for none."""
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    greedy_R = rows.temperatures_R == 0
    if bool(greedy_R.all()):
        tokens_R = logits_RV.argmax(dim=-1)
    elif bool(greedy_R.any()):
        tokens_R = torch.empty(len(logits_RV), dtype=torch.long, device=logits_RV.device)
        greedy, random = torch.nonzero(greedy_R).squeeze(1), torch.nonzero(~greedy_R).squeeze(1)
        tokens_R[greedy] = logits_RV[greedy].argmax(dim=-1)
        tokens_R[random], probs_RV = _draw(logits_RV[random], rows.take(random))
        logprobs_RV = _replace_processed(logprobs_RV, probs_RV, random, rows)
    else:
        tokens_R, probs_RV = _draw(logits_RV, rows)
        logprobs_RV = _replace_processed(logprobs_RV, probs_RV, None, rows)
    certain = torch.nonzero(greedy_R & rows.processed_R).squeeze(1)
    if certain.numel():
        logprobs_RV[certain] = _point_mass_logprobs(logprobs_RV[certain], tokens_R[certain])
    logprobs_R = logprobs_RV.gather(1, tokens_R[:, None]).squeeze(1)
    if topk == 0:
        return SampledRows(tokens_R=tokens_R, logprobs_R=logprobs_R, topk_ids_RK=None, topk_logprobs_RK=None)
    topk_ids_RK, topk_logprobs_RK = top_logprobs(logprobs_RV, topk)
    return SampledRows(
        tokens_R=tokens_R, logprobs_R=logprobs_R, topk_ids_RK=topk_ids_RK, topk_logprobs_RK=topk_logprobs_RK
    )


def top_logprobs(logprobs_RV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most likely ids (int64 [R, k]) and their log-probabilities, ties to the lower id."""
    num_rows, vocab_size = logprobs_RV.shape
    k = min(k, vocab_size)
    if k == 0:
        return logprobs_RV.new_empty(num_rows, 0, dtype=torch.long), logprobs_RV.new_empty(num_rows, 0)
    logprobs_RV = logprobs_RV.masked_fill(logprobs_RV.isnan(), float("-inf"))
    keep_RV = _exactly_top(logprobs_RV, torch.full((num_rows,), k, device=logprobs_RV.device))
    ids_RK = torch.nonzero(keep_RV)[:, 1].view(num_rows, k)
    values_RK, order_RK = logprobs_RV.gather(1, ids_RK).sort(dim=1, descending=True, stable=True)
    return ids_RK.gather(1, order_RK), values_RK


def _point_mass_logprobs(logprobs_RV: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
    """ln of the distribution that is 1 at the token; NaN rows stay NaN."""
    out_RV = torch.full_like(logprobs_RV, float("-inf"))
    chosen_R1 = logprobs_RV.gather(1, tokens_R[:, None])
    return out_RV.scatter_(1, tokens_R[:, None], chosen_R1 - chosen_R1)


def _draw(logits_RV: torch.Tensor, rows: RowSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (int64 [R]) and what they were drawn from: float32 [R, V], 0 outside the support, mass <= 1.

    Temperatures are above 0.
    """
    # The maximum is subtracted first: a tiny temperature must not overflow logits / temperature.
    shifted_RV = logits_RV - logits_RV.amax(dim=-1, keepdim=True)
    probs_RV = torch.softmax(shifted_RV.div_(rows.temperatures_R[:, None]), dim=-1)
    filtered = torch.nonzero((rows.top_ks_R < logits_RV.shape[1]) | (rows.top_ps_R < 1)).squeeze(1)
    if filtered.numel():
        subset_RV = probs_RV[filtered]
        sizes_R = _support_sizes(subset_RV, rows.top_ks_R[filtered], rows.top_ps_R[filtered])
        probs_RV[filtered] = subset_RV.masked_fill_(~_exactly_top(subset_RV, sizes_R), 0.0)
    return _inverse_cdf(probs_RV, rows.uniforms_R), probs_RV


def _replace_processed(
    logprobs_RV: torch.Tensor, probs_QV: torch.Tensor, index_Q: torch.Tensor | None, rows: RowSettings
) -> torch.Tensor:
    """Writes ln of the normalised probs_QV over those of rows index_Q (None: all) that report them."""
    processed_Q = rows.processed_R if index_Q is None else rows.processed_R[index_Q]
    chosen = torch.nonzero(processed_Q).squeeze(1)
    if chosen.numel():
        probs_CV = probs_QV[chosen]
        target = chosen if index_Q is None else index_Q[chosen]
        logprobs_RV[target] = (probs_CV / probs_CV.sum(dim=-1, keepdim=True)).log_()
    return logprobs_RV


def _support_sizes(probs_RV: torch.Tensor, top_ks_R: torch.Tensor, top_ps_R: torch.Tensor) -> torch.Tensor:
    """Number of most likely tokens that top-k, then top-p over the rest, leave: int64 [R], at least 1."""
    sizes_R = top_ks_R.clone()
    nucleus = torch.nonzero(top_ps_R < 1).squeeze(1)
    if nucleus.numel():
        sizes_R[nucleus] = _nucleus_sizes(probs_RV[nucleus], top_ks_R[nucleus], top_ps_R[nucleus])
    return sizes_R


def _nucleus_sizes(probs_RV: torch.Tensor, top_ks_R: torch.Tensor, top_ps_R: torch.Tensor) -> torch.Tensor:
    """Sorts a prefix of the vocabulary only, and longer ones for rows whose prefix falls short."""
    vocab_size = probs_RV.shape[1]
    sizes_R = torch.empty_like(top_ks_R)
    open_R = torch.arange(len(sizes_R), device=sizes_R.device)
    for prefix in (*(p for p in _SORTED_PREFIXES if p < vocab_size), vocab_size):
        subset_RV, ks_R, ps_R = probs_RV[open_R], top_ks_R[open_R], top_ps_R[open_R]
        sorted_RP = subset_RV.topk(prefix, dim=1).values.to(torch.float64)
        sizes_R[open_R] = _sizes_from_sorted(sorted_RP, ks_R, ps_R, vocab_size)
        reached_R = sorted_RP.sum(dim=1) >= ps_R - MASS_TOLERANCE
        # With top-k the mass to reach is known only once all of the k are.
        short_R = torch.where(ks_R == vocab_size, ~reached_R, ks_R > prefix)
        open_R = open_R[short_R]
        if not open_R.numel():
            break
    return sizes_R


def _sizes_from_sorted(
    sorted_RP: torch.Tensor, top_ks_R: torch.Tensor, top_ps_R: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Tokens whose predecessors do not reach top_p of the mass that top-k leaves (1 without top-k)."""
    within_RP = torch.arange(sorted_RP.shape[1], device=sorted_RP.device) < top_ks_R[:, None]
    kept_RP = torch.where(within_RP, sorted_RP, 0.0)
    masses_R1 = torch.where(top_ks_R == vocab_size, 1.0, kept_RP.sum(dim=1))[:, None]
    before_RP = kept_RP.cumsum(dim=1) - kept_RP
    wanted_R1 = (top_ps_R[:, None] - MASS_TOLERANCE) * masses_R1
    return (within_RP & (before_RP < wanted_R1)).sum(dim=1).clamp(min=1)


def _exactly_top(values_RV: torch.Tensor, sizes_R: torch.Tensor) -> torch.Tensor:
    """bool [R, V]: exactly sizes_R[r] largest values of each row, ties to the lower id."""
    vocab_size = values_RV.shape[1]
    largest = int(sizes_R.max())
    if largest == vocab_size and bool((sizes_R == vocab_size).all()):
        return torch.ones_like(values_RV, dtype=torch.bool)
    thresholds_R1 = values_RV.topk(largest, dim=1).values.gather(1, sizes_R[:, None] - 1)
    above_RV = values_RV > thresholds_R1
    ties_RV = values_RV == thresholds_R1
    wanted_R1 = sizes_R[:, None] - above_RV.sum(dim=1, keepdim=True)
    if bool((ties_RV.sum(dim=1, keepdim=True) == wanted_R1).all()):
        return above_RV | ties_RV
    return above_RV | (ties_RV & (ties_RV.cumsum(dim=1) <= wanted_R1))


def _inverse_cdf(probs_RV: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    """First id, in id order, whose cumulative mass exceeds uniform * total: int64 [R].

    Two levels, so that float64 is paid for one block of the vocabulary only. An id of zero mass is never
    chosen: its cumulative mass equals its predecessor's.
    """
    num_rows, vocab_size = probs_RV.shape
    num_blocks = -(-vocab_size // _CDF_BLOCK)
    padding = num_blocks * _CDF_BLOCK - vocab_size
    blocks_RCB = torch.nn.functional.pad(probs_RV, (0, padding)) if padding else probs_RV
    blocks_RCB = blocks_RCB.view(num_rows, num_blocks, _CDF_BLOCK)
    masses_RC = blocks_RCB.sum(dim=2).to(torch.float64)
    cdf_RC = masses_RC.cumsum(dim=1)
    targets_R1 = uniforms_R[:, None] * cdf_RC[:, -1:]
    block_R1 = (cdf_RC <= targets_R1).sum(dim=1, keepdim=True).clamp(max=num_blocks - 1)
    mass_R1 = masses_RC.gather(1, block_R1)
    share_R1 = ((targets_R1 - cdf_RC.gather(1, block_R1) + mass_R1) / mass_R1).clamp(min=0)
    block_RB = blocks_RCB.gather(1, block_R1[:, :, None].expand(-1, 1, _CDF_BLOCK)).squeeze(1)
    cdf_RB = block_RB.to(torch.float64).cumsum(dim=1)
    # A share that rounding brought up to 1 falls on the last id that has mass.
    last_R1 = (cdf_RB < cdf_RB[:, -1:]).sum(dim=1, keepdim=True)
    offset_R1 = torch.minimum((cdf_RB <= share_R1 * cdf_RB[:, -1:]).sum(dim=1, keepdim=True), last_R1)
    return (block_R1 * _CDF_BLOCK + offset_R1).squeeze(1)
