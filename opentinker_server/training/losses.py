"""The loss functions: pure, in float32, masked by `where`, reduced by sum.

Formulas, with their notation, stand in `loss_specs`. Each function gets the log-probabilities of the target
entries of a pack and returns the term of each entry. An entry that takes no part gives exactly zero and has
exactly zero gradient, even where its ratio would overflow or an input holds NaN: the offending value is
replaced before any function with an unbounded derivative sees it, since 0 * inf would be NaN.

Shape legend: M target entries of a pack, D datums of a pack.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What a loss reads beside the log-probabilities."""

    values_M: dict[str, torch.Tensor]
    """float32 [M] by name: every input that the loss declares but `target_tokens`. `clip_low` and `clip_high` may be
    absent, or NaN for a token that has no bound of its own."""

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
    """Per metric the values of the entries that take part, without gradient; see `METRICS`."""


LossFunction = Callable[[torch.Tensor, LossInputs, dict[str, float]], LossTerms]

METRICS: dict[str, tuple[str, ...]] = {
    "ratio": ("mean", "max"),
    "effective_sample_size": ("share",),
    "clipped": ("mean",),
    "masked": ("mean",),
    "kl_k1": ("mean",),
    "kl_k3": ("mean",),
    "entropy": ("mean",),
    "tokens": ("sum",),
}
"""Reductions reported for each observed quantity, as "<name>:<reduction>".

All are over the entries that take part: mask not 0 and, except for dro, advantage not 0. `ratio` importance ratio r
of the token, before any bound; `effective_sample_size` (sum of r)^2 / sum of r^2 as a share of the tokens (Kish 1965),
1 where all ratios are equal, observed as log r; `clipped` 1 where a bound replaced the ratio; `masked` 1 where the
ratio left the token without value and gradient; `kl_k1` q - p and `kl_k3` r - 1 - log r, estimators of
KL(sampling policy || adapter) from tokens of the sampling policy (Schulman 2020, "Approximating KL Divergence");
`entropy` -p, which estimates the adapter's entropy as far as the tokens are its own; `tokens` 1 each. Losses that
never clip or mask lack `clipped` or `masked`. A quantity without entries is left out: a mean over nothing is not zero.
"""


def cross_entropy(logprobs_M: torch.Tensor, inputs: LossInputs, config: dict[str, float]) -> LossTerms:
    """-weight * p."""
    weights_M = inputs.values_M["weights"]
    taking_part_M = (inputs.values_M["mask"] != 0) & (weights_M != 0)
    zero = torch.zeros_like(logprobs_M)
    terms_M = -torch.where(taking_part_M, weights_M, zero) * torch.where(taking_part_M, logprobs_M, zero)
    return LossTerms(terms_M=terms_M, observations={"tokens": torch.ones_like(terms_M[taking_part_M])})


@dataclass(frozen=True, kw_only=True)
class _Policy:
    """The inputs of the policy losses, safe to compute with where an entry gives nothing."""

    counted_M: torch.Tensor
    """bool: takes part and is not masked by its ratio. Elsewhere the three tensors below are 0."""

    logprobs_M: torch.Tensor
    advantages_M: torch.Tensor
    log_ratio_M: torch.Tensor
    taking_part_M: torch.Tensor
    """bool: observed."""

    observed_logprobs_M: torch.Tensor
    """Without gradient, of masked entries, too."""

    observed_log_ratio_M: torch.Tensor

    def observations(self, **shares_M: torch.Tensor) -> dict[str, torch.Tensor]:
        """shares_M: bool, by the name of the metric."""
        entries = self.taking_part_M.nonzero().squeeze(1)
        # float64: r - 1 - log r of a ratio close to 1 is below the rounding of r in float32
        log_ratio = self.observed_log_ratio_M[entries].double()
        found = {
            "ratio": log_ratio.exp(),
            "effective_sample_size": log_ratio,
            "kl_k1": -log_ratio,
            "kl_k3": log_ratio.expm1() - log_ratio,
            "entropy": -self.observed_logprobs_M[entries].double(),
            "tokens": torch.ones_like(log_ratio),
        }
        return found | {name: share_M[entries].double() for name, share_M in shares_M.items()}

    @property
    def masked_M(self) -> torch.Tensor:
        """bool: takes part but for its ratio."""
        return self.taking_part_M & ~self.counted_M


def _policy(
    logprobs_M: torch.Tensor,
    inputs: LossInputs,
    *,
    mask_low: float = 0.0,
    mask_high: float = 0.0,
    zero_advantage_matters: bool = False,
) -> _Policy:
    """mask_low, mask_high: ratios outside are masked; 0 is no bound."""
    advantages_M = inputs.values_M["advantages"]
    taking_part_M = inputs.values_M["mask"] != 0
    if not zero_advantage_matters:
        taking_part_M = taking_part_M & (advantages_M != 0)
    zero = torch.zeros_like(logprobs_M)
    log_ratio_M = torch.where(taking_part_M, logprobs_M - inputs.values_M["logprobs"], zero)
    observed_log_ratio_M = log_ratio_M.detach()
    counted_M = taking_part_M
    if mask_low or mask_high:
        ratio_M = observed_log_ratio_M.exp()
        # a ratio that is NaN is outside of nothing: it has to be seen
        counted_M = taking_part_M & ~((ratio_M < mask_low) | (ratio_M > (mask_high or math.inf)))
        log_ratio_M = torch.where(counted_M, log_ratio_M, zero)
    return _Policy(
        counted_M=counted_M,
        logprobs_M=torch.where(counted_M, logprobs_M, zero),
        advantages_M=torch.where(counted_M, advantages_M, zero),
        log_ratio_M=log_ratio_M,
        taking_part_M=taking_part_M,
        observed_logprobs_M=logprobs_M.detach(),
        observed_log_ratio_M=observed_log_ratio_M,
    )


def _masked_policy(logprobs_M: torch.Tensor, inputs: LossInputs, config: dict[str, float]) -> _Policy:
    return _policy(logprobs_M, inputs, mask_low=config["mask_ratio_low"], mask_high=config["mask_ratio_high"])


def importance_sampling(logprobs_M: torch.Tensor, inputs: LossInputs, config: dict[str, float]) -> LossTerms:
    """-r * A, never clipped; with c = truncate_ratio above 0, -sg(min(r, c)) * exp(p - sg(p)) * A.

    The two agree where r <= c, gradient included: d exp(p - q) = r dp. Beyond, the gradient stays, with coefficient c
    (truncated importance sampling, Ionides 2008, doi:10.1198/106186008X320456).
    """
    policy = _masked_policy(logprobs_M, inputs, config)
    log_ratio_M, limit = policy.log_ratio_M, config["truncate_ratio"]
    truncated_M = torch.zeros_like(policy.counted_M)
    coefficient_M = torch.ones_like(log_ratio_M)
    if limit:
        truncated_M = policy.counted_M & (log_ratio_M.detach().exp() > limit)
        log_ratio_M = torch.where(truncated_M, policy.logprobs_M - policy.logprobs_M.detach(), log_ratio_M)
        coefficient_M = torch.where(truncated_M, limit * coefficient_M, coefficient_M)
    terms_M = -(coefficient_M * log_ratio_M.exp()) * policy.advantages_M
    return LossTerms(terms_M=terms_M, observations=policy.observations(clipped=truncated_M, masked=policy.masked_M))


def _bound_M(policy: _Policy, inputs: LossInputs, name: str, default: float) -> torch.Tensor:
    """float32 [M]: the token's own bound where it has one and counts, `default` elsewhere."""
    default_M = torch.full_like(policy.advantages_M, default)
    if name not in inputs.values_M:
        return default_M
    own_M = inputs.values_M[name]
    return torch.where(policy.counted_M & ~own_M.isnan(), own_M, default_M)


def _bounds_M(policy: _Policy, inputs: LossInputs, config: dict[str, float]) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        _bound_M(policy, inputs, "clip_low", config["clip_low_threshold"]),
        _bound_M(policy, inputs, "clip_high", config["clip_high_threshold"]),
    )


def _clipped_surrogate(
    log_ratio_M: torch.Tensor, advantages_M: torch.Tensor, low_M: torch.Tensor, high_M: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(r * A, clip(r) * A) [M] and where the bound is what counts, bool [M].

    There the gradient is zero, and the ratio, which may be infinite, is kept out of the graph.
    """
    ratio_M = log_ratio_M.detach().exp()
    bounded_M = ratio_M.clamp(low_M, high_M)
    clipped_M = ((advantages_M > 0) & (ratio_M > bounded_M)) | ((advantages_M < 0) & (ratio_M < bounded_M))
    live_ratio_M = torch.where(clipped_M, torch.zeros_like(log_ratio_M), log_ratio_M).exp()
    return torch.where(clipped_M, bounded_M * advantages_M, live_ratio_M * advantages_M), clipped_M


def ppo(logprobs_M: torch.Tensor, inputs: LossInputs, config: dict[str, float]) -> LossTerms:
    """-min(r * A, clip(r) * A) (Schulman et al. 2017, arXiv:1707.06347)."""
    policy = _masked_policy(logprobs_M, inputs, config)
    low_M, high_M = _bounds_M(policy, inputs, config)
    surrogate_M, clipped_M = _clipped_surrogate(policy.log_ratio_M, policy.advantages_M, low_M, high_M)
    return LossTerms(terms_M=-surrogate_M, observations=policy.observations(clipped=clipped_M, masked=policy.masked_M))


def cispo(logprobs_M: torch.Tensor, inputs: LossInputs, config: dict[str, float]) -> LossTerms:
    """-sg(clip(r)) * p * A: the bound limits the coefficient, the gradient stays (arXiv:2506.13585)."""
    policy = _masked_policy(logprobs_M, inputs, config)
    low_M, high_M = _bounds_M(policy, inputs, config)
    ratio_M = policy.log_ratio_M.detach().exp()
    coefficient_M = ratio_M.clamp(low_M, high_M)
    terms_M = -coefficient_M * policy.logprobs_M * policy.advantages_M
    clipped_M = policy.counted_M & (coefficient_M != ratio_M)
    return LossTerms(terms_M=terms_M, observations=policy.observations(clipped=clipped_M, masked=policy.masked_M))


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
    log_ratio_M = torch.where(policy.counted_M, log_sequence_ratio_M + live_M, torch.zeros_like(live_M))
    low_M, high_M = (torch.full_like(live_M, config[f"clip_{end}_threshold"]) for end in ("low", "high"))
    surrogate_M, clipped_M = _clipped_surrogate(log_ratio_M, policy.advantages_M, low_M, high_M)
    return LossTerms(terms_M=-surrogate_M, observations=policy.observations(clipped=clipped_M))


LOSS_FUNCTIONS: dict[str, LossFunction] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
"""By name; the names are those of `loss_specs.LOSS_SPECS`."""
