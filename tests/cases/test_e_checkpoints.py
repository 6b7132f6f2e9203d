"""CASES area E: checkpoints, through the public client."""

from pathlib import Path

import numpy as np
import pytest
from support.calls import ce, logprobs, random_tokens

import opentinker_client as ot

DATA = [ce(random_tokens(24, seed=1)), ce(random_tokens(12, seed=2))]
ADAM = ot.AdamParams(learning_rate=1e-2)


def step(trainer: ot.TrainingClient, times: int = 1) -> None:
    for _ in range(times):
        trainer.forward_backward(DATA, "cross_entropy")
        trainer.optim_step(ADAM).result()


def fingerprint(trainer: ot.TrainingClient) -> np.ndarray:
    return np.concatenate(logprobs(trainer.forward(DATA, "cross_entropy").result()))


def test_ck1_resume_with_optimizer_is_a_real_resume(t0_service: ot.ServiceClient) -> None:
    trainer = t0_service.create_lora_training_client("t0", rank=4, seed=1).result()
    step(trainer, 5)
    path = trainer.save_state("five").result().path
    step(trainer)
    going_on = fingerprint(trainer)
    resumed = t0_service.create_training_client_from_state_with_optimizer(path).result()
    step(resumed)
    cold = t0_service.create_training_client_from_state(path).result()
    step(cold)
    np.testing.assert_allclose(fingerprint(resumed), going_on, atol=1e-6)
    assert np.abs(fingerprint(cold) - going_on).max() > 1e-4


def test_ck1_and_ck6_checkpoints_survive_a_restart(start_server, t0_dir: Path, tmp_path: Path) -> None:
    with start_server(t0_dir, state_dir=tmp_path / "state") as server:
        service = ot.ServiceClient(base_url=server.address)
        trainer = service.create_lora_training_client("t0", rank=4, seed=1).result()
        step(trainer, 5)
        path = trainer.save_state("five").result().path
        snapshot = trainer.save_weights_for_sampler("five").result().path
        saved = fingerprint(trainer)
        step(trainer)
        going_on = fingerprint(trainer)
        filled = service.create_lora_training_client("t0", rank=4, seed=2).result()
        filled.load_state(path).result()
        np.testing.assert_allclose(fingerprint(filled), saved, atol=1e-6)
        lost_id = filled.model_id
        service.close().result()
    with start_server(t0_dir, state_dir=tmp_path / "state") as server:
        service = ot.ServiceClient(base_url=server.address)
        registry = service.create_registry_client()
        assert path in [c.tinker_path for c in registry.list_user_checkpoints().result().checkpoints]
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        np.testing.assert_allclose(fingerprint(resumed), saved, atol=1e-6)
        step(resumed)
        np.testing.assert_allclose(fingerprint(resumed), going_on, atol=1e-6)
        sampler = service.create_sampling_client(model_path=snapshot).result()
        tokens = DATA[0].model_input.to_ints()
        again = sampler.compute_logprobs(ot.ModelInput.from_ints(tokens)).result()
        np.testing.assert_allclose(np.array(again[1:]), saved[: len(tokens) - 1], atol=1e-4)
        # Nothing was saved under the filled adapter: it says so, it never trains on from other weights.
        with pytest.raises(ot.APIError) as caught:
            service.attach(lost_id).result().forward(DATA, "cross_entropy").result()
        assert "checkpoint" in str(caught.value) or "unloaded" in str(caught.value)
        service.close().result()


def test_ck3_names_of_different_kinds_and_adapters_stay_apart(t0_service: ot.ServiceClient) -> None:
    registry = t0_service.create_registry_client()
    a = t0_service.create_lora_training_client("t0", rank=4, seed=1).result()
    b = t0_service.create_lora_training_client("t0", rank=4, seed=2).result()
    prints, paths = {}, {}
    for key, trainer in (("a", a), ("b", b)):
        step(trainer)
        prints[key] = fingerprint(trainer)
        paths[key] = (
            trainer.save_state("step1").result().path,
            trainer.save_weights_for_sampler("step1").result().path,
        )
    assert len({path for pair in paths.values() for path in pair}) == 4
    for key, trainer in (("a", a), ("b", b)):
        kinds = {
            c.tinker_path: c.checkpoint_type for c in registry.list_checkpoints(trainer.model_id).result().checkpoints
        }
        assert kinds[paths[key][0]] == "training" and kinds[paths[key][1]] == "sampler"
        copy = t0_service.create_training_client_from_state_with_optimizer(paths[key][0]).result()
        np.testing.assert_allclose(fingerprint(copy), prints[key], atol=1e-6)
        sampler = t0_service.create_sampling_client(model_path=paths[key][1]).result()
        tokens = DATA[0].model_input.to_ints()
        scored = sampler.compute_logprobs(ot.ModelInput.from_ints(tokens)).result()
        np.testing.assert_allclose(np.array(scored[1:]), prints[key][: len(tokens) - 1], atol=1e-4)
        if key == "b":  # its optimizer came with it: one more step is the same for both
            step(copy)
            step(b)
            np.testing.assert_allclose(fingerprint(copy), fingerprint(b), atol=1e-6)
    step(a)
    with pytest.raises(ot.APIError, match="step1"):
        a.save_state("step1").result()
    copy = t0_service.create_training_client_from_state(paths["a"][0]).result()
    np.testing.assert_allclose(fingerprint(copy), prints["a"], atol=1e-6)
    replaced = a.save_state("step1", overwrite=True).result().path
    copy = t0_service.create_training_client_from_state(replaced).result()
    np.testing.assert_allclose(fingerprint(copy), fingerprint(a), atol=1e-6)


def test_load_state_into_a_live_adapter(t0_service: ot.ServiceClient) -> None:
    trainer = t0_service.create_lora_training_client("t0", rank=4, seed=1).result()
    step(trainer, 2)
    path = trainer.save_state("two").result().path
    saved = fingerprint(trainer)
    step(trainer)
    after_three = fingerprint(trainer)
    trainer.load_state_with_optimizer(path).result()
    np.testing.assert_allclose(fingerprint(trainer), saved, atol=1e-6)
    step(trainer)
    np.testing.assert_allclose(fingerprint(trainer), after_three, atol=1e-6)
    trainer.load_state(path).result()
    step(trainer)
    assert np.abs(fingerprint(trainer) - after_three).max() > 1e-4
