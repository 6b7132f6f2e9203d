"""CASES area C: adapters and training state, through the public client."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.calls import PROBE, b_factors, ce, gradient_of, logprobs, random_tokens, weights, weights_at

import opentinker_client as ot

ADAM = ot.AdamParams(learning_rate=1e-2)


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_at1_optim_step_moves_only_its_own_adapter(t0_service: ot.ServiceClient) -> None:
    d1 = [ce(random_tokens(20, seed=1))]
    d2 = [ce(random_tokens(20, seed=2), [1000.0] * 19)]
    clipped = ot.AdamParams(learning_rate=1e-2, grad_clip_norm=0.1)

    def solo(data: list[ot.Datum], params: ot.AdamParams, seed: int) -> dict[str, np.ndarray]:
        trainer = t0_service.create_lora_training_client("t0", rank=4, seed=seed).result()
        trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(params).result()
        return weights(t0_service, trainer)

    a = t0_service.create_lora_training_client("t0", rank=4, seed=1).result()
    b = t0_service.create_lora_training_client("t0", rank=4, seed=2).result()
    b_start = weights(t0_service, b)
    a.forward_backward(d1, "cross_entropy").result()
    b.forward_backward(d2, "cross_entropy").result()
    a.optim_step(clipped).result()
    assert equal(weights(t0_service, b), b_start)
    a_solo = solo(d1, clipped, 1)
    assert all(np.abs(x - a_solo[n]).max() <= 1e-6 for n, x in weights(t0_service, a).items())
    b.optim_step(ADAM).result()
    b_solo = solo(d2, ADAM, 2)
    assert all(np.abs(x - b_solo[n]).max() <= 1e-6 for n, x in weights(t0_service, b).items())


@pytest.mark.slow
def test_at1_random_interleavings_equal_solo_runs(t0_service: ot.ServiceClient) -> None:
    """Fifty random interleavings of three adapters, each doing the same three steps."""
    data = {seed: [[ce(random_tokens(12, seed=10 * seed + k))] for k in range(3)] for seed in range(3)}

    def step(trainer: ot.TrainingClient, seed: int, k: int) -> None:
        trainer.forward_backward(data[seed][k], "cross_entropy")
        trainer.optim_step(ADAM)

    def create(seed: int) -> ot.TrainingClient:
        return t0_service.create_lora_training_client("t0", rank=2, seed=seed, train_unembed=False).result()

    solo = {}
    for seed in range(3):
        trainer = create(seed)
        for k in range(3):
            step(trainer, seed, k)
        solo[seed] = weights(t0_service, trainer)
        trainer.unload().result()
    for run in range(50):
        trainers = [create(seed) for seed in range(3)]
        order = np.random.default_rng(run).permutation([0, 0, 0, 1, 1, 1, 2, 2, 2])
        done = [0, 0, 0]
        for seed in order:
            step(trainers[seed], seed, done[seed])
            done[seed] += 1
        for seed, trainer in enumerate(trainers):
            found = weights(t0_service, trainer)
            assert all(np.abs(found[n] - solo[seed][n]).max() <= 1e-6 for n in found), (run, seed)
            trainer.unload().result()


def test_at5_options_are_honoured_or_refused(t0_service: ot.ServiceClient) -> None:
    def attention_only(seed: int) -> dict[str, np.ndarray]:
        trainer = t0_service.create_lora_training_client(
            "t0", rank=4, seed=seed, train_mlp=False, train_unembed=False
        ).result()
        return weights(t0_service, trainer)

    first, second, other = attention_only(7), attention_only(7), attention_only(8)
    assert all("self_attn" in name for name in first)
    assert len(first) == 2 * 4 * 2  # two layers, four projections, two factors
    assert all(tensor.shape[0] == 4 for name, tensor in first.items() if "lora_A" in name)
    assert equal(first, second)
    assert not equal(first, other)
    for rank in (0, 10000):
        with pytest.raises((ot.BadRequestError, ot.RateLimitError, ValueError), match="rank") as caught:
            t0_service.create_lora_training_client("t0", rank=rank).result()
        assert str(rank) in str(caught.value)
    with pytest.raises((ot.BadRequestError, ValueError), match="train_"):
        t0_service.create_lora_training_client(
            "t0", rank=4, train_mlp=False, train_attn=False, train_unembed=False
        ).result()


def test_at5_base_never_changes(t0_service: ot.ServiceClient) -> None:
    prompt = ot.ModelInput.from_ints(random_tokens(30, seed=3))
    base = t0_service.create_sampling_client(base_model="t0").result()
    before = base.compute_logprobs(prompt).result()
    trainer = t0_service.create_lora_training_client("t0", rank=4, seed=1).result()
    for _ in range(3):
        trainer.forward_backward([ce(random_tokens(30, seed=3))], "cross_entropy")
        trainer.optim_step(ADAM).result()
    assert base.compute_logprobs(prompt).result() == before


@pytest.mark.parametrize(("alpha", "rank", "rslora", "scale"), [(16, 64, True, 2.0), (4, 8, False, 0.5)])
def test_at6_scale_survives_export_and_other_loaders(
    t0_service: ot.ServiceClient, t0_dir: Path, tmp_path: Path, alpha: float, rank: int, rslora: bool, scale: float
) -> None:
    torch = pytest.importorskip("torch")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trainer = t0_service.create_lora_training_client(
        "t0", rank=rank, seed=1, alpha=float(alpha), use_rslora=rslora
    ).result()
    tokens = random_tokens(25, seed=4)
    for _ in range(3):
        trainer.forward_backward([ce(tokens)], "cross_entropy")
        trainer.optim_step(ADAM).result()
    uri = trainer.save_weights_for_sampler("final").result().path
    t0_service.create_registry_client().download(uri, tmp_path).result()
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (rank, alpha, rslora)
    model = AutoModelForCausalLM.from_pretrained(t0_dir, dtype=torch.float32)
    peft_model = PeftModel.from_pretrained(model, tmp_path)
    assert next(iter(peft_model.modules())) is peft_model
    layer = peft_model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    assert layer.scaling["default"] == pytest.approx(scale)
    with torch.no_grad():
        logits = peft_model(torch.tensor([tokens])).logits[0]
    reference = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
    live = logprobs(trainer.forward([ce(tokens)], "cross_entropy").result())[0]
    np.testing.assert_allclose(reference, live, atol=1e-4)
    sampler = t0_service.create_sampling_client(model_path=uri).result()
    sampled = sampler.compute_logprobs(ot.ModelInput.from_ints(tokens)).result()
    np.testing.assert_allclose(np.array(sampled[1:], dtype=np.float64), live, atol=1e-4)


def test_at8_unknown_adapter_never_falls_back_to_base(t0_service: ot.ServiceClient) -> None:
    trainers = [t0_service.create_lora_training_client("t0", rank=4, seed=s).result() for s in range(3)]
    uris = [trainer.save_weights_for_sampler("x").result().path for trainer in trainers]
    wrong = uris[0][:-1] + "9"
    with pytest.raises(ot.NotFoundError) as caught:
        t0_service.create_sampling_client(model_path=wrong).result()
    assert wrong in str(caught.value)
    prompt = ot.ModelInput.from_ints([1, 2, 3])
    greedy = ot.SamplingParams(max_tokens=8, temperature=0)
    samplers = [t0_service.create_sampling_client(model_path=uri).result() for uri in uris]
    solo = [s.sample(prompt, num_samples=1, sampling_params=greedy).result().sequences[0].tokens for s in samplers]
    t0_service.create_registry_client().delete_checkpoint_from_tinker_path(uris[1]).result()
    with pytest.raises(ot.NotFoundError):
        t0_service.create_sampling_client(model_path=uris[1]).result()
    base = t0_service.create_sampling_client(base_model="t0").result()
    base_solo = base.sample(prompt, num_samples=1, sampling_params=greedy).result().sequences[0].tokens
    pending = [s.sample(prompt, num_samples=1, sampling_params=greedy) for s in (*samplers, base)]
    with pytest.raises(ot.NotFoundError, match="deleted"):
        pending.pop(1).result()
    found = [list(f.result().sequences[0].tokens) for f in pending]
    assert found == [list(solo[0]), list(solo[2]), list(base_solo)]


def test_at3_and_at10_slots_are_limited_and_fresh_when_reused(
    t0_limited_service: ot.ServiceClient, t0_service: ot.ServiceClient
) -> None:
    service = t0_limited_service  # two training adapters at most
    tokens = random_tokens(20, seed=5)
    first = service.create_lora_training_client("t0", rank=4, seed=1).result()
    second = service.create_lora_training_client("t0", rank=4, seed=2).result()
    for _ in range(3):
        first.forward_backward([ce(tokens)], "cross_entropy")
        first.optim_step(ADAM)
    running = second.forward_backward([ce(tokens)], "cross_entropy")
    with pytest.raises(ot.RateLimitError, match="2"):
        service.create_lora_training_client("t0", rank=4, seed=7).result()
    assert running.result().metrics["loss:sum"] > 0
    first.unload().result()
    fresh = service.create_lora_training_client("t0", rank=4, seed=7).result()
    base = service.create_sampling_client(base_model="t0").result()
    live = logprobs(fresh.forward([ce(tokens)], "cross_entropy").result())[0]
    expected = np.array(base.compute_logprobs(ot.ModelInput.from_ints(tokens)).result()[1:])
    np.testing.assert_allclose(live, expected, atol=1e-5)
    start = weights(service, fresh)
    other = t0_service.create_lora_training_client("t0", rank=4, seed=7).result()
    for name, tensor in weights(t0_service, other).items():
        np.testing.assert_array_equal(start[name], tensor)
    for step in (1, 2):
        fresh.forward_backward([ce(tokens)], "cross_entropy")
        assert fresh.optim_step(ADAM).result().metrics["step"] == step
    end = weights(service, fresh)
    assert all(not np.array_equal(start[name], end[name]) for name in start)
    assert fresh.get_info().result().model_id == fresh.model_id


def test_probe_shows_the_gradient(t0_service: ot.ServiceClient) -> None:
    """The apparatus itself: twice the weight, twice the gradient; PROBE has no momentum."""
    data = [ce([11, 12, 13, 14])]
    doubled = [ce([11, 12, 13, 14], [2.0] * 3)]
    single, double = (gradient_of(t0_service, "t0", d, "cross_entropy") for d in (data, doubled))
    np.testing.assert_allclose(double, 2 * single, atol=2e-3 * np.abs(single).max())
    assert (PROBE.beta1, PROBE.beta2) == (0.0, 0.0)
    assert b_factors({"x.lora_A.weight": np.ones(2), "x.lora_B.weight": np.zeros(3)}).shape == (3,)
    assert callable(weights_at)
