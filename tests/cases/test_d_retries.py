"""CASES OP-5: a request whose answer is lost is repeated by the client and applied once."""

from collections.abc import Iterator

import numpy as np
import pytest
from support.calls import ce, random_tokens, weights
from support.proxy import CuttingProxy

import opentinker_client as ot

DATA = [ce(random_tokens(24, seed=1))]
ADAM = ot.AdamParams(learning_rate=1e-2)


@pytest.fixture
def proxy(t0_address: str) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(t0_address)
    yield proxy
    proxy.stop()


def test_op5_lost_answers_are_one_gradient_and_one_step(t0_service: ot.ServiceClient, proxy: CuttingProxy) -> None:
    undisturbed = t0_service.create_lora_training_client("t0", rank=4, seed=7).result()
    for _ in range(3):
        undisturbed.forward_backward(DATA, "cross_entropy")
        undisturbed.optim_step(ADAM)
    expected = weights(t0_service, undisturbed)

    service = ot.ServiceClient(base_url=proxy.address)
    trainer = service.create_lora_training_client("t0", rank=4, seed=7).result()
    for _ in range(3):
        proxy.cut_next_response()
        trainer.forward_backward(DATA, "cross_entropy").result(timeout=60)
        proxy.cut_next_response()
        step = trainer.optim_step(ADAM).result(timeout=60)
    assert proxy.cut >= 6
    assert step.metrics["step"] == 3
    found = weights(service, trainer)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    service.close().result()


def test_op5_a_sample_whose_answer_is_lost_is_the_same(t0_service: ot.ServiceClient, proxy: CuttingProxy) -> None:
    service = ot.ServiceClient(base_url=proxy.address)
    sampler = service.create_sampling_client(base_model="t0").result()
    prompt = ot.ModelInput.from_ints(random_tokens(6, seed=2))
    params = ot.SamplingParams(max_tokens=40, seed=3)
    whole = sampler.sample(prompt, num_samples=2, sampling_params=params).result()
    proxy.cut_next_response()
    again = sampler.sample(prompt, num_samples=2, sampling_params=params).result(timeout=60)
    assert [s.tokens for s in again.sequences] == [s.tokens for s in whole.sequences]
    assert proxy.cut == 1
    service.close().result()
