"""CASES area B: losses with exact values, through the public client."""

import math

import numpy as np
import pytest
from support.calls import b_factors, ce, datum, dialled, gradient_of, logprobs, probe, target_logprobs, weights

import opentinker_client as ot

TOKENS, TARGETS = [11, 12], [12, 13]


@pytest.fixture
def trainer(t0_service: ot.ServiceClient) -> ot.TrainingClient:
    return t0_service.create_lora_training_client("t0", rank=4, seed=7).result()


def loss(trainer: ot.TrainingClient, data: list[ot.Datum], loss_fn: str, config: dict | None = None) -> float:
    return trainer.forward(data, loss_fn, config).result().metrics["loss:sum"]


def one(trainer: ot.TrainingClient, ratio: float, advantage: float) -> list[ot.Datum]:
    return [dialled(trainer, [11], [12], ratios=[ratio], advantages=[advantage])]


def test_lo1_importance_sampling_is_not_clipped(trainer: ot.TrainingClient) -> None:
    data = [dialled(trainer, TOKENS, TARGETS, ratios=[3.0, 3.0], advantages=[1.0, -2.0])]
    assert loss(trainer, data, "importance_sampling") == pytest.approx(3.0, abs=1e-4)


PPO_DEFAULT = {(0.5, 1): -0.5, (0.5, -1): 0.8, (1, 1): -1, (1, -1): 1, (1.5, 1): -1.2, (1.5, -1): 1.5}


def test_lo2_ppo_bounds_and_their_defaults(trainer: ot.TrainingClient) -> None:
    for (ratio, advantage), expected in PPO_DEFAULT.items():
        assert loss(trainer, one(trainer, ratio, advantage), "ppo") == pytest.approx(expected, abs=1e-4)
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    assert loss(trainer, one(trainer, 1.5, 1), "ppo", config) == pytest.approx(-1.1, abs=1e-4)
    assert loss(trainer, one(trainer, 0.5, -1), "ppo", config) == pytest.approx(0.9, abs=1e-4)
    for (ratio, advantage), expected in PPO_DEFAULT.items():
        assert loss(trainer, one(trainer, ratio, advantage), "ppo") == pytest.approx(expected, abs=1e-4)


def test_lo2_ppo_gradient_is_zero_where_clipped(t0_service: ot.ServiceClient, trainer: ot.TrainingClient) -> None:
    for ratio, advantage in PPO_DEFAULT:
        gradient = gradient_of(t0_service, "t0", one(trainer, ratio, advantage), "ppo")
        clipped = (ratio, advantage) in {(1.5, 1), (0.5, -1)}
        assert (np.abs(gradient).max() == 0) == clipped


def test_lo2_unknown_config_key_is_refused(trainer: ot.TrainingClient) -> None:
    with pytest.raises(ot.BadRequestError, match="clip_hi_threshold"):
        trainer.forward(one(trainer, 1, 1), "ppo", {"clip_hi_threshold": 1.1}).result()
    with pytest.raises(ot.BadRequestError, match="pp0"):
        trainer.forward(one(trainer, 1, 1), "pp0").result()


def test_lo3_cispo_bounds_the_coefficient_and_keeps_the_gradient(
    t0_service: ot.ServiceClient, trainer: ot.TrainingClient
) -> None:
    lp = float(target_logprobs(trainer, [11], [12])[0])
    for ratio, low, high, coefficient in ((6, 0, 4, 4.0), (0.3, 0.8, 4, 0.8)):
        config = {"clip_low_threshold": low, "clip_high_threshold": high}
        data = one(trainer, ratio, 1)
        assert loss(trainer, data, "cispo", config) == pytest.approx(-coefficient * lp, rel=1e-4)
        gradient = gradient_of(t0_service, "t0", data, "cispo", config)
        same = gradient_of(t0_service, "t0", [datum([11], [12], weights=[coefficient])], "cross_entropy")
        np.testing.assert_allclose(gradient, same, atol=1e-3 * np.abs(same).max())


CONFIGS = {
    "cross_entropy": None,
    "importance_sampling": None,
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0},
    "dro": {"beta": 0.1},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
}


@pytest.mark.parametrize("loss_fn", CONFIGS)
def test_lo5_forward_reports_the_objective_and_leaves_no_gradient(
    t0_service: ot.ServiceClient, trainer: ot.TrainingClient, loss_fn: str
) -> None:
    if loss_fn == "cross_entropy":
        data = [ce([11, 12, 13], [0.5, 2.0])]
    else:
        data = [dialled(trainer, TOKENS, TARGETS, ratios=[1.3, 0.6], advantages=[1.0, -0.5])]
    forward = trainer.forward(data, loss_fn, CONFIGS[loss_fn]).result()
    before = weights(t0_service, trainer)
    trainer.optim_step(ot.AdamParams(learning_rate=0.1)).result()
    after = weights(t0_service, trainer)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    backward = trainer.forward_backward(data, loss_fn, CONFIGS[loss_fn]).result()
    assert forward.metrics["loss:sum"] == pytest.approx(backward.metrics["loss:sum"], abs=1e-5)
    np.testing.assert_allclose(logprobs(forward)[0], logprobs(backward)[0], atol=1e-5)
    assert forward.metrics["loss:sum"] != 0


def test_lo6_training_logprobs_ignore_sampling_temperature(bigram_service: ot.ServiceClient) -> None:
    trainer = bigram_service.create_lora_training_client("bigram", rank=2, seed=1).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    warm = ot.SamplingParams(max_tokens=1, temperature=0.7)
    sampler.sample(ot.ModelInput.from_ints([5]), num_samples=1, sampling_params=warm).result()
    assert target_logprobs(trainer, [5], [9])[0] == pytest.approx(math.log(0.5), abs=1e-4)


def test_lo7_custom_loss_sign_and_scale(t0_service: ot.ServiceClient, trainer: ot.TrainingClient) -> None:
    torch = pytest.importorskip("torch")
    data = [ce([11, 12, 13]), ce([21, 22, 23, 24, 25])]

    def squares(data: list[ot.Datum], lps: list) -> tuple:
        total = sum((lp**2).sum() for lp in lps)
        return total, {"custom/value:sum": float(total.detach())}

    result = trainer.forward_backward_custom(data, squares).result()
    lps = logprobs(result)
    value = sum(float((lp.astype(np.float64) ** 2).sum()) for lp in lps)
    assert result.metrics["custom/value:sum"] == pytest.approx(value, rel=1e-5)
    assert result.metrics["loss:sum"] == pytest.approx(value, rel=1e-5)
    seen = b_factors(probe(t0_service, trainer))
    down = [ce([11, 12, 13], -2 * lps[0]), ce([21, 22, 23, 24, 25], -2 * lps[1])]
    up = [ce([11, 12, 13], 2 * lps[0]), ce([21, 22, 23, 24, 25], 2 * lps[1])]
    same = gradient_of(t0_service, "t0", down, "cross_entropy")
    np.testing.assert_allclose(seen, same, atol=1e-3 * np.abs(same).max())
    assert np.abs(seen - gradient_of(t0_service, "t0", up, "cross_entropy")).max() > np.abs(same).max()
    assert torch.is_grad_enabled()


def test_lo7_dpo_value_and_slopes(trainer: ot.TrainingClient) -> None:
    torch = pytest.importorskip("torch")
    pair = [ce([11, 12, 13]), ce([11, 14, 15])]
    reference = [torch.tensor(lp) for lp in logprobs(trainer.forward(pair, "cross_entropy").result())]
    slopes = {}

    def dpo(data: list[ot.Datum], lps: list) -> tuple:
        for lp in lps:
            lp.retain_grad()
        margin = (lps[0] - reference[0]).sum() - (lps[1] - reference[1]).sum()
        value = -torch.nn.functional.logsigmoid(0.1 * margin)
        grads = torch.autograd.grad(value, lps, retain_graph=True)
        slopes["chosen"], slopes["rejected"] = (grad.numpy() for grad in grads)
        return value, {}

    result = trainer.forward_backward_custom(pair, dpo).result()
    assert result.metrics["loss:sum"] == pytest.approx(math.log(2), abs=1e-5)
    np.testing.assert_allclose(slopes["chosen"], -0.05, atol=1e-6)
    np.testing.assert_allclose(slopes["rejected"], 0.05, atol=1e-6)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo"])
def test_lo8_excluded_token_with_a_wild_ratio(
    t0_service: ot.ServiceClient, trainer: ot.TrainingClient, loss_fn: str
) -> None:
    lp = target_logprobs(trainer, TOKENS, TARGETS)
    wild = [datum(TOKENS, TARGETS, logprobs=[float(lp[0]), -1000.0], advantages=[1.0, 0.0])]
    alone = [datum(TOKENS[:1], TARGETS[:1], logprobs=[float(lp[0])], advantages=[1.0])]
    assert loss(trainer, wild, loss_fn) == pytest.approx(-1.0, abs=1e-4)
    gradient = gradient_of(t0_service, "t0", wild, loss_fn)
    assert np.isfinite(gradient).all()
    expected = gradient_of(t0_service, "t0", alone, loss_fn)
    np.testing.assert_allclose(gradient, expected, atol=1e-3 * np.abs(expected).max())
    nan = [datum(TOKENS, TARGETS, logprobs=[float(lp[0]), float("nan")], advantages=[1.0, 0.0])]
    with pytest.raises((ot.BadRequestError, ValueError), match="logprobs"):
        trainer.forward(nan, loss_fn).result()


def test_lo10_short_example_is_not_shrunk_by_a_long_neighbour(t0_service: ot.ServiceClient) -> None:
    short, long = ce(list(range(10, 21))), ce(list(range(100, 201)))
    alone = gradient_of(t0_service, "t0", [short], "cross_entropy")
    a = t0_service.create_lora_training_client("t0", rank=4, seed=7).result()
    b = t0_service.create_lora_training_client("t0", rank=4, seed=8).result()
    pending = [a.forward_backward([short], "cross_entropy"), b.forward_backward([long], "cross_entropy")]
    for future in pending:
        future.result()
    mixed = b_factors(probe(t0_service, a))
    assert np.linalg.norm(mixed) / np.linalg.norm(alone) == pytest.approx(1.0, rel=1e-4)


def test_lo12_empty_call_is_a_plain_error(trainer: ot.TrainingClient) -> None:
    with pytest.raises((ot.BadRequestError, ValueError), match="empty"):
        trainer.forward_backward([], "cross_entropy").result(timeout=20)
    trainer.forward([ce([1, 2, 3])], "cross_entropy").result(timeout=60)
