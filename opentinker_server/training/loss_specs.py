"""What each loss function is called, needs and can be told. Free of torch: the control plane validates
requests with it, and `losses` computes by it.

Notation of the formulas, for target token t of a datum: p log-probability under the adapter as it is,
q log-probability under the policy that sampled it (input `logprobs`), A advantage, r = exp(p - q),
sg(x) = x without gradient, clip(x) = x bounded to [clip_low_threshold, clip_high_threshold].
Every loss is the plain SUM of its terms over tokens and datums. Tokens whose mask is 0 take no part; neither
their value nor their gradient can be touched by what stands in the other inputs there.
"""

import math
from dataclasses import dataclass, field


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


def _clip_keys(of: str) -> dict[str, ConfigKey]:
    """Absolute bounds of a ratio, not distances from 1."""
    return {
        "clip_low_threshold": ConfigKey(
            default=0.8, minimum=0.0, maximum=math.inf, doc=f"Lower bound of {of}, as an absolute ratio."
        ),
        "clip_high_threshold": ConfigKey(
            default=1.2, minimum=0.0, maximum=math.inf, doc=f"Upper bound of {of}, as an absolute ratio."
        ),
    }


_POLICY_INPUTS = frozenset({"target_tokens", "logprobs", "advantages", "mask"})

CROSS_ENTROPY = LossSpec(
    name="cross_entropy",
    formula="-weight * p; weight is 1 where `weights` is absent, 0 where `mask` is 0",
    required=frozenset({"target_tokens"}),
    optional=frozenset({"weights", "mask"}),
    two_dimensional_targets=True,
)
IMPORTANCE_SAMPLING = LossSpec(name="importance_sampling", formula="-r * A, never clipped", required=_POLICY_INPUTS)
PPO = LossSpec(
    name="ppo",
    formula="-min(r * A, clip(r) * A)",
    required=_POLICY_INPUTS,
    config=_clip_keys("the importance ratio"),
)
CISPO = LossSpec(
    name="cispo",
    formula="-sg(clip(r)) * p * A",
    required=_POLICY_INPUTS,
    config=_clip_keys("the importance ratio used as coefficient"),
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
    if "clip_low_threshold" in resolved and resolved["clip_low_threshold"] > resolved["clip_high_threshold"]:
        raise ValueError(
            f"{spec.name}: clip_low_threshold {resolved['clip_low_threshold']} is above "
            f"clip_high_threshold {resolved['clip_high_threshold']}"
        )
    return resolved
