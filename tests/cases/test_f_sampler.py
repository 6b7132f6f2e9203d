"""CASES areas F, G, H: sampling through the public client, on models with known answers."""

import math
from collections import Counter

import numpy as np
import pytest
from support.calls import ce, logprobs, random_tokens

import opentinker_client as ot

LN_HALF = math.log(0.5)
ROW = {9: 0.5, 4: 0.25, 7: 0.125, 1: 0.125}


def prompt(*tokens: int) -> ot.ModelInput:
    return ot.ModelInput.from_ints(list(tokens))


def draw(sampler: ot.SamplingClient, count: int, **params: object) -> tuple[Counter, list[float]]:
    """First tokens of `count` one-token samples after token 5."""
    settings = ot.SamplingParams(**{"max_tokens": 1, "seed": 11, **params})
    counts: Counter = Counter()
    values: list[float] = []
    for start in range(0, count, 250):
        chunk = ot.SamplingParams(**{**settings.__dict__, "seed": settings.seed + start})
        response = sampler.sample(prompt(5), num_samples=min(250, count), sampling_params=chunk).result()
        counts.update(sequence.tokens[0] for sequence in response.sequences)
        values += [sequence.logprobs[0] for sequence in response.sequences]
    return counts, values


@pytest.fixture(scope="module")
def bigram(bigram_service: ot.ServiceClient) -> ot.SamplingClient:
    return bigram_service.create_sampling_client(base_model="bigram").result()


def test_sc4_top_p_top_k_and_temperature(bigram: ot.SamplingClient) -> None:
    counts, _ = draw(bigram, 2000, top_p=0.75)
    assert set(counts) == {9, 4} and counts[9] / 2000 == pytest.approx(2 / 3, abs=0.032)
    counts, _ = draw(bigram, 2000, top_k=2)
    assert set(counts) == {9, 4}
    for params in ({"top_p": 1.0}, {"top_k": -1}, {"top_k": 1000}):
        counts, _ = draw(bigram, 2000, **params)
        assert set(counts) == set(ROW)
        chi_square = sum((counts[t] - 2000 * p) ** 2 / (2000 * p) for t, p in ROW.items())
        assert chi_square < 21.1  # p = 1e-4 at three degrees of freedom
    for params in ({"top_k": 1, "top_p": 0.1}, {"temperature": 0.0}, {"temperature": 0.0, "top_p": 0.1}):
        counts, values = draw(bigram, 50, **params)
        assert set(counts) == {9}
        np.testing.assert_allclose(values, LN_HALF, atol=1e-4)


@pytest.mark.parametrize(
    "params", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": 0}, {"top_k": -2}, {"max_tokens": 0}]
)
def test_sc4_invalid_values_are_refused(bigram: ot.SamplingClient, params: dict) -> None:
    with pytest.raises((ot.BadRequestError, ValueError), match=next(iter(params))):
        settings = ot.SamplingParams(**{"max_tokens": 1, **params})
        bigram.sample(prompt(5), num_samples=1, sampling_params=settings).result()


def test_lo6_temperature_defaults_to_one(bigram: ot.SamplingClient) -> None:
    counts, _ = draw(bigram, 2000)
    assert counts[9] / 2000 == pytest.approx(0.5, abs=0.044)


def test_sc5_meaning_of_logprobs(bigram: ot.SamplingClient, t0_service: ot.ServiceClient) -> None:
    _, values = draw(bigram, 50, temperature=0.5, top_k=1)
    np.testing.assert_allclose(values, LN_HALF, atol=1e-4)
    trainer = t0_service.create_lora_training_client("t0", rank=4, seed=1).result()
    for _ in range(30):
        trainer.forward_backward([ce(random_tokens(30, seed=2))], "cross_entropy")
        trainer.optim_step(ot.AdamParams(learning_rate=1e-2))
    sampler = trainer.save_weights_and_get_sampling_client().result()
    start = random_tokens(8, seed=3)
    settings = ot.SamplingParams(max_tokens=64, seed=5)
    sequence = sampler.sample(prompt(*start), num_samples=1, sampling_params=settings).result().sequences[0]
    assert len(sequence.tokens) == len(sequence.logprobs) == 64
    tokens = [*start, *(int(t) for t in sequence.tokens)]
    scored = np.array(sampler.compute_logprobs(prompt(*tokens)).result()[len(start) :])
    live = logprobs(trainer.forward([ce(tokens)], "cross_entropy").result())[0][len(start) - 1 :]
    np.testing.assert_allclose(sequence.logprobs, scored, atol=1e-4)
    np.testing.assert_allclose(sequence.logprobs, live, atol=1e-4)
    assert (np.array(sequence.logprobs) != 0).all()


def test_sc5_processed_mode(bigram: ot.SamplingClient) -> None:
    settings = ot.SamplingParams(max_tokens=1, temperature=0.5, seed=3, logprobs_mode="processed")
    response = bigram.sample(prompt(5), num_samples=64, sampling_params=settings).result()
    nines = [s.logprobs[0] for s in response.sequences if s.tokens[0] == 9]
    assert nines
    np.testing.assert_allclose(nines, math.log(0.25 / 0.34375), atol=1e-4)


def test_sc6_prompt_logprobs(bigram: ot.SamplingClient) -> None:
    settings = ot.SamplingParams(max_tokens=1, seed=1)

    def ask(*tokens: int, num_samples: int = 1, **options: object) -> ot.SampleResponse:
        return bigram.sample(
            prompt(*tokens),
            num_samples=num_samples,
            sampling_params=settings,
            include_prompt_logprobs=True,
            **options,
        ).result()

    for _ in range(3):
        values = ask(5, 9, 5, 4).prompt_logprobs
        assert len(values) == 4 and values[0] is None
        assert values[1] == pytest.approx(LN_HALF, abs=1e-4)
        assert values[3] == pytest.approx(math.log(0.25), abs=1e-4)
    ask(5, 9, 5), ask(5, 9)
    assert ask(5, 9, 5, 4, num_samples=2).prompt_logprobs == values
    top = ask(5, 9, 5, 4, topk_prompt_logprobs=2).topk_prompt_logprobs
    assert top[0] is None
    assert [token for token, _ in top[1]] == [9, 4]
    np.testing.assert_allclose([lp for _, lp in top[1]], [LN_HALF, math.log(0.25)], atol=1e-4)
    assert ask(5).prompt_logprobs == [None]


def test_sc3_answers_do_not_depend_on_company(t0_service: ot.ServiceClient) -> None:
    samplers = [t0_service.create_sampling_client(base_model="t0").result()]
    for seed in range(3):
        trainer = t0_service.create_lora_training_client("t0", rank=4, seed=seed).result()
        trainer.forward_backward([ce(random_tokens(30, seed=seed))], "cross_entropy")
        trainer.optim_step(ot.AdamParams(learning_rate=3e-2)).result()
        samplers.append(trainer.save_weights_and_get_sampling_client().result())
    greedy = ot.SamplingParams(max_tokens=32, temperature=0)
    lengths = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 200]
    prompts = [prompt(*random_tokens(n, seed=n)) for n in lengths]

    def ask(i: int) -> ot.APIFuture:
        return samplers[i % 4].sample(prompts[i], num_samples=1, sampling_params=greedy)

    solo = [ask(i).result().sequences[0] for i in range(12)]
    for shuffle in range(5):
        order = np.random.default_rng(shuffle).permutation(12)
        pending = {int(i): ask(int(i)) for i in order}
        for i, future in pending.items():
            sequence = future.result().sequences[0]
            assert list(sequence.tokens) == list(solo[i].tokens)
            np.testing.assert_allclose(sequence.logprobs, solo[i].logprobs, atol=1e-4)


def test_sl1_sampling_client_is_a_frozen_snapshot(t0_service: ot.ServiceClient) -> None:
    trainer = t0_service.create_lora_training_client("t0", rank=4, seed=1).result()
    tokens = random_tokens(40, seed=6)
    s0 = trainer.save_weights_and_get_sampling_client().result()
    first = s0.compute_logprobs(prompt(*tokens)).result()
    s1 = None
    for step in range(4):
        trainer.forward_backward([ce(tokens)], "cross_entropy")
        trainer.optim_step(ot.AdamParams(learning_rate=1e-2)).result()
        assert s0.compute_logprobs(prompt(*tokens)).result() == first
        if step == 1:
            s1 = trainer.save_weights_and_get_sampling_client().result()
            at_two = logprobs(trainer.forward([ce(tokens)], "cross_entropy").result())[0]
    np.testing.assert_allclose(np.array(s1.compute_logprobs(prompt(*tokens)).result()[1:]), at_two, atol=1e-4)
    one = ot.SamplingParams(max_tokens=1)
    answer = s1.sample(prompt(*tokens), num_samples=1, sampling_params=one).result()
    assert answer.sequences[0].policy_version == 2
    assert answer.sequences[0].snapshot.sha256 and answer.sequences[0].snapshot.adapter_id == trainer.model_id
    trainer.save_weights_for_sampler("newest").result()
    s1.refresh().result()
    answer = s1.sample(prompt(*tokens), num_samples=1, sampling_params=one).result()
    assert answer.sequences[0].policy_version == 3


@pytest.mark.parametrize(("stop", "count"), [(["world"], 4), (["!"], 4), (["world", "!"], 4), ([3], 3), ("world", 4)])
def test_st1_stop_across_tokens(chain_service: ot.ServiceClient, stop: object, count: int) -> None:
    sampler = chain_service.create_sampling_client(base_model="chain").result()
    settings = ot.SamplingParams(max_tokens=20, temperature=0, stop=stop)
    sequence = sampler.sample(prompt(0), num_samples=1, sampling_params=settings).result().sequences[0]
    assert list(sequence.tokens) == [1, 2, 3, 4][:count]
    assert len(sequence.logprobs) == count and sequence.stop_reason == "stop"


def test_st1_empty_stop_text_is_refused(chain_service: ot.ServiceClient) -> None:
    sampler = chain_service.create_sampling_client(base_model="chain").result()
    with pytest.raises((ot.BadRequestError, ValueError), match="stop"):
        settings = ot.SamplingParams(max_tokens=5, stop=[""])
        sampler.sample(prompt(0), num_samples=1, sampling_params=settings).result()


def test_st3_reason_and_length_at_the_edge(chain_service: ot.ServiceClient) -> None:
    sampler = chain_service.create_sampling_client(base_model="chain").result()
    for max_tokens, tokens, reason in ((5, [5, 6], "stop"), (2, [5, 6], "stop"), (1, [5], "length")):
        settings = ot.SamplingParams(max_tokens=max_tokens, temperature=0)
        sequence = sampler.sample(prompt(4), num_samples=1, sampling_params=settings).result().sequences[0]
        assert list(sequence.tokens) == tokens and sequence.stop_reason == reason


def test_st4_seed_with_several_samples(bigram: ot.SamplingClient) -> None:
    def ask(seed: int | None) -> list[tuple[int, ...]]:
        settings = ot.SamplingParams(max_tokens=32, seed=seed)
        response = bigram.sample(prompt(20), num_samples=8, sampling_params=settings).result()
        return [tuple(int(t) for t in s.tokens) for s in response.sequences]

    seven = ask(7)
    assert len(set(seven)) == 8
    assert ask(7) == seven
    assert set(ask(8)).isdisjoint(seven)
    assert set(ask(None)).isdisjoint(ask(None))


def test_st6_context_limit_and_missing_max_tokens(t0_small_context_service: ot.ServiceClient) -> None:
    service = t0_small_context_service  # context 64, never stops
    sampler = service.create_sampling_client(base_model="t0-ctx64").result()

    def ask(length: int, max_tokens: int | None) -> ot.SampledSequence:
        settings = ot.SamplingParams(max_tokens=max_tokens, seed=1)
        tokens = random_tokens(length, seed=1)
        return sampler.sample(prompt(*tokens), num_samples=1, sampling_params=settings).result().sequences[0]

    with pytest.raises(ot.BadRequestError) as caught:
        ask(60, 8)
    assert all(number in str(caught.value) for number in ("60", "8", "64"))
    for length in (64, 65):
        with pytest.raises(ot.BadRequestError, match="64"):
            ask(length, None)
    answer = ask(10, None)
    assert len(answer.tokens) == 54 and answer.stop_reason == "length"
    trainer = service.create_lora_training_client("t0-ctx64", rank=2).result()
    with pytest.raises(ot.BadRequestError, match="65"):
        trainer.forward([ce(random_tokens(66, seed=1))], "cross_entropy").result()
    assert ask(10, 1).stop_reason == "length"


def test_dm3_ratios_of_an_untouched_adapter_are_one(t0_service: ot.ServiceClient) -> None:
    trainer = t0_service.create_lora_training_client("t0", rank=4, seed=3).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    start = random_tokens(6, seed=7)
    settings = ot.SamplingParams(max_tokens=10, seed=2)
    response = sampler.sample(prompt(*start), num_samples=4, sampling_params=settings).result()
    data = []
    for sequence, advantage in zip(response.sequences, (1.0, -2.0, 0.5, 0.25), strict=True):
        action = [int(t) for t in sequence.tokens]
        tokens = [*start, *action]
        pad = [0.0] * (len(start) - 1)
        data.append(
            ot.Datum(
                model_input=ot.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": tokens[1:],
                    "logprobs": [*pad, *(float(p) for p in sequence.logprobs)],
                    "advantages": [*pad, *[advantage] * len(action)],
                    "mask": [*pad, *[1.0] * len(action)],
                },
            )
        )
    result = trainer.forward_backward(data, "importance_sampling").result()
    assert result.metrics["loss:sum"] == pytest.approx(-10 * (1.0 - 2.0 + 0.5 + 0.25), abs=1e-3)
