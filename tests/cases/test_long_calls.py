"""Long training calls through the public client: progress, cancelling, and log-probabilities only where trained."""

import concurrent.futures
import threading

import numpy as np
import pytest
from support.calls import b_factors, ce, logprobs, probe, random_tokens

import opentinker_client as ot


@pytest.fixture
def trainer(t0_service: ot.ServiceClient) -> ot.TrainingClient:
    return t0_service.create_lora_training_client("t0", rank=4, seed=7).result()


def test_progress_is_told_as_the_work_goes_on(trainer: ot.TrainingClient) -> None:
    """Datums of 900 tokens: two fill a micro-batch."""
    data = [ce(random_tokens(901, seed)) for seed in range(8)]
    seen: list[int] = []
    output = trainer.forward_backward(data, "cross_entropy", on_progress=seen.append).result()
    assert len(output.loss_fn_outputs) == 8
    assert seen == sorted(set(seen)) and seen[-1] == 8 and len(seen) >= 3


def test_a_call_that_is_cancelled_while_it_runs_applies_nothing(
    t0_service: ot.ServiceClient, trainer: ot.TrainingClient
) -> None:
    begun = threading.Event()
    data = [ce(random_tokens(901, seed)) for seed in range(60)]
    call = trainer.forward_backward(data, "cross_entropy", on_progress=lambda done: begun.set())
    assert begun.wait(60)
    assert call.cancel()
    after = trainer.optim_step(ot.AdamParams()).result()
    assert after.metrics["grad_norm"] == 0.0 and after.metrics["step"] == 1.0
    with pytest.raises(concurrent.futures.CancelledError):
        call.result()


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo", "gspo"])
def test_trained_only_changes_what_comes_back_and_nothing_else(
    t0_service: ot.ServiceClient, trainer: ot.TrainingClient, loss: str
) -> None:
    tokens = random_tokens(31, seed=3)
    mask = np.asarray([0.0] * 11 + [1.0, 0.0] + [1.0] * 17, np.float32)
    inputs: dict[str, object] = {"target_tokens": tokens[1:]}
    if loss == "cross_entropy":
        inputs["weights"] = mask * 0.5
    else:
        inputs |= {"logprobs": [-5.0] * 30, "advantages": np.linspace(-1, 1, 30, dtype=np.float32), "mask": mask}
    data = [ot.Datum(model_input=ot.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)]
    whole = trainer.forward_backward(data, loss).result()
    gradient = b_factors(probe(t0_service, trainer))
    other = t0_service.create_lora_training_client("t0", rank=4, seed=7).result()
    part = other.forward_backward(data, loss, trained_only=True).result()
    assert part.metrics == pytest.approx(whole.metrics, rel=1e-5)
    np.testing.assert_allclose(logprobs(part)[0], np.where(mask != 0, logprobs(whole)[0], 0.0), atol=1e-5)
    np.testing.assert_allclose(b_factors(probe(t0_service, other)), gradient, atol=1e-5)


def test_a_refresh_never_takes_the_snapshot_from_a_call_on_its_way(t0_service: ot.ServiceClient) -> None:
    """Also while the worker is still reading it from its files."""
    trainer = t0_service.create_lora_training_client("t0", rank=4, seed=7).result()
    old = trainer.save_weights_for_sampler("old").result().path
    trainer.forward_backward([ce(random_tokens(9, 1))], "cross_entropy")
    trainer.optim_step(ot.AdamParams(learning_rate=1e-2)).result()
    trainer.save_weights_for_sampler("new").result()
    params = ot.SamplingParams(max_tokens=20, seed=1)
    for _ in range(10):
        sampler = t0_service.create_sampling_client(model_path=old).result()
        calls = [sampler.sample(ot.ModelInput.from_ints([1]), 1, params) for _ in range(3)]
        refreshed = sampler.refresh()
        versions = {call.result().sequences[0].policy_version for call in calls}
        assert versions <= {1, 2} and refreshed.result().version == 2
        after = sampler.sample(ot.ModelInput.from_ints([1]), 1, params).result()
        assert after.sequences[0].policy_version == 2
