"""Each loss against an independent float64 formula, its published table, and hostile values."""

import itertools
import math

import numpy as np
import pytest
import torch

from opentinker_server.training.datum import TrainDatum, pack_datums
from opentinker_server.training.loss_specs import LOSS_SPECS, resolve_config
from opentinker_server.training.losses import LOSS_FUNCTIONS, LossInputs
from opentinker_server.training.metrics import MetricAccumulator

POLICY_LOSSES = ["importance_sampling", "ppo", "cispo", "dro", "gspo"]
MASKING = ["importance_sampling", "ppo", "cispo"]


def evaluate_part(name, current, config, datums, inputs):
    """Terms, their gradient by the log-probabilities and what was observed, all from our code."""
    p = torch.tensor(current, dtype=torch.float32, requires_grad=True)
    terms = LOSS_FUNCTIONS[name](
        p,
        LossInputs(
            values_M={key: torch.tensor(value, dtype=torch.float32) for key, value in inputs.items()},
            datums_M=torch.tensor(datums, dtype=torch.int64),
            num_datums=int(max(datums, default=-1)) + 1,
        ),
        resolve_config(LOSS_SPECS[name], config),
    )
    (gradient,) = torch.autograd.grad(terms.terms_M.sum(), p)
    return terms.terms_M.detach().numpy(), gradient.numpy(), terms.observations


def evaluate(name, current, config=None, datums=None, /, **inputs):
    """Sum of the terms, its gradient and the metrics of one call."""
    inputs.setdefault("mask", [1.0] * len(current))
    if name == "gspo":
        inputs.setdefault("sequence_ratio_mask", inputs["mask"])
    datums = [0] * len(current) if datums is None else datums
    terms, gradient, observations = evaluate_part(name, current, config or {}, datums, inputs)
    metrics = MetricAccumulator()
    metrics.add(observations)
    return float(terms.sum()), gradient, metrics.result()


def reference(name, p, config, datums, inputs):
    """Loss, gradient and metrics in float64, token by token, from formulas derived by hand."""
    settings = {"low": 0.8, "high": 1.2, "beta": 0.05, "truncate": 0, "mask_low": 0, "mask_high": 0} | config
    loss, gradient, seen = 0.0, np.zeros(len(p)), []
    for t in range(len(p)):
        if not inputs["mask"][t]:
            continue
        if name == "cross_entropy":
            loss -= inputs["weights"][t] * p[t]
            gradient[t] = -inputs["weights"][t]
            continue
        q, advantage = inputs["logprobs"][t], inputs["advantages"][t]
        if advantage == 0 and name != "dro":
            continue
        ratio = token_ratio = math.exp(p[t] - q)
        if name == "gspo":
            members = [i for i in range(len(p)) if datums[i] == datums[t] and inputs["sequence_ratio_mask"][i]]
            ratio = math.exp(sum(p[i] - inputs["logprobs"][i] for i in members) / max(1, len(members)))
        low, high = (
            inputs[f"clip_{end}"][t] if np.isfinite(inputs.get(f"clip_{end}", p * np.nan)[t]) else settings[end]
            for end in ("low", "high")
        )
        bounded = min(max(ratio, low), high)
        masked = ratio < settings["mask_low"] or ratio > (settings["mask_high"] or math.inf)
        clipped = False
        if name == "importance_sampling":
            clipped = 0 < settings["truncate"] < ratio
            term = slope = -(settings["truncate"] if clipped else ratio) * advantage
        elif name in ("ppo", "gspo"):
            clipped = bounded * advantage < ratio * advantage
            term, slope = -min(ratio * advantage, bounded * advantage), 0.0 if clipped else -ratio * advantage
        elif name == "cispo":
            clipped = bounded != ratio
            term, slope = -bounded * p[t] * advantage, -bounded * advantage
        elif name == "dro":
            term = -(p[t] * advantage - settings["beta"] / 2 * (p[t] - q) ** 2)
            slope = -(advantage - settings["beta"] * (p[t] - q))
        if masked and name in MASKING:
            term, slope, clipped = 0.0, 0.0, False
        loss += term
        gradient[t] = slope
        seen.append((token_ratio, p[t], q, clipped, masked))
    return loss, gradient, reference_metrics(name, seen) if seen else {}


def reference_metrics(name, seen):
    ratio, p, q, clipped, masked = (np.array(column, dtype=float) for column in zip(*seen, strict=True))
    metrics = {
        "ratio:mean": ratio.mean(),
        "ratio:max": ratio.max(),
        "effective_sample_size:share": ratio.sum() ** 2 / (ratio**2).sum() / len(ratio),
        "kl_k1:mean": (q - p).mean(),
        "kl_k3:mean": (ratio - 1 - np.log(ratio)).mean(),
        "entropy:mean": -p.mean(),
        "tokens:sum": len(ratio),
    }
    metrics |= {"clipped:mean": clipped.mean()} if name != "dro" else {}
    return metrics | ({"masked:mean": masked.mean()} if name in MASKING else {})


def random_case(name, rng, size=40):
    """Log-probabilities, datums and inputs, float64 values that float32 holds exactly."""
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
    if name in ("ppo", "cispo") and rng.random() < 0.5:
        inputs["clip_low"] = np.where(rng.random(size) < 0.3, np.nan, rng.uniform(0.3, 1.0, size))
        inputs["clip_high"] = np.where(rng.random(size) < 0.3, np.nan, rng.uniform(1.0, 2.0, size))
    return single(p), datums, {key: single(value) for key, value in inputs.items()}


def single(values):
    return values.astype(np.float32).astype(float)


KEYS = {
    "low": "clip_low_threshold",
    "high": "clip_high_threshold",
    "beta": "beta",
    "truncate": "truncate_ratio",
    "mask_low": "mask_ratio_low",
    "mask_high": "mask_ratio_high",
}
SETTINGS = [
    {},
    {"low": 0.6, "high": 1.9, "beta": 0.3, "truncate": 1.5},
    {"mask_low": 0.7, "mask_high": 1.6},
    {"mask_high": 1.3, "truncate": 1.1, "low": 0.9},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", list(LOSS_FUNCTIONS))
def test_value_gradient_and_metrics_equal_the_float64_formula(name: str, seed: int, settings: dict) -> None:
    rng = np.random.default_rng(seed)
    p, datums, inputs = random_case(name, rng)
    config = {key: value for key, value in settings.items() if KEYS[key] in LOSS_SPECS[name].config}
    loss, gradient, metrics = evaluate(name, p, {KEYS[k]: v for k, v in config.items()}, datums, **inputs)
    expected_loss, expected_gradient, expected_metrics = reference(name, p, config, datums, inputs)
    assert loss == pytest.approx(expected_loss, rel=2e-5, abs=2e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-5)
    if name == "cross_entropy":
        assert set(metrics) == {"tokens:sum"}
    else:
        assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "dro"])
def test_hand_derived_gradients_are_the_slopes_of_the_formula(name: str) -> None:
    """Checks the reference itself, for the formulas in which nothing is held fixed."""
    p, datums, inputs = random_case(name, np.random.default_rng(11))
    settings = {"mask_low": 0.7, "mask_high": 1.6}
    gradient, step = reference(name, p, settings, datums, inputs)[1], 1e-6
    for t in range(len(p)):
        up, down = p.copy(), p.copy()
        up[t] += step
        down[t] -= step
        rise = reference(name, up, settings, datums, inputs)[0] - reference(name, down, settings, datums, inputs)[0]
        assert rise / (2 * step) == pytest.approx(gradient[t], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", [name for name, spec in LOSS_SPECS.items() if spec.per_token])
def test_loss_may_be_evaluated_on_any_part_of_a_datum(name: str) -> None:
    p, datums, inputs = random_case(name, np.random.default_rng(5))
    config = {key: 1.3 for key in ("mask_ratio_high", "truncate_ratio") if key in LOSS_SPECS[name].config}
    whole = evaluate(name, p, config, datums, **inputs)
    bounds = [0, 1, 1, 9, 40]
    terms, gradients, metrics = [], [], MetricAccumulator()
    for start, end in itertools.pairwise(bounds):
        values, gradient, observations = evaluate_part(
            name, p[start:end], config, datums[start:end], {key: value[start:end] for key, value in inputs.items()}
        )
        terms.append(values)
        gradients.append(gradient)
        metrics.add(observations)
    assert np.concatenate(terms).sum(dtype=float) == pytest.approx(whole[0], rel=1e-5)
    np.testing.assert_allclose(np.concatenate(gradients), whole[1], rtol=1e-6)
    assert metrics.result() == pytest.approx(whole[2], rel=1e-12)


def test_truncation_bounds_the_coefficient_and_keeps_the_gradient() -> None:
    inputs = {"logprobs": [dial(3), dial(3), dial(1.5), -1000.0], "advantages": [1, -2, 1, 1]}
    loss, gradient, metrics = evaluate("importance_sampling", [-1.5] * 4, {"truncate_ratio": 2}, **inputs)
    assert loss == pytest.approx(-2 + 4 - 1.5 - 2, rel=1e-6)
    np.testing.assert_allclose(gradient, [-2, 4, -1.5, -2], rtol=1e-6)
    assert metrics["clipped:mean"] == 0.75 and metrics["masked:mean"] == 0


@pytest.mark.parametrize("name", MASKING)
def test_ratio_outside_the_mask_gives_nothing_however_far_and_the_bounds_belong_to_it(name: str) -> None:
    config = {"mask_ratio_low": 0.5, "mask_ratio_high": 2.0}
    p = [-1.5, -1.5, -1.5, -1.5, -1000.0]
    inputs = {"logprobs": [-1.5, -1000.0, dial(0.4), dial(2.1), -1.5], "advantages": [1.0, 1.0, -1.0, -1.0, 1.0]}
    loss, gradient, metrics = evaluate(name, p, config, **inputs)
    assert loss == (1.5 if name == "cispo" else -1.0)
    assert list(gradient) == [-1, 0, 0, 0, 0]
    assert metrics["masked:mean"] == 0.8 and metrics["tokens:sum"] == 5
    assert metrics["clipped:mean"] == 0
    edge = {"logprobs": [-1.5], "advantages": [1.0]}
    assert evaluate(name, [-1.5], {"mask_ratio_low": 1.0, "mask_ratio_high": 1.0}, **edge)[2]["masked:mean"] == 0


@pytest.mark.parametrize("name", MASKING)
def test_masking_does_not_hide_a_log_probability_that_is_nan(name: str) -> None:
    config = {"mask_ratio_low": 0.5, "mask_ratio_high": 2.0}
    assert math.isnan(evaluate(name, [math.nan], config, logprobs=[-1.0], advantages=[1.0])[0])


def test_bounds_of_a_token_replace_those_of_the_configuration() -> None:
    inputs = {"logprobs": [dial(1.5)] * 3, "advantages": [1.0] * 3, "clip_high": [1.4, 9.0, math.nan]}
    loss, gradient, metrics = evaluate("ppo", [-1.5] * 3, **inputs)
    assert loss == pytest.approx(-1.4 - 1.5 - 1.2, rel=1e-6)
    np.testing.assert_allclose(gradient, [0, -1.5, 0], rtol=1e-6)
    assert metrics["clipped:mean"] == pytest.approx(2 / 3)
    loss, gradient, _ = evaluate("cispo", [-1.5] * 3, **inputs)
    assert loss == pytest.approx(1.5 * (1.4 + 1.5 + 1.2), rel=1e-6)
    np.testing.assert_allclose(gradient, [-1.4, -1.5, -1.2], rtol=1e-6)


def test_datums_with_and_without_bounds_meet_in_one_pack() -> None:
    def datum(**bounds: list[float]) -> TrainDatum:
        inputs = {"logprobs": [dial(1.5)] * 2, "advantages": [1.0, 1.0], "mask": [1.0, 1.0]} | bounds
        values = {key: np.array(value, dtype=np.float32) for key, value in inputs.items()}
        return TrainDatum(tokens=np.array([1, 2]), targets=np.array([2, 3]), inputs=values)

    data = [datum(), datum(clip_high=[1.3, 1.6])]
    pack = pack_datums(data, LOSS_SPECS["ppo"], device=torch.device("cpu"))
    inputs = LossInputs(values_M=pack.inputs_M, datums_M=pack.datums_M, num_datums=2)
    terms = LOSS_FUNCTIONS["ppo"](torch.full((4,), -1.5), inputs, resolve_config(LOSS_SPECS["ppo"], {}))
    assert terms.terms_M.tolist() == pytest.approx([-1.2, -1.2, -1.3, -1.5], rel=1e-6)


def test_lone_bound_beyond_the_other_of_the_configuration_is_clip_as_defined() -> None:
    """clip(r) = min(max(r, low), high) = 0.5, whatever r."""
    for advantage, expected in ((1.0, -0.5), (-1.0, 1.0)):
        inputs = {"logprobs": [-1.5], "advantages": [advantage], "clip_high": [0.5]}
        assert evaluate("ppo", [-1.5], **inputs)[0] == expected


def test_k3_of_a_nearly_equal_policy_keeps_its_digits() -> None:
    q = np.float32(-0.01)
    p = np.nextafter(q, np.float32(0))
    difference = float(p) - float(q)
    metrics = evaluate("ppo", [p], logprobs=[q], advantages=[1.0])[2]
    assert metrics["kl_k3:mean"] == pytest.approx(difference**2 / 2, rel=1e-5) and difference > 0


def test_effective_sample_size_of_ratios_whose_squares_overflow_is_finite() -> None:
    parts = MetricAccumulator()
    for logs in ([1000.0, 0.0], [1000.0], [-1000.0]):
        parts.add({"effective_sample_size": torch.tensor(logs)})
    assert parts.result() == {"effective_sample_size:share": pytest.approx(2 / 4)}


@pytest.mark.parametrize("name", list(LOSS_FUNCTIONS))
def test_no_entries_give_no_terms_and_no_metrics(name: str) -> None:
    inputs = {key: np.empty(0) for key in ("mask", "weights", "logprobs", "advantages", "sequence_ratio_mask")}
    terms, gradient, observations = evaluate_part(name, np.empty(0), {}, np.empty(0, int), inputs)
    assert len(terms) == len(gradient) == 0
    metrics = MetricAccumulator()
    metrics.add(observations)
    assert metrics.result() == {}


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
@pytest.mark.parametrize(
    ("name", "masking"), [(name, False) for name in POLICY_LOSSES if name != "dro"] + [(name, True) for name in MASKING]
)
def test_excluded_token_with_a_wild_ratio_gives_neither_nan_nor_gradient(
    name: str, masking: bool, excluded_by: str, wild: float
) -> None:
    inputs = {"logprobs": [-1.5, wild], "advantages": [1.0, 0.0]}
    if excluded_by == "mask":
        inputs |= {"advantages": [1.0, 3.0], "mask": [1.0, 0.0]}
    if name == "gspo":
        inputs["sequence_ratio_mask"] = [1.0, 0.0]
    if name in ("ppo", "cispo"):
        inputs |= {"clip_low": [0.7, wild], "clip_high": [1.3, wild]}
    config = {"mask_ratio_low": 0.5, "mask_ratio_high": 2.0} if masking else {}
    loss, gradient, metrics = evaluate(name, [-1.5, -0.2], config, **inputs)
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


def test_metrics_are_taken_over_the_tokens_that_take_part() -> None:
    p, q, advantages = [-1.0, -2.0, -0.3, -0.4], [-1.1, -1.5, -0.9, -0.4], [1.0, -1.0, 0.0, 2.0]
    metrics = evaluate("ppo", p, logprobs=q, advantages=advantages)[2]
    ratios = [math.exp(0.1), math.exp(-0.5), 1.0]
    assert metrics["ratio:mean"] == pytest.approx(sum(ratios) / 3, rel=1e-6)
    assert metrics["ratio:max"] == pytest.approx(ratios[0], rel=1e-6)
    assert metrics["kl_k1:mean"] == pytest.approx(0.4 / 3, rel=1e-5)
    assert metrics["kl_k3:mean"] == pytest.approx((sum(ratios) - 3 + 0.4) / 3, rel=1e-5)
    assert metrics["clipped:mean"] == pytest.approx(1 / 3)
    assert metrics["entropy:mean"] == pytest.approx(3.4 / 3, rel=1e-6)
    squares = sum(ratio**2 for ratio in ratios)
    assert metrics["effective_sample_size:share"] == pytest.approx(sum(ratios) ** 2 / squares / 3, rel=1e-6)
    assert metrics["tokens:sum"] == 3
