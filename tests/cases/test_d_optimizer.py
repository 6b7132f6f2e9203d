"""CASES area D: optimizer and request ordering, through the public client."""

from dataclasses import replace

import numpy as np
import pytest
from support.calls import PROBE, b_factors, ce, probe, random_tokens, weights

import opentinker_client as ot

TOKENS = random_tokens(20, seed=1)


@pytest.fixture
def trainer(t0_service: ot.ServiceClient) -> ot.TrainingClient:
    return t0_service.create_lora_training_client("t0", rank=4, seed=7).result()


def test_op1_decoupled_weight_decay(t0_service: ot.ServiceClient, trainer: ot.TrainingClient) -> None:
    before = weights(t0_service, trainer)
    trainer.forward_backward([ce(TOKENS, [0.0] * 19)], "cross_entropy")
    trainer.optim_step(ot.AdamParams(learning_rate=0.1, weight_decay=0.1)).result()
    after = weights(t0_service, trainer)
    for name in before:
        np.testing.assert_allclose(after[name], before[name] * np.float32(0.99), rtol=1e-6)


def test_op1_clip_norm(t0_service: ot.ServiceClient, trainer: ot.TrainingClient) -> None:
    def clipped(norm: float) -> np.ndarray:
        fresh = t0_service.create_lora_training_client("t0", rank=4, seed=7).result()
        fresh.forward_backward([ce(TOKENS)], "cross_entropy")
        return b_factors(probe(t0_service, fresh, replace(PROBE, grad_clip_norm=norm)))

    trainer.forward_backward([ce(TOKENS)], "cross_entropy")
    norm = trainer.optim_step(replace(PROBE, grad_clip_norm=1e-3)).result().metrics["grad_norm"]
    full = clipped(0.0)
    assert norm == pytest.approx(np.linalg.norm(full), rel=1e-3)  # the unclipped norm is reported
    np.testing.assert_allclose(clipped(norm / 4), full / 4, atol=1e-3 * np.abs(full).max())


def test_op1_each_call_uses_its_own_values(t0_service: ot.ServiceClient, trainer: ot.TrainingClient) -> None:
    """Two steps with changing settings against a float64 Adam fed with the shown gradients."""
    steps = [
        ot.AdamParams(learning_rate=1e-2, beta1=0.5, beta2=0.7, eps=1e-3),
        ot.AdamParams(learning_rate=3e-2, beta1=0.8, beta2=0.6, eps=1e-2),
    ]
    x = [b_factors(weights(t0_service, trainer))]
    gradients = []
    for params in steps:
        shadow = trainer.save_state(f"s{len(x)}").result().path
        copy = t0_service.create_training_client_from_state(shadow).result()
        copy.forward_backward([ce(TOKENS)], "cross_entropy")
        gradients.append(b_factors(probe(t0_service, copy)).astype(np.float64))
        copy.unload().result()
        trainer.forward_backward([ce(TOKENS)], "cross_entropy")
        trainer.optim_step(params).result()
        x.append(b_factors(weights(t0_service, trainer)))
    m = v = np.zeros_like(gradients[0])
    for t, (params, g) in enumerate(zip(steps, gradients, strict=True), start=1):
        m = params.beta1 * m + (1 - params.beta1) * g
        v = params.beta2 * v + (1 - params.beta2) * g**2
        m_hat, v_hat = m / (1 - params.beta1**t), v / (1 - params.beta2**t)
        expected = x[t - 1] - params.learning_rate * m_hat / (np.sqrt(v_hat) + params.eps)
        np.testing.assert_allclose(x[t], expected, atol=2e-3 * params.learning_rate)


def test_op1_misspelt_field_is_refused() -> None:
    with pytest.raises(TypeError, match="learning_rate"):
        ot.AdamParams(learing_rate=1e-3)  # type: ignore[call-arg]


def test_op2_step_counter_belongs_to_the_adapter(t0_service: ot.ServiceClient) -> None:
    a = t0_service.create_lora_training_client("t0", rank=4, seed=1).result()
    for _ in range(10):
        a.forward_backward([ce(TOKENS)], "cross_entropy")
        a.optim_step(ot.AdamParams(learning_rate=1e-3))
    b = t0_service.create_lora_training_client("t0", rank=4, seed=2).result()
    before = b_factors(weights(t0_service, b))
    b.forward_backward([ce(TOKENS)], "cross_entropy")
    metrics = b.optim_step(ot.AdamParams(learning_rate=1e-3)).result().metrics
    moved = np.abs(b_factors(weights(t0_service, b)) - before)
    moved = moved[moved > 0]
    assert len(moved) > 1000
    assert moved.min() > 0.999e-3 and moved.max() < 1.001e-3
    assert metrics["step"] == 1


def test_op3_pipelined_calls_keep_their_order(t0_service: ot.ServiceClient) -> None:
    d1, d2 = [ce(random_tokens(15, seed=3))], [ce(random_tokens(15, seed=4))]
    adam = ot.AdamParams(learning_rate=1e-2)

    def run(seed: int, wait: bool) -> dict[str, np.ndarray]:
        trainer = t0_service.create_lora_training_client("t0", rank=4, seed=seed).result()
        for data in (d1, d2):
            futures = [trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(adam)]
            if wait:
                for future in futures:
                    future.result()
        return weights(t0_service, trainer)

    waited, pipelined = run(1, wait=True), run(1, wait=False)
    assert all(np.array_equal(waited[name], pipelined[name]) for name in waited)
    solo = [run(seed, wait=True) for seed in range(3)]
    trainers = [t0_service.create_lora_training_client("t0", rank=4, seed=s).result() for s in range(3)]
    for data in (d1, d2):
        for trainer in trainers:
            trainer.forward_backward(data, "cross_entropy")
            trainer.optim_step(adam)
    for expected, trainer in zip(solo, trainers, strict=True):
        found = weights(t0_service, trainer)
        assert all(np.abs(found[name] - expected[name]).max() <= 1e-6 for name in found)
