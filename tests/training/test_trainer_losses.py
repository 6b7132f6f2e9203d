"""Calls on T0 and the bigram model: data, order, packing and exact losses."""

import math

import numpy as np
import pytest
import torch

from opentinker_server.training.datum import TrainDatum
from opentinker_server.training.errors import TrainingError
from opentinker_server.training.optimizer import AdamSettings

LEARN = AdamSettings(learning_rate=1e-2)


def step_along(length: float) -> AdamSettings:
    """A step of -length * gradient."""
    return AdamSettings(learning_rate=length * 1e6, beta1=0.0, beta2=0.0, eps=1e6)


def datum_of(tokens, targets, **inputs) -> TrainDatum:
    return TrainDatum(
        tokens=np.asarray(tokens),
        targets=np.asarray(targets),
        inputs={name: np.asarray(value, dtype=np.float32) for name, value in inputs.items()},
    )


def scaled(gradient: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    return {name: tensor * factor for name, tensor in gradient.items()}


def size(gradient: dict[str, torch.Tensor]) -> float:
    return max(float(tensor.abs().max()) for tensor in gradient.values())


FOUR = ([11, 12, 13, 14], [12, 13, 14, 15])


def test_fractional_and_negative_weights_survive(rig, difference) -> None:
    rig.create()
    output = rig.run([datum_of(*FOUR, weights=[0, 0.5, 1, -0.25])])
    lp = output.logprobs[0].astype(np.float64)
    assert output.metrics["loss:sum"] == pytest.approx(-(0.5 * lp[1] + lp[2] - 0.25 * lp[3]), abs=1e-5)
    whole = rig.gradient_of([datum_of(*FOUR, weights=[1] * 4)])
    part = rig.gradient_of([datum_of(*FOUR, weights=[1 / 64] * 4)])
    assert difference(scaled(part, 64), whole) <= 1e-4 * size(whole)
    assert size(whole) > 1e-3


def test_absent_weights_are_ones_where_the_mask_is_set(rig, difference) -> None:
    masked = rig.gradient_of([datum_of(*FOUR, mask=[0, 1, 1, 0])])
    weighted = rig.gradient_of([datum_of(*FOUR, weights=[0, 1, 1, 0])])
    plain, ones = rig.gradient_of([datum_of(*FOUR)]), rig.gradient_of([datum_of(*FOUR, weights=[1] * 4)])
    assert difference(masked, weighted) == 0 and difference(plain, ones) == 0
    assert difference(masked, plain) > 1e-3


def test_batch_without_trainable_token_changes_nothing(rig, difference) -> None:
    rig.create()
    start = rig.weights()
    output = rig.run([datum_of(*FOUR, weights=[0] * 4), datum_of([3], [4], weights=[0])])
    assert output.metrics["loss:sum"] == 0.0
    assert "tokens:sum" not in output.metrics
    stepped = rig.trainer.optim_step("a", LEARN)
    assert stepped["grad_norm"] == 0.0 and stepped["step"] == 1.0
    assert all(torch.equal(start[name], tensor) for name, tensor in rig.weights().items())


LENGTHS = [5, 600, 7, 300, 5, 900, 8, 50, 6]


@pytest.mark.parametrize("seed", range(3))
def test_outputs_come_back_in_input_order(make_rig, t0, make_datum, seed: int) -> None:
    rig = make_rig(t0, max_tokens_per_micro_batch=640)
    rig.create()
    rng = np.random.default_rng(seed)
    data = [make_datum(rng, length) for length in rng.permutation(LENGTHS)]
    output = rig.run(data)
    assert [len(values) for values in output.logprobs] == [len(datum.tokens) for datum in data]
    for datum, together, loss in zip(data, output.logprobs, output.losses, strict=True):
        np.testing.assert_allclose(together, rig.logprobs(datum), atol=1e-4)
        assert loss == pytest.approx(-together.astype(np.float64).sum(), rel=1e-6)


def test_packed_examples_do_not_see_one_another(make_rig, t0, make_datum) -> None:
    rig = make_rig(t0)
    rig.create()
    rig.run([make_datum(np.random.default_rng(9), 20)])
    rig.trainer.optim_step("a", LEARN)
    rng = np.random.default_rng(0)
    first, other, second = make_datum(rng, 40), make_datum(rng, 40), make_datum(rng, 23)
    alone = rig.logprobs(second)
    for company in ([first, second], [other, second], [second, first], [first, second, other]):
        output = rig.run(company, backward=False)
        index = next(i for i, datum in enumerate(company) if datum is second)
        np.testing.assert_allclose(output.logprobs[index], alone, atol=1e-5)


def test_importance_sampling_is_not_clipped(rig, dial) -> None:
    rig.create()
    datum = datum_of([11, 12], [12, 13])
    dialled = dial(datum, rig.logprobs(datum), [3, 3], [1, -2])
    output = rig.run([dialled], "importance_sampling")
    assert output.metrics["loss:sum"] == pytest.approx(3.0, abs=1e-4)
    assert output.metrics["ratio:mean"] == pytest.approx(3.0, abs=1e-4)


PPO = [(0.5, 1, -0.5), (0.5, -1, 0.8), (1.0, 1, -1), (1.0, -1, 1), (1.5, 1, -1.2), (1.5, -1, 1.5)]


def test_ppo_clips_at_its_defaults_unless_told_otherwise(rig, dial) -> None:
    rig.create()
    datum = datum_of([11], [12])
    lp = rig.logprobs(datum)

    def losses(cases, **config) -> list[float]:
        data = [dial(datum, lp, [ratio], [advantage]) for ratio, advantage in cases]
        return rig.run(data, "ppo", backward=False, **config).losses

    table = [(ratio, advantage) for ratio, advantage, _ in PPO]
    for _ in range(2):
        assert losses(table) == pytest.approx([expected for _, _, expected in PPO], abs=1e-4)
        narrow = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
        assert losses([(1.5, 1), (0.5, -1)], **narrow) == pytest.approx([-1.1, 0.9], abs=1e-4)
    for ratio, advantage, _ in PPO:
        gradient = rig.gradient_of([dial(datum, lp, [ratio], [advantage])], "ppo")
        assert (size(gradient) == 0) == ((ratio, advantage) in [(1.5, 1), (0.5, -1)])


@pytest.mark.parametrize(("ratio", "low", "weight"), [(6.0, 0.0, 4.0), (0.3, 0.8, 0.8)])
def test_cispo_has_the_gradient_of_weighted_cross_entropy(rig, dial, difference, ratio, low, weight) -> None:
    rig.create()
    datum = datum_of([11], [12])
    lp = rig.logprobs(datum)
    bounds = {"clip_low_threshold": low, "clip_high_threshold": 4.0}
    dialled = dial(datum, lp, [ratio], [1])
    assert rig.run([dialled], "cispo", backward=False, **bounds).metrics["loss:sum"] == pytest.approx(
        -weight * lp[0], abs=1e-4
    )
    expected = rig.gradient_of([datum_of([11], [12], weights=[weight])])
    assert difference(rig.gradient_of([dialled], "cispo", **bounds), expected) <= 1e-5 * size(expected)


CONFIGS = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.1, "clip_high_threshold": 1.3},
    "dro": {"beta": 0.4},
    "gspo": {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01},
}


@pytest.mark.parametrize("loss", list(CONFIGS))
def test_forward_reports_the_objective_of_forward_backward_and_leaves_no_gradient(rig, dial, make_datum, loss) -> None:
    rig.create()
    rng = np.random.default_rng(3)
    data = []
    for length in (3, 70, 11):
        datum = make_datum(rng, length)
        lp = rig.logprobs(datum)
        dialled = dial(datum, lp, np.exp(rng.normal(scale=0.3, size=length)), rng.normal(size=length))
        if loss == "cross_entropy":
            dialled = TrainDatum(
                tokens=datum.tokens, targets=datum.targets, inputs={"weights": dialled.inputs["advantages"]}
            )
        data.append(dialled)
    start = rig.weights()
    forward = rig.run(data, loss, backward=False, **CONFIGS[loss])
    assert rig.trainer.optim_step("a", LEARN)["grad_norm"] == 0.0
    assert all(torch.equal(start[name], tensor) for name, tensor in rig.weights().items())
    both = rig.run(data, loss, **CONFIGS[loss])
    assert forward.metrics == pytest.approx(both.metrics, abs=1e-5)
    assert forward.losses == pytest.approx(both.losses, abs=1e-5)
    assert forward.metrics["loss:sum"] == pytest.approx(sum(forward.losses), abs=1e-9)
    for one, other in zip(forward.logprobs, both.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert rig.trainer.optim_step("a", LEARN)["grad_norm"] > 0


def test_training_logprobs_are_untempered(make_rig, load_base, bigram_dir) -> None:
    rig = make_rig(load_base(str(bigram_dir)))
    rig.create()
    lp = rig.logprobs(datum_of([5, 9, 5, 5], [9, 5, 4, 7]))
    np.testing.assert_allclose(lp, [math.log(0.5), math.log(1 / 32), math.log(0.25), math.log(0.125)], atol=1e-4)


def test_custom_loss_surrogate_has_the_gradient_of_the_custom_loss(make_rig, load_base, t0, difference) -> None:
    """C = sum(lp^2): cross_entropy with weights -2 * lp moves as C does, measured by finite differences of C."""
    rig = make_rig(t0)
    rig.create("live", rank=2)
    data = [datum_of([3, 4, 5], [4, 5, 6]), datum_of([9, 8, 7, 6, 5], [8, 7, 6, 5, 4])]

    def custom(adapter_id: str) -> float:
        return sum(float((rig.logprobs(d, adapter_id).astype(np.float64) ** 2).sum()) for d in data)

    def surrogate(sign: float) -> list[TrainDatum]:
        return [datum_of(d.tokens, d.targets, weights=sign * 2 * rig.logprobs(d, "live")) for d in data]

    right, wrong = rig.gradient_of(surrogate(-1)), rig.gradient_of(surrogate(1))
    assert difference(right, scaled(wrong, -1)) <= 1e-4 * size(right)
    # A short way along -gradient lowers C by length * |gradient|^2.
    rig.run(surrogate(-1), adapter_id="live")
    before = custom("live")
    length = 1e-6
    norm = rig.trainer.optim_step("live", step_along(length))["grad_norm"]
    assert (before - custom("live")) / (length * norm**2) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
@pytest.mark.parametrize("wild", [-1000.0, float("nan")])
def test_excluded_token_with_a_wild_ratio_is_as_if_it_were_not_there(rig, difference, loss, wild) -> None:
    rig.create()
    lp = rig.logprobs(datum_of([11, 12], [12, 13]))
    two = datum_of([11, 12], [12, 13], logprobs=[lp[0], wild], advantages=[1, 0], mask=[1, 1])
    one = datum_of([11], [12], logprobs=lp[:1], advantages=[1], mask=[1])
    output = rig.run([two], loss)
    assert output.metrics["loss:sum"] == pytest.approx(-1.0, abs=1e-5)
    assert all(math.isfinite(value) for value in output.metrics.values())
    expected = rig.gradient_of([one], loss)
    assert difference(rig.gradient_of([two], loss), expected) <= 1e-5 * size(expected)


def test_short_example_is_not_shrunk_by_a_long_neighbour(make_rig, t0, make_datum, difference) -> None:
    rng = np.random.default_rng(4)
    short, long = make_datum(rng, 10), make_datum(rng, 100)
    rig = make_rig(t0)
    alone, neighbour, both = rig.gradient_of([short]), rig.gradient_of([long]), rig.gradient_of([short, long])
    total = {name: alone[name] + neighbour[name] for name in alone}
    assert difference(both, total) <= 1e-4 * size(total)


def test_two_dimensional_targets_give_a_log_probability_each(rig, difference) -> None:
    rig.create()
    tokens, targets = np.array([11, 12, 13]), np.array([[12, 99], [13, 98], [14, 14]])
    weights = np.array([[0.7, 0.3], [0, -1.5], [0.25, 0.5]], dtype=np.float32)
    datum = TrainDatum(tokens=tokens, targets=targets, inputs={"weights": weights, "mask": np.float32([1, 1, 1])})
    output = rig.run([datum_of([1], [2], weights=[0]), datum])
    columns = [rig.logprobs(datum_of(tokens, targets[:, k])) for k in range(2)]
    np.testing.assert_allclose(output.logprobs[1], np.stack(columns, axis=1), atol=1e-5)
    assert output.losses[1] == pytest.approx(-(weights * output.logprobs[1]).sum(), abs=1e-5)
    parts = [rig.gradient_of([datum_of(tokens, targets[:, k], weights=weights[:, k])]) for k in range(2)]
    total = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    assert difference(rig.gradient_of([datum]), total) <= 1e-5 * size(total)


def test_unknown_names_and_empty_data_are_refused(rig) -> None:
    rig.create()
    datum = datum_of(*FOUR)
    for call, reason in [
        (lambda: rig.run([datum], "cross_entropi"), "INVALID_LOSS"),
        (lambda: rig.run([datum], clip=1.0), "INVALID_LOSS"),
        (lambda: rig.run([]), "INVALID_ARGUMENT"),
        (lambda: rig.run([datum], adapter_id="b"), "NOT_FOUND"),
    ]:
        with pytest.raises(TrainingError) as error:
            call()
        assert error.value.reason == reason
