"""Engine results on models whose distributions are known exactly."""

import math
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from opentinker_server.models.testing import build_bigram_model, build_chain_model
from opentinker_server.sampler.base import Delta, Finished, SamplingError
from opentinker_server.sampler.engine import EngineConfig, SamplerEngine

AFTER_5 = {9: 0.5, 4: 0.25, 7: 0.125, 1: 0.125}


@pytest.fixture(scope="module")
def engine(bigram) -> SamplerEngine:
    return SamplerEngine(bigram, EngineConfig())


@pytest.fixture(scope="module")
def chain_engine(chain) -> SamplerEngine:
    return SamplerEngine(chain, EngineConfig())


def first_tokens(output) -> list[int]:
    return [int(sequence.tokens[0]) for sequence in output.sequences]


def assert_follows(tokens: list[int], expected: dict[int, float]) -> None:
    """Exact support, and chi-square below its quantile at p = 1e-4."""
    assert set(tokens) == set(expected)
    counts = {token: tokens.count(token) for token in expected}
    chi_square = sum((counts[t] - len(tokens) * p) ** 2 / (len(tokens) * p) for t, p in expected.items())
    assert chi_square < {1: 1e-9, 2: 15.14, 4: 21.11}[len(expected)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, AFTER_5),
        ({"top_p": 1.0}, AFTER_5),
        ({"top_p": 0.75}, {9: 2 / 3, 4: 1 / 3}),
        ({"top_k": 2}, {9: 2 / 3, 4: 1 / 3}),
        ({"top_k": -1}, AFTER_5),
        ({"top_k": 1000}, AFTER_5),
        ({"top_k": 1, "top_p": 0.1}, {9: 1.0}),
        ({"temperature": 0.0}, {9: 1.0}),
        ({"temperature": 0.0, "top_p": 0.1}, {9: 1.0}),
        ({"temperature": 0.5}, {9: 16 / 22, 4: 4 / 22, 7: 1 / 22, 1: 1 / 22}),
        ({"top_k": 3}, {9: 4 / 7, 4: 2 / 7, 1: 1 / 7}),  # 1 and 7 tie: the lower id stays
    ],
)
def test_2000_draws_follow_the_filtered_distribution(engine, drive, make_task, options, expected) -> None:
    output = drive(engine, [make_task([3, 5], num_samples=2000, seed=1, **options)])[0]
    tokens = first_tokens(output)
    if len(expected) == 3:
        assert set(tokens) == set(expected)
    else:
        assert_follows(tokens, expected)
    for sequence in output.sequences:
        assert sequence.logprobs[0] == pytest.approx(math.log(AFTER_5[int(sequence.tokens[0])]), abs=1e-5)


def test_omitted_temperature_is_one(engine, drive, make_task) -> None:
    tokens = first_tokens(drive(engine, [make_task([5], num_samples=2000, seed=3)])[0])
    assert tokens.count(9) / 2000 == pytest.approx(0.5, abs=0.034)


def test_logprob_is_untempered_unless_processed_is_asked_for(engine, drive, make_task) -> None:
    for mode, expected in (("model", -0.693147), ("processed", math.log(0.25 / 0.34375))):
        task = make_task([5], num_samples=50, temperature=0.5, logprobs_mode=mode, topk_sample=2)
        for sequence in drive(engine, [task])[0].sequences:
            if sequence.tokens[0] == 9:
                assert sequence.logprobs[0] == pytest.approx(expected, abs=1e-5)
            assert sequence.topk.token_ids.tolist() == [[9, 4]]
            assert sequence.topk.logprobs[0, 0] == pytest.approx(expected, abs=1e-5)


def test_prompt_logprobs_are_exact_and_repeatable(engine, drive, make_task) -> None:
    def ask(prompt: list[int], num_samples: int):
        task = make_task(prompt, num_samples=num_samples, prompt_logprobs=True, topk_prompt=2)
        return drive(engine, [task])[0]

    overlapping = [[5, 9, 5, 4], [5, 9], [5, 9, 5, 4], [9, 5, 9, 5, 4], [5, 9, 5, 4, 5], [5, 9, 5, 4]]
    answers = []
    for index, prompt in enumerate(overlapping):
        output = ask(prompt, 1 + index % 2)
        assert len(output.prompt_logprobs) == len(prompt)
        assert math.isnan(output.prompt_logprobs[0])
        assert output.topk_prompt.token_ids[0].tolist() == [0, 0]
        assert output.topk_prompt.logprobs[0].tolist() == [-99999.0, -99999.0]
        if prompt == [5, 9, 5, 4]:
            answers.append(output)
    for output in answers:
        assert output.prompt_logprobs[1] == pytest.approx(-0.693147, abs=1e-5)
        assert output.prompt_logprobs[3] == pytest.approx(-1.386294, abs=1e-5)
        assert output.topk_prompt.token_ids[1].tolist() == [9, 4]
        np.testing.assert_allclose(output.topk_prompt.logprobs[1], [-0.693147, -1.386294], atol=1e-5)
        np.testing.assert_array_equal(output.prompt_logprobs, answers[0].prompt_logprobs)


def test_prompt_of_one_token_has_one_empty_entry(engine, drive, make_task) -> None:
    output = drive(engine, [make_task([5], prompt_logprobs=True, topk_prompt=3)])[0]
    assert output.prompt_logprobs.shape == (1,) and math.isnan(output.prompt_logprobs[0])
    assert output.topk_prompt.token_ids.tolist() == [[0, 0, 0]]


def test_what_was_not_asked_for_is_absent(engine, drive, make_task) -> None:
    output = drive(engine, [make_task([5, 9], topk_prompt=1)])[0]
    assert output.prompt_logprobs is None and output.topk_prompt is not None
    assert output.sequences[0].topk is None
    assert output.prompt_cache_hit_tokens == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"stop_texts": ("world",)}, [1, 2, 3, 4]),
        ({"stop_texts": ("!",)}, [1, 2, 3, 4]),
        ({"stop_texts": ("world", "!")}, [1, 2, 3, 4]),
        ({"stop_texts": ("lo w",)}, [1, 2, 3]),
        ({"stop_texts": ("<s>",), "stop_token_ids": frozenset({6})}, [1, 2, 3, 4, 5, 6]),
        ({"stop_token_ids": frozenset({3})}, [1, 2, 3]),
        ({"stop_token_ids": frozenset({6})}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_stop_rules_return_the_completing_token_whole(chain_engine, drive, make_task, options, expected) -> None:
    sequence = drive(chain_engine, [make_task([0], max_tokens=20, **options)])[0].sequences[0]
    assert sequence.tokens.tolist() == expected
    assert len(sequence.logprobs) == len(expected)
    assert sequence.stop_reason == "stop"


def test_text_of_the_prompt_is_not_searched(chain_engine, drive, make_task) -> None:
    task = make_task([0, 1, 2, 3], max_tokens=3, stop_texts=("wor", "rld"))
    sequence = drive(chain_engine, [task])[0].sequences[0]
    assert (sequence.tokens.tolist(), sequence.stop_reason) == ([4, 5, 6], "length")


def test_without_stop_ids_the_end_token_does_not_stop(chain_engine, drive, make_task) -> None:
    sequence = drive(chain_engine, [make_task([0], max_tokens=8)])[0].sequences[0]
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 5, 6, 6, 6]
    assert sequence.stop_reason == "length"


def test_end_on_the_last_slot_is_a_stop(tmp_path: Path, load_model, drive, make_task) -> None:
    directory = build_chain_model(tmp_path, {0: 1, 1: 2, 2: 3, 3: 3}, ("a", "b", "c", "</s>"), eos_token_id=3)
    engine = SamplerEngine(load_model(directory), EngineConfig())
    stop = frozenset({3})
    for max_tokens, tokens, reason in ((5, [2, 3], "stop"), (2, [2, 3], "stop"), (1, [2], "length")):
        task = make_task([1], max_tokens=max_tokens, stop_token_ids=stop)
        sequence = drive(engine, [task])[0].sequences[0]
        assert (sequence.tokens.tolist(), sequence.stop_reason) == (tokens, reason)


def test_seed_fixes_several_different_samples(tmp_path: Path, load_model, drive, make_task) -> None:
    engine = SamplerEngine(load_model(build_bigram_model(tmp_path, rows={})), EngineConfig())

    def ask(seed: int) -> list[tuple[int, ...]]:
        output = drive(engine, [make_task([0], num_samples=8, max_tokens=32, seed=seed)])[0]
        return [tuple(sequence.tokens.tolist()) for sequence in output.sequences]

    first = ask(7)
    assert len(set(first)) == 8
    assert ask(7) == first
    assert not set(ask(8)) & set(first)
    assert {len(tokens) for tokens in first} == {32}


def test_sampler_equals_scoring_and_a_plain_hugging_face_forward(
    make_engine, drive, make_task, adapters, t0_dir: Path
) -> None:
    """Merged weights W + scale * B A in stock transformers, for the base and three adapters."""
    import torch

    engine = make_engine(max_batched_tokens=50)
    rng = np.random.default_rng(0)
    for key in ("", "a", "b", "c"):
        prompt = rng.integers(0, 256, 40).tolist()
        sampled = drive(engine, [make_task(prompt, snapshot_key=key, max_tokens=64, temperature=0.8)])[0]
        tokens = sampled.sequences[0].tokens.tolist()
        task = make_task(prompt + tokens, snapshot_key=key, prompt_logprobs=True)
        scored = drive(engine, [task])[0].prompt_logprobs
        plain = AutoModelForCausalLM.from_pretrained(t0_dir, dtype=torch.float32)
        with torch.no_grad():
            if key:
                for name, (a, b) in adapters[key].factors.items():
                    plain.get_submodule(name).weight += adapters[key].scale * (b @ a)
            logits = plain(torch.tensor([prompt + tokens])).logits[0]
        targets = torch.tensor((prompt + tokens)[1:])
        expected = torch.log_softmax(logits[:-1], dim=-1).gather(1, targets[:, None]).squeeze(1).numpy()
        np.testing.assert_allclose(scored[1:], expected, atol=1e-4)
        np.testing.assert_allclose(sampled.sequences[0].logprobs, expected[39:], atol=1e-4)
        assert (sampled.sequences[0].logprobs < -1e-6).all()


def test_stream_gives_every_token_once_in_order(chain_engine, make_task) -> None:
    chain_engine.add(make_task([0], num_samples=2, max_tokens=9, stop_token_ids=frozenset({6}), stream=True))
    tokens: dict[int, list[int]] = {0: [], 1: []}
    reasons: dict[int, list[str]] = {0: [], 1: []}
    finished = []
    while chain_engine.has_work():
        for event in chain_engine.step():
            if isinstance(event, Delta):
                assert not finished
                tokens[event.sample_index] += event.tokens.tolist()
                assert len(event.logprobs) == len(event.tokens)
                reasons[event.sample_index].append(event.stop_reason)
            else:
                assert isinstance(event, Finished)
                finished.append(event)
    assert tokens == {0: [1, 2, 3, 4, 5, 6], 1: [1, 2, 3, 4, 5, 6]}
    assert reasons == {index: [None] * 5 + ["stop"] for index in (0, 1)}
    assert len(finished) == 1


@pytest.mark.parametrize(
    ("prompt", "options", "reason", "numbers"),
    [
        ([], {}, "INVALID_ARGUMENT", []),
        ([32], {}, "INVALID_ARGUMENT", ["32"]),
        ([-1], {}, "INVALID_ARGUMENT", ["-1"]),
        ([5] * 1000, {"max_tokens": 25}, "CONTEXT_LENGTH", ["1000", "25", "1024"]),
        ([5] * 1024, {}, "CONTEXT_LENGTH", ["1024", "1"]),
        ([5] * 60, {"max_tokens": 42}, "LIMIT_EXCEEDED", ["60", "42", "100"]),
        ([5], {"num_samples": 0}, "INVALID_ARGUMENT", ["0"]),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_numbers(
    bigram, drive, make_task, prompt, options, reason, numbers
) -> None:
    limit = 100 if reason == "LIMIT_EXCEEDED" else 65536
    engine = SamplerEngine(bigram, EngineConfig(kv_cache_tokens=limit))
    with pytest.raises(SamplingError) as caught:
        engine.add(make_task(prompt, **options))
    assert caught.value.reason == reason
    assert all(number in str(caught.value) for number in numbers)
    assert not engine.has_work()
    assert len(drive(engine, [make_task([5] * 60, max_tokens=41)])[0].sequences[0].tokens) == 41
