"""What each loss function is called, needs and can be told. Free of torch: the control plane validates
requests with it, and `losses` computes by it.

Notation of the formulas, for target token t of a datum: p log-probability under the adapter as it is,
q log-probability under the policy that sampled it (input `logprobs`), A advantage, r = exp(p - q),
sg(x) = x without gradient, clip(x) = min(max(x, low), high) with the token's `clip_low` and `clip_high` where
the datum has them, clip_low_threshold and clip_high_threshold otherwise.
Where mask_ratio_low or mask_ratio_high is set, a token with r < mask_ratio_low or r > mask_ratio_high gives
neither value nor gradient (masked importance sampling, Ling Team 2025, arXiv:2510.18855).
Every loss is the plain SUM of its terms over tokens and datums. Tokens whose mask is 0 take no part; neither
their value nor their gradient can be touched by what stands in the other inputs there.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

LARGEST_RATIO = 1e30
"""Of a configured bound: float32 must hold it."""


@dataclass(frozen=True, kw_only=True)
class ConfigKey:
    """A number that the caller may set for one call."""

    default: float
    """Taken when the call does not name the key."""

    minimum: float
    """Smallest allowed value, itself allowed."""

    maximum: float
    """Largest allowed value, itself allowed unless it is infinite."""

    doc: str
    """One sentence for people."""


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """One loss function's name, inputs and configuration."""

    name: str
    """As sent in `loss_fn`."""

    formula: str
    """The term of one token; the loss is the sum over tokens and datums."""

    required: frozenset[str]
    """Inputs that each datum must have."""

    optional: frozenset[str] = frozenset()
    """Inputs that a datum may have; any other is refused."""

    config: dict[str, ConfigKey] = field(default_factory=dict)
    """Configuration keys; any other is refused."""

    two_dimensional_targets: bool = False
    """Whether target_tokens (and weights with it) may have shape [T, K]."""

    per_token: bool = True
    """Whether a token's term depends on that token alone, so that the loss may be evaluated on any part of a datum."""


def _clip_keys(of: str) -> dict[str, ConfigKey]:
    """Absolute bounds of a ratio, not distances from 1."""
    return {
        "clip_low_threshold": ConfigKey(
            default=0.8, minimum=0.0, maximum=LARGEST_RATIO, doc=f"Lower bound of {of}, as an absolute ratio."
        ),
        "clip_high_threshold": ConfigKey(
            default=1.2, minimum=0.0, maximum=LARGEST_RATIO, doc=f"Upper bound of {of}, as an absolute ratio."
        ),
    }


_MASK_KEYS = {
    "mask_ratio_low": ConfigKey(
        default=0.0,
        minimum=0.0,
        maximum=LARGEST_RATIO,
        doc="Tokens whose importance ratio is below this contribute nothing; 0 masks none.",
    ),
    "mask_ratio_high": ConfigKey(
        default=0.0,
        minimum=0.0,
        maximum=LARGEST_RATIO,
        doc="Tokens whose importance ratio is above this contribute nothing; 0 masks none.",
    ),
}
_CLIP_INPUTS = frozenset({"clip_low", "clip_high"})
"""Bounds of each token, absolute ratios at least 0; one that is absent is that of the configuration."""

_POLICY_INPUTS = frozenset({"target_tokens", "logprobs", "advantages", "mask"})

CROSS_ENTROPY = LossSpec(
    name="cross_entropy",
    formula="-weight * p; weight is 1 where `weights` is absent, 0 where `mask` is 0",
    required=frozenset({"target_tokens"}),
    optional=frozenset({"weights", "mask"}),
    two_dimensional_targets=True,
)
IMPORTANCE_SAMPLING = LossSpec(
    name="importance_sampling",
    formula="-r * A, never clipped; with truncate_ratio c above 0: -sg(min(r, c)) * exp(p - sg(p)) * A",
    required=_POLICY_INPUTS,
    config={
        "truncate_ratio": ConfigKey(
            default=0.0,
            minimum=0.0,
            maximum=LARGEST_RATIO,
            doc="Upper bound of the importance ratio as a coefficient; the gradient stays. 0 bounds nothing.",
        )
    }
    | _MASK_KEYS,
)
PPO = LossSpec(
    name="ppo",
    formula="-min(r * A, clip(r) * A)",
    required=_POLICY_INPUTS,
    optional=_CLIP_INPUTS,
    config=_clip_keys("the importance ratio") | _MASK_KEYS,
)
CISPO = LossSpec(
    name="cispo",
    formula="-sg(clip(r)) * p * A",
    required=_POLICY_INPUTS,
    optional=_CLIP_INPUTS,
    config=_clip_keys("the importance ratio used as coefficient") | _MASK_KEYS,
)
DRO = LossSpec(
    name="dro",
    formula="-(p * A - beta / 2 * (p - q)^2)",
    required=_POLICY_INPUTS,
    config={
        "beta": ConfigKey(
            default=0.05,
            minimum=0.0,
            maximum=1e6,
            doc="Strength of the pull towards the sampling policy.",
        )
    },
)
GSPO = LossSpec(
    name="gspo",
    formula=(
        "-min(s_t * A, clip(s_t) * A), s_t = sg(s) * exp(p - sg(p)), s = exp(mean of p - q over the tokens "
        "of the datum with sequence_ratio_mask, or where that is absent mask, not 0)"
    ),
    required=_POLICY_INPUTS,
    optional=frozenset({"sequence_ratio_mask"}),
    config=_clip_keys("the sequence ratio"),
    per_token=False,
)

LOSS_SPECS: dict[str, LossSpec] = {
    spec.name: spec for spec in (CROSS_ENTROPY, IMPORTANCE_SAMPLING, PPO, CISPO, DRO, GSPO)
}
"""By name; the values of `loss_fn` that the server takes."""


def resolve_config(spec: LossSpec, config: dict[str, float]) -> dict[str, float]:
    """The given values over the defaults.

    Raises ValueError, naming the key, the value and what is allowed, for an unknown key, a value that is
    not a number in range, or a lower bound above the upper one.
    """
    for name, value in config.items():
        if name not in spec.config:
            known = ", ".join(sorted(spec.config)) or "none"
            raise ValueError(f"{spec.name} has no configuration key '{name}'; it has: {known}")
        key = spec.config[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{spec.name}: '{name}' must be a number, not {value!r}")
        if not (math.isfinite(value) and key.minimum <= value <= key.maximum):
            raise ValueError(f"{spec.name}: '{name}' must be finite and in [{key.minimum}, {key.maximum}], not {value}")
    resolved = {name: float(config.get(name, key.default)) for name, key in spec.config.items()}
    if crossed := crossed_bounds(resolved):
        low, high = crossed
        raise ValueError(f"{spec.name}: {low} {resolved[low]} is above {high} {resolved[high]}")
    return resolved


def crossed_bounds(config: Mapping[str, float]) -> tuple[str, str] | None:
    """The keys of a lower bound that lies above its upper one, if there are such; `config` has every key."""
    if "clip_low_threshold" in config and config["clip_low_threshold"] > config["clip_high_threshold"]:
        return "clip_low_threshold", "clip_high_threshold"
    if "mask_ratio_low" in config and config["mask_ratio_low"] > config["mask_ratio_high"] > 0:
        return "mask_ratio_low", "mask_ratio_high"
    return None
