"""Each loss against an independent float64 formula, its published table, and hostile values."""

import math

import numpy as np
import pytest
import torch

from opentinker_server.training.loss_specs import LOSS_SPECS, resolve_config
from opentinker_server.training.losses import LOSS_FUNCTIONS, LossInputs
from opentinker_server.training.metrics import MetricAccumulator

POLICY_LOSSES = ["importance_sampling", "ppo", "cispo", "dro", "gspo"]


def evaluate(name, current, config=None, datums=None, /, **inputs):
    """Sum of the terms and its gradient by the log-probabilities, both from our float32 code."""
    p = torch.tensor(current, dtype=torch.float32, requires_grad=True)
    inputs.setdefault("mask", [1.0] * len(p))
    if name == "gspo":
        inputs.setdefault("sequence_ratio_mask", inputs["mask"])
    datums = torch.tensor([0] * len(p) if datums is None else datums)
    terms = LOSS_FUNCTIONS[name](
        p,
        LossInputs(
            values_M={key: torch.tensor(value, dtype=torch.float32) for key, value in inputs.items()},
            datums_M=datums,
            num_datums=int(datums.max()) + 1,
        ),
        resolve_config(LOSS_SPECS[name], config or {}),
    )
    loss = terms.terms_M.sum()
    metrics = MetricAccumulator()
    metrics.add(terms.observations)
    return loss.item(), torch.autograd.grad(loss, p)[0].numpy(), metrics.result()


def reference(name, p, config, datums, inputs):
    """Loss in float64, token by token, straight from the formulas."""
    total = 0.0
    for t in range(len(p)):
        if not inputs["mask"][t]:
            continue
        if name == "cross_entropy":
            total -= inputs["weights"][t] * p[t]
            continue
        q, advantage = inputs["logprobs"][t], inputs["advantages"][t]
        ratio = math.exp(p[t] - q)
        if name == "gspo":
            members = [i for i in range(len(p)) if datums[i] == datums[t] and inputs["sequence_ratio_mask"][i]]
            ratio = math.exp(sum(p[i] - inputs["logprobs"][i] for i in members) / max(1, len(members)))
        bounded = min(max(ratio, config.get("low", 0.8)), config.get("high", 1.2))
        if name == "importance_sampling":
            total -= ratio * advantage
        elif name in ("ppo", "gspo"):
            total -= min(ratio * advantage, bounded * advantage)
        elif name == "cispo":
            total -= bounded * p[t] * advantage
        elif name == "dro":
            total -= p[t] * advantage - config.get("beta", 0.05) / 2 * (p[t] - q) ** 2
    return total


def reference_gradient(name, p, config, datums, inputs):
    """Central differences of the reference, with what the formula calls sg() held fixed."""
    gradient = np.zeros(len(p))
    for t in range(len(p)):
        if not inputs["mask"][t]:
            continue
        q, advantage = inputs["logprobs"][t], inputs["advantages"][t]
        if name == "cispo":
            ratio = math.exp(p[t] - q)
            gradient[t] = -min(max(ratio, config.get("low", 0.8)), config.get("high", 1.2)) * advantage
        elif name == "gspo":
            members = [i for i in range(len(p)) if datums[i] == datums[t] and inputs["sequence_ratio_mask"][i]]
            ratio = math.exp(sum(p[i] - inputs["logprobs"][i] for i in members) / max(1, len(members)))
            low, high = config.get("low", 0.8), config.get("high", 1.2)
            outside = (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)
            gradient[t] = 0.0 if outside else -ratio * advantage
        else:
            step = 1e-6
            up, down = p.copy(), p.copy()
            up[t] += step
            down[t] -= step
            gradient[t] = (
                reference(name, up, config, datums, inputs) - reference(name, down, config, datums, inputs)
            ) / (2 * step)
    return gradient


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", list(LOSS_FUNCTIONS))
def test_value_and_gradient_equal_the_float64_formula(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = 40
    datums = np.sort(rng.integers(0, 5, size))
    datums -= datums.min()
    p = -rng.exponential(2.0, size)
    inputs = {
        "mask": (rng.random(size) < 0.7).astype(float),
        "weights": rng.normal(size=size) * (rng.random(size) < 0.8),
        "logprobs": p + rng.normal(scale=0.5, size=size),
        "advantages": rng.normal(size=size) * (rng.random(size) < 0.8),
        "sequence_ratio_mask": (rng.random(size) < 0.8).astype(float),
    }
    config, named = {}, {}
    if seed % 2:
        config = {"low": 0.6, "high": 1.9, "beta": 0.3}
        named = {"clip_low_threshold": 0.6, "clip_high_threshold": 1.9, "beta": 0.3}
    named = {key: value for key, value in named.items() if key in LOSS_SPECS[name].config}
    p, inputs = (
        p.astype(np.float32).astype(float),
        {key: value.astype(np.float32).astype(float) for key, value in inputs.items()},
    )
    loss, gradient, _ = evaluate(name, p, named, datums, **inputs)
    assert loss == pytest.approx(reference(name, p, config, datums, inputs), rel=2e-5, abs=2e-5)
    np.testing.assert_allclose(gradient, reference_gradient(name, p, config, datums, inputs), rtol=1e-4, atol=1e-5)


def dial(ratio: float, p: float = -1.5) -> float:
    """The sampling log-probability that makes the importance ratio what is wanted."""
    return p - math.log(ratio)


def test_importance_sampling_is_not_clipped() -> None:
    loss, _, _ = evaluate("importance_sampling", [-1.5, -1.5], logprobs=[dial(3)] * 2, advantages=[1, -2])
    assert loss == pytest.approx(3.0, abs=1e-4)


PPO_TABLE = [(0.5, 1, -0.5), (0.5, -1, 0.8), (1, 1, -1), (1, -1, 1), (1.5, 1, -1.2), (1.5, -1, 1.5)]


@pytest.mark.parametrize(("ratio", "advantage", "expected"), PPO_TABLE)
def test_ppo_table_with_default_bounds(ratio: float, advantage: float, expected: float) -> None:
    loss, gradient, _ = evaluate("ppo", [-1.5], logprobs=[dial(ratio)], advantages=[advantage])
    assert loss == pytest.approx(expected, abs=1e-4)
    outside = (ratio, advantage) in [(1.5, 1), (0.5, -1)]
    assert gradient[0] == (0.0 if outside else pytest.approx(-ratio * advantage, rel=1e-4))


@pytest.mark.parametrize(("ratio", "advantage", "expected"), [(1.5, 1, -1.1), (0.5, -1, 0.9)])
def test_ppo_table_with_own_bounds(ratio: float, advantage: float, expected: float) -> None:
    bounds = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    loss, _, _ = evaluate("ppo", [-1.5], bounds, logprobs=[dial(ratio)], advantages=[advantage])
    assert loss == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("ratio", "low", "weight"), [(6.0, 0.0, 4.0), (0.3, 0.8, 0.8)])
def test_cispo_bounds_the_coefficient_and_keeps_the_gradient(ratio: float, low: float, weight: float) -> None:
    bounds = {"clip_low_threshold": low, "clip_high_threshold": 4.0}
    loss, gradient, _ = evaluate("cispo", [-1.5], bounds, logprobs=[dial(ratio)], advantages=[1])
    assert loss == pytest.approx(-weight * -1.5, abs=1e-4)
    assert gradient[0] == pytest.approx(-weight, rel=1e-5)


WILD = [-1000.0, 1000.0, float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("wild", WILD)
@pytest.mark.parametrize("excluded_by", ["advantage", "mask"])
@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_excluded_token_with_a_wild_ratio_gives_neither_nan_nor_gradient(
    name: str, excluded_by: str, wild: float
) -> None:
    inputs = {"logprobs": [-1.5, wild], "advantages": [1.0, 0.0]}
    if excluded_by == "mask":
        inputs |= {"advantages": [1.0, 3.0], "mask": [1.0, 0.0]}
    if name == "gspo":
        inputs["sequence_ratio_mask"] = [1.0, 0.0]
    loss, gradient, metrics = evaluate(name, [-1.5, -0.2], **inputs)
    alone_loss, alone_gradient, alone_metrics = evaluate(name, [-1.5], logprobs=[-1.5], advantages=[1.0])
    assert loss == alone_loss == pytest.approx(-1.0 if name != "cispo" else 1.5)
    assert list(gradient) == [alone_gradient[0], 0.0]
    assert metrics == alone_metrics


@pytest.mark.parametrize("wild", WILD)
def test_dro_excludes_by_mask_and_pulls_where_the_advantage_is_zero(wild: float) -> None:
    loss, gradient, _ = evaluate(
        "dro", [-1.5, -0.2, -0.7], logprobs=[-1.0, wild, -0.5], advantages=[1, 3, 0], mask=[1, 0, 1]
    )
    assert loss == pytest.approx(1.5 + 0.025 * 0.25 + 0.025 * 0.04, rel=1e-5)
    np.testing.assert_allclose(gradient, [-1 + 0.05 * -0.5, 0, 0.05 * -0.2], rtol=1e-5)


def test_included_ppo_token_beyond_the_bound_has_zero_gradient_even_when_the_ratio_overflows() -> None:
    loss, gradient, _ = evaluate("ppo", [-1.5, -1.5], logprobs=[-1000.0, 1000.0], advantages=[1.0, -1.0])
    assert loss == pytest.approx(-1.2 + 0.8)
    assert list(gradient) == [0.0, 0.0]


def test_cross_entropy_takes_fractional_and_negative_weights_as_they_are() -> None:
    p = [-1.25, -0.5, -2.0, -4.0]
    loss, gradient, _ = evaluate("cross_entropy", p, weights=[0, 0.5, 1, -0.25])
    assert loss == -(0.5 * -0.5 + 1 * -2.0 - 0.25 * -4.0)
    assert list(gradient) == [0, -0.5, -1, 0.25]


def test_gspo_shares_one_ratio_per_datum_and_no_further() -> None:
    p, q = [-1.0, -2.0, -3.0], [-1.2, -2.4, -3.0]
    loss, gradient, metrics = evaluate(
        "gspo", p, {"clip_high_threshold": 5.0}, [0, 0, 1], logprobs=q, advantages=[1.0, 1.0, 1.0]
    )
    shared = math.exp((0.2 + 0.4) / 2)
    assert loss == pytest.approx(-(2 * shared + 1.0), rel=1e-5)
    np.testing.assert_allclose(gradient, [-shared, -shared, -1.0], rtol=1e-5)
    assert metrics["ratio:max"] == pytest.approx(math.exp(0.4), rel=1e-5)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_all_zero_mask_gives_zero_loss_zero_gradient_and_no_means(name: str) -> None:
    loss, gradient, metrics = evaluate(
        name, [-1.0, -2.0], logprobs=[-900.0, -2.0], advantages=[1.0, 2.0], mask=[0.0, 0.0]
    )
    assert loss == 0.0 and not gradient.any()
    assert metrics == {}


def test_metrics_do_not_depend_on_the_split() -> None:
    p, q, advantages = [-1.0, -2.0, -0.3, -0.4], [-1.1, -1.5, -0.9, -0.4], [1.0, -1.0, 0.0, 2.0]
    whole = evaluate("ppo", p, logprobs=q, advantages=advantages)[2]
    parts = MetricAccumulator()
    for part in (slice(0, 3), slice(3, 4)):
        inputs = {"logprobs": q[part], "advantages": advantages[part], "mask": [1.0] * len(p[part])}
        parts.add(
            LOSS_FUNCTIONS["ppo"](
                torch.tensor(p[part]),
                LossInputs(
                    values_M={key: torch.tensor(value) for key, value in inputs.items()},
                    datums_M=torch.zeros(len(p[part]), dtype=torch.int64),
                    num_datums=1,
                ),
                resolve_config(LOSS_SPECS["ppo"], {}),
            ).observations
        )
    assert parts.result() == pytest.approx(whole, rel=1e-6)
    ratios = [math.exp(0.1), math.exp(-0.5), 1.0]
    assert whole["ratio:mean"] == pytest.approx(sum(ratios) / 3, rel=1e-6)
    assert whole["ratio:max"] == pytest.approx(ratios[0], rel=1e-6)
    assert whole["kl_k1:mean"] == pytest.approx(0.4 / 3, rel=1e-5)
    assert whole["kl_k3:mean"] == pytest.approx((sum(ratios) - 3 + 0.4) / 3, rel=1e-5)
    assert whole["clipped:mean"] == pytest.approx(1 / 3)
    assert whole["tokens:sum"] == 3
