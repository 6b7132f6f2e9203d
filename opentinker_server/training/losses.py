"""The loss functions: pure, in float32, masked by `where`, reduced by sum.

Formulas, with their notation, stand in `loss_specs`. Each function gets the log-probabilities of the target
entries of a pack and returns the term of each entry. An entry that takes no part gives exactly zero and has
exactly zero gradient, even where its ratio would overflow or an input holds NaN: the offending value is
replaced before any function with an unbounded derivative sees it, since 0 * inf would be NaN.

Shape legend: M target entries of a pack, D datums of a pack.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What a loss reads beside the log-probabilities."""

    values_M: dict[str, torch.Tensor]
    """float32 [M] by name: every input that the loss declares but `target_tokens`."""

    datums_M: torch.Tensor
    """int64 [M]: the datum of each entry, in [0, num_datums)."""

    num_datums: int
    """D."""


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What a loss returns."""

    terms_M: torch.Tensor
    """float32 [M]: the loss is their sum."""

    observations: dict[str, torch.Tensor] = field(default_factory=dict)
    """Per metric the values of the entries that take part, float32, without gradient; see `METRICS`."""


LossFunction = Callable[[torch.Tensor, LossInputs, dict[str, float]], LossTerms]

METRICS: dict[str, tuple[str, ...]] = {
    "ratio": ("mean", "max"),
    "clipped": ("mean",),
    "kl_k1": ("mean",),
    "kl_k3": ("mean",),
    "tokens": ("sum",),
}
"""Reductions reported for each observed quantity, as "<name>:<reduction>".

All are over the entries that take part: mask not 0 and, except for dro, advantage not 0. `ratio` importance
ratio of the token; `clipped` 1 where the bound replaced it; `kl_k1` q - p and `kl_k3` r - 1 - (p - q),
estimators of KL(sampling policy, adapter); `tokens` 1 each. A quantity without entries is left out: a mean
over nothing is not zero.
"""


def cross_entropy(logprobs_M: torch.Tensor, inputs: LossInputs, config: dict[str, float]) -> LossTerms:
    """-weight * p."""
    weights_M = inputs.values_M["weights"]
    taking_part_M = (inputs.values_M["mask"] != 0) & (weights_M != 0)
    zero = torch.zeros_like(logprobs_M)
    terms_M = -torch.where(taking_part_M, weights_M, zero) * torch.where(taking_part_M, logprobs_M, zero)
    return LossTerms(terms_M=terms_M, observations={"tokens": torch.ones_like(terms_M[taking_part_M])})


@dataclass(frozen=True)
class _Policy:
    """The inputs of the policy losses, safe to compute with where an entry takes no part."""

    taking_part_M: torch.Tensor
    logprobs_M: torch.Tensor
    advantages_M: torch.Tensor
    log_ratio_M: torch.Tensor

    def observations(self, clipped_M: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        log_ratio = self.log_ratio_M.detach()[self.taking_part_M]
        ratio = log_ratio.exp()
        found = {
            "ratio": ratio,
            "kl_k1": -log_ratio,
            "kl_k3": ratio - 1 - log_ratio,
            "tokens": torch.ones_like(ratio),
        }
        if clipped_M is not None:
            found["clipped"] = clipped_M[self.taking_part_M].to(ratio.dtype)
        return found


def _policy(logprobs_M: torch.Tensor, inputs: LossInputs, *, zero_advantage_matters: bool = False) -> _Policy:
    advantages_M = inputs.values_M["advantages"]
    taking_part_M = inputs.values_M["mask"] != 0
    if not zero_advantage_matters:
        taking_part_M = taking_part_M & (advantages_M != 0)
    zero = torch.zeros_like(logprobs_M)
    return _Policy(
        taking_part_M=taking_part_M,
        logprobs_M=torch.where(taking_part_M, logprobs_M, zero),
        advantages_M=torch.where(taking_part_M, advantages_M, zero),
        log_ratio_M=torch.where(taking_part_M, logprobs_M - inputs.values_M["logprobs"], zero),
    )


def importance_sampling(logprobs_M: torch.Tensor, inputs: LossInputs, config: dict[str, float]) -> LossTerms:
    """-r * A, never clipped."""
    policy = _policy(logprobs_M, inputs)
    terms_M = -policy.log_ratio_M.exp() * policy.advantages_M
    return LossTerms(terms_M=terms_M, observations=policy.observations())


def _clipped_surrogate(
    log_ratio_M: torch.Tensor, advantages_M: torch.Tensor, config: dict[str, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(r * A, clip(r) * A) [M] and where the bound is what counts, bool [M].

    There the gradient is zero, and the ratio, which may be infinite, is kept out of the graph.
    """
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    ratio_M = log_ratio_M.detach().exp()
    clipped_M = ((advantages_M > 0) & (ratio_M > high)) | ((advantages_M < 0) & (ratio_M < low))
    live_ratio_M = torch.where(clipped_M, torch.zeros_like(log_ratio_M), log_ratio_M).exp()
    bounded_M = ratio_M.clamp(low, high) * advantages_M
    return torch.where(clipped_M, bounded_M, live_ratio_M * advantages_M), clipped_M


def ppo(logprobs_M: torch.Tensor, inputs: LossInputs, config: dict[str, float]) -> LossTerms:
    """-min(r * A, clip(r) * A) (Schulman et al. 2017, arXiv:1707.06347)."""
    policy = _policy(logprobs_M, inputs)
    surrogate_M, clipped_M = _clipped_surrogate(policy.log_ratio_M, policy.advantages_M, config)
    return LossTerms(terms_M=-surrogate_M, observations=policy.observations(clipped_M))


def cispo(logprobs_M: torch.Tensor, inputs: LossInputs, config: dict[str, float]) -> LossTerms:
    """-sg(clip(r)) * p * A: the bound limits the coefficient, the gradient stays (arXiv:2506.13585)."""
    policy = _policy(logprobs_M, inputs)
    ratio_M = policy.log_ratio_M.detach().exp()
    coefficient_M = ratio_M.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    terms_M = -coefficient_M * policy.logprobs_M * policy.advantages_M
    return LossTerms(terms_M=terms_M, observations=policy.observations(coefficient_M != ratio_M))


def dro(logprobs_M: torch.Tensor, inputs: LossInputs, config: dict[str, float]) -> LossTerms:
    """-(p * A - beta / 2 * (p - q)^2) (arXiv:2405.19107). The pull counts where the advantage is 0, too."""
    policy = _policy(logprobs_M, inputs, zero_advantage_matters=True)
    pull_M = config["beta"] / 2 * policy.log_ratio_M.square()
    terms_M = -(policy.logprobs_M * policy.advantages_M - pull_M)
    return LossTerms(terms_M=terms_M, observations=policy.observations())


def gspo(logprobs_M: torch.Tensor, inputs: LossInputs, config: dict[str, float]) -> LossTerms:
    """-min(s_t * A, clip(s_t) * A) with one ratio per datum (GSPO-token, arXiv:2507.18071)."""
    policy = _policy(logprobs_M, inputs)
    in_sequence_M = inputs.values_M["sequence_ratio_mask"] != 0
    difference_M = (logprobs_M - inputs.values_M["logprobs"]).detach()
    difference_M = torch.where(in_sequence_M, difference_M, torch.zeros_like(difference_M))
    totals_D = difference_M.new_zeros(inputs.num_datums).index_add(0, inputs.datums_M, difference_M)
    counts_D = difference_M.new_zeros(inputs.num_datums).index_add(
        0, inputs.datums_M, in_sequence_M.to(difference_M.dtype)
    )
    log_sequence_ratio_M = (totals_D / counts_D.clamp(min=1))[inputs.datums_M]
    live_M = policy.logprobs_M - policy.logprobs_M.detach()
    log_ratio_M = torch.where(policy.taking_part_M, log_sequence_ratio_M + live_M, torch.zeros_like(live_M))
    surrogate_M, clipped_M = _clipped_surrogate(log_ratio_M, policy.advantages_M, config)
    return LossTerms(terms_M=-surrogate_M, observations=policy.observations(clipped_M))


LOSS_FUNCTIONS: dict[str, LossFunction] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
"""By name; the names are those of `loss_specs.LOSS_SPECS`."""
