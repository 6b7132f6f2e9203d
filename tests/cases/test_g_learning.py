"""Cases that need some training: DM-2 and DM-4 (what is trained is learnt), SL-1 (a frozen reference for DPO)."""

import math

import numpy as np
import pytest
from support.calls import ce, datum, logprobs

import opentinker_client as ot

ADAM = ot.AdamParams(learning_rate=1e-2)


def test_dm2_overfitting_learns_the_first_completion_token(t0_service: ot.ServiceClient) -> None:
    trainer = t0_service.create_lora_training_client("t0", rank=4, seed=1).result()
    data = [datum([11, 12, 13, 21], [12, 13, 21, 22], weights=[0.0, 0.0, 1.0, 1.0])]
    before = logprobs(trainer.forward(data, "cross_entropy").result())[0]
    for _ in range(200):
        trainer.forward_backward(data, "cross_entropy")
        step = trainer.optim_step(ADAM)
    step.result()
    after = logprobs(trainer.forward(data, "cross_entropy").result())[0]
    assert math.exp(before[2]) < 0.5 < 0.99 < math.exp(after[2])


def test_dm4_an_end_token_is_learnt_though_it_is_the_padding_id(t0_service: ot.ServiceClient) -> None:
    trainer = t0_service.create_lora_training_client("t0", rank=4, seed=1).result()
    rows = [[1, 5, 6, 2], [3, 5, 6, 7, 8, 9, 2]]
    data = [ce(row) for row in rows]
    result = trainer.forward(data, "cross_entropy").result()
    found = logprobs(result)
    assert [len(lp) for lp in found] == [3, 6] and all(lp[-1] < 0 for lp in found)
    assert result.metrics["loss:sum"] == pytest.approx(-sum(float(lp.sum()) for lp in found), rel=1e-5)
    for _ in range(60):
        trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(ADAM)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    for row in rows:
        params = ot.SamplingParams(max_tokens=20, temperature=0, stop=[2])
        answer = sampler.sample(ot.ModelInput.from_ints(row[:1]), num_samples=1, sampling_params=params).result()
        assert answer.sequences[0].stop_reason == "stop" and list(answer.sequences[0].tokens) == row[1:]


def test_sl1_dpo_against_a_frozen_reference(t0_service: ot.ServiceClient) -> None:
    torch = pytest.importorskip("torch")
    trainer = t0_service.create_lora_training_client("t0", rank=4, seed=1).result()
    frozen = trainer.save_weights_and_get_sampling_client().result()
    pairs = [ce([11, 12, 13, 14]), ce([11, 12, 15, 16]), ce([31, 32, 33, 34]), ce([31, 32, 35, 36])]

    def reference() -> list[np.ndarray]:
        inputs = [[*d.model_input.to_ints(), d.loss_fn_inputs["target_tokens"].tolist()[-1]] for d in pairs]
        futures = [frozen.compute_logprobs(ot.ModelInput.from_ints(tokens)) for tokens in inputs]
        return [np.array(future.result()[1:], dtype=np.float32) for future in futures]

    first = reference()

    def dpo(data: list[ot.Datum], lps: list) -> tuple:
        ratios = [(lp - torch.from_numpy(ref)).sum() for lp, ref in zip(lps, first, strict=True)]
        margins = torch.stack([ratios[0] - ratios[1], ratios[2] - ratios[3]])
        return -torch.nn.functional.logsigmoid(0.1 * margins).mean(), {}

    losses = []
    for _ in range(15):
        losses.append(trainer.forward_backward_custom(pairs, dpo).result().metrics["loss:sum"])
        trainer.optim_step(ADAM).result()
        assert all(np.array_equal(a, b) for a, b in zip(reference(), first, strict=True))
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert losses[-1] < 0.6
