"""CASES area A: data and masks, through the public client."""

import numpy as np
import pytest
from support.calls import b_factors, ce, datum, gradient_of, logprobs, probe, random_tokens, weights

import opentinker_client as ot


def test_dm1_fractional_and_negative_weights_survive(t0_service: ot.ServiceClient) -> None:
    trainer = t0_service.create_lora_training_client("t0", rank=4, seed=7).result()
    result = trainer.forward([ce([11, 12, 13, 14, 15], [0, 0.5, 1, -0.25])], "cross_entropy").result()
    lp = logprobs(result)[0]
    expected = -(0.5 * lp[1] + lp[2] - 0.25 * lp[3])
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    ones = gradient_of(t0_service, "t0", [ce([11, 12, 13, 14, 15])], "cross_entropy")
    small = gradient_of(t0_service, "t0", [ce([11, 12, 13, 14, 15], [1 / 64] * 4)], "cross_entropy")
    assert np.abs(ones).max() > 0.01
    np.testing.assert_allclose(small * 64, ones, atol=2e-3 * np.abs(ones).max())


def test_dm6_batch_without_trainable_token(t0_service: ot.ServiceClient) -> None:
    trainer = t0_service.create_lora_training_client("t0", rank=4, seed=7).result()
    before = weights(t0_service, trainer)
    result = trainer.forward_backward([ce([1, 2, 3, 4], [0, 0, 0])], "cross_entropy").result()
    assert result.metrics["loss:sum"] == 0.0
    trainer.optim_step(ot.AdamParams(learning_rate=0.1)).result()
    after = weights(t0_service, trainer)
    assert all(np.array_equal(before[name], after[name]) for name in before)


GOOD = {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]}
POLICY = {"target_tokens": [2, 3, 4], "logprobs": [-1.0] * 3, "advantages": [1.0] * 3}
FAULTS = {
    "weights shorter by one": ("cross_entropy", [1, 2, 3], {**GOOD, "weights": [1.0, 1.0]}, "weights", (3, 2)),
    "no target_tokens": ("cross_entropy", [1, 2, 3], {"weights": [1.0] * 3}, "target_tokens", None),
    "no advantages": ("ppo", [1, 2, 3], {"target_tokens": [2, 3, 4], "logprobs": [-1.0] * 3}, "advantages", None),
    "unknown key": ("cross_entropy", [1, 2, 3], {**GOOD, "wieghts": np.ones(3, np.float32)}, "wieghts", None),
    "two axes": ("importance_sampling", [1, 2, 3], {**POLICY, "advantages": [[1.0], [1.0], [1.0]]}, "advantages", None),
    "input id out of range": ("cross_entropy", [1, 256, 3], GOOD, "model_input", (256, 256)),
    "target id out of range": (
        "cross_entropy",
        [1, 2, 3],
        {**GOOD, "target_tokens": [2, 300, 4]},
        "target_tokens",
        None,
    ),
    "empty input": ("cross_entropy", [], {"target_tokens": [], "weights": []}, "model_input", None),
    "not finite": ("cross_entropy", [1, 2, 3], {**GOOD, "weights": [1.0, float("nan"), 1.0]}, "weights", None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_dm7_malformed_datum_is_refused_whole(t0_service: ot.ServiceClient, fault: str) -> None:
    loss_fn, tokens, inputs, key, sizes = FAULTS[fault]
    good = datum(
        [1, 2, 3],
        [2, 3, 4],
        **{k: v for k, v in (POLICY if loss_fn != "cross_entropy" else GOOD).items() if k != "target_tokens"},
    )
    trainer = t0_service.create_lora_training_client("t0", rank=4, seed=7).result()
    with pytest.raises((ot.BadRequestError, ValueError)) as caught:
        bad = ot.Datum(model_input=ot.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
        trainer.forward_backward([good, bad, good], loss_fn).result()
    assert key in str(caught.value)
    if isinstance(caught.value, ot.BadRequestError):
        assert caught.value.datum_index == 1
        if sizes is not None:
            text = str(caught.value)
            assert str(sizes[0]) in text and str(sizes[1]) in text
    # Nothing of it was added: the next gradient is that of a run that never sent it.
    trainer.forward_backward([ce([5, 6, 7])], "cross_entropy").result()
    seen = b_factors(probe(t0_service, trainer))
    alone = gradient_of(t0_service, "t0", [ce([5, 6, 7])], "cross_entropy")
    assert np.array_equal(seen, alone)


def test_dm9_outputs_come_back_in_input_order(t0_service: ot.ServiceClient) -> None:
    trainer = t0_service.create_lora_training_client("t0", rank=4, seed=7).result()
    lengths = [5, 600, 7, 300, 5, 900, 8, 50, 6]
    data = [ce(random_tokens(length + 1, seed=i)) for i, length in enumerate(lengths)]
    solo = [logprobs(trainer.forward([item], "cross_entropy").result())[0] for item in data]
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(data))
        result = trainer.forward_backward([data[i] for i in order], "cross_entropy").result()
        outputs = logprobs(result)
        assert len(outputs) == len(data)
        for place, i in enumerate(order):
            assert outputs[place].shape == (lengths[i],)
            np.testing.assert_allclose(outputs[place], solo[i], atol=1e-4)


def test_dm10_packed_examples_do_not_see_one_another(t0_service: ot.ServiceClient) -> None:
    trainer = t0_service.create_lora_training_client("t0", rank=4, seed=7).result()
    b = ce(random_tokens(40, seed=1))
    alone = logprobs(trainer.forward([b], "cross_entropy").result())[0]
    for seed in (2, 3):
        a = ce(random_tokens(60, seed=seed))
        packed = logprobs(trainer.forward([a, b], "cross_entropy").result())[1]
        np.testing.assert_allclose(packed, alone, atol=1e-5)
