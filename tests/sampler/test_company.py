"""A request's answer never depends on its company, on order, on chunk sizes or on memory."""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opentinker_server.sampler.base import Failed, Finished, SampleOutput, SampleTask
from opentinker_server.sampler.engine import SamplerEngine

LENGTHS = [1, 2, 5, 17, 40, 63, 64, 65, 100, 150, 199, 200]
KEYS = ["", "a", "b", "c"]


def assert_same(actual: SampleOutput, expected: SampleOutput) -> None:
    assert len(actual.sequences) == len(expected.sequences)
    for one, other in zip(actual.sequences, expected.sequences, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.stop_reason == other.stop_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    assert (actual.prompt_logprobs is None) == (expected.prompt_logprobs is None)
    if actual.prompt_logprobs is not None:
        np.testing.assert_allclose(actual.prompt_logprobs, expected.prompt_logprobs, atol=1e-4)


def assert_idle(engine: SamplerEngine) -> None:
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == stats["requests"] == 0
    assert stats["cache_tokens_free"] == stats["cache_tokens_total"]


@pytest.fixture(scope="module")
def tasks(make_task) -> list[SampleTask]:
    rng = np.random.default_rng(5)
    return [
        make_task(
            rng.integers(0, 256, length).tolist(),
            task_id=index,
            snapshot_key=KEYS[index % 4],
            max_tokens=32,
            temperature=0.0,
            prompt_logprobs=index % 3 == 0,
        )
        for index, length in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def solo(make_engine, drive, tasks) -> dict[int, SampleOutput]:
    return {task.task_id: drive(make_engine(), [task])[task.task_id] for task in tasks}


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_running": 2},
        {"max_batched_tokens": 1},
        {"max_batched_tokens": 9},
        {"kv_cache_tokens": 300},
        {"kv_cache_tokens": 700, "max_batched_tokens": 64},
    ],
)
def test_all_at_once_equals_alone(make_engine, drive, tasks, solo, limits) -> None:
    engine = make_engine(**limits)
    for shuffle in range(5 if not limits else 1):
        order = random.Random(shuffle).sample(tasks, len(tasks))
        outputs = drive(engine, order)
        for task_id, expected in solo.items():
            assert_same(outputs[task_id], expected)
        assert_idle(engine)


def test_joining_half_way_equals_alone(make_engine, tasks, solo) -> None:
    engine = make_engine(max_batched_tokens=48)
    outputs, pending, step = {}, list(tasks), 0
    while pending or engine.has_work():
        if pending and step % 6 == 0:
            engine.add(pending.pop())
        outputs.update({e.task_id: e.output for e in engine.step() if isinstance(e, Finished)})
        step += 1
    for task_id, expected in solo.items():
        assert_same(outputs[task_id], expected)


def test_prompt_of_another_adapter_is_never_reused(make_engine, drive, make_task) -> None:
    prompt = np.random.default_rng(1).integers(0, 256, 256).tolist()
    warm = make_engine()
    first_tokens = []
    for key in ("a", "b", "", "a", "b"):
        task = make_task(prompt, snapshot_key=key, max_tokens=4, temperature=0.0, prompt_logprobs=True)
        expected = drive(make_engine(), [task])[0]
        actual = drive(warm, [task])[0]
        np.testing.assert_allclose(actual.sequences[0].logprobs, expected.sequences[0].logprobs, atol=1e-5)
        np.testing.assert_allclose(actual.prompt_logprobs, expected.prompt_logprobs, atol=1e-5)
        assert actual.prompt_cache_hit_tokens == 0
        first_tokens.append(float(actual.sequences[0].logprobs[0]))
    assert len(set(first_tokens)) == 3


def test_samples_share_the_computation_of_their_prompt(make_engine, drive, make_task) -> None:
    engine = make_engine(max_running=3)
    output = drive(engine, [make_task(list(range(200)), num_samples=8, max_tokens=20)])[0]
    assert engine.stats()["prompt_tokens_computed"] == 200
    for index, sequence in enumerate(output.sequences):
        assert len(sequence.tokens) == 20
        others = [s.tokens.tolist() for i, s in enumerate(output.sequences) if i != index]
        assert sequence.tokens.tolist() not in others
    assert_idle(engine)


def test_prompt_is_shared_when_the_first_sample_ends_at_once(make_engine, drive, make_task) -> None:
    options = {"num_samples": 6, "max_tokens": 10}
    free = drive(make_engine(), [make_task(list(range(100)), **options)])[0]
    first = int(free.sequences[0].tokens[0])
    engine = make_engine()
    output = drive(engine, [make_task(list(range(100)), stop_token_ids=frozenset({first}), **options)])[0]
    assert output.sequences[0].tokens.tolist() == [first]
    assert any(len(sequence.tokens) > 1 for sequence in output.sequences)
    assert engine.stats()["prompt_tokens_computed"] == 100
    assert_idle(engine)


def test_samples_of_one_request_fit_where_one_fits(make_engine, drive, make_task) -> None:
    task = make_task(list(range(60)), num_samples=5, max_tokens=40, prompt_logprobs=True)
    roomy = drive(make_engine(), [task])[0]
    engine = make_engine(kv_cache_tokens=100)
    assert_same(drive(engine, [task])[0], roomy)
    assert_idle(engine)


def test_older_requests_finish_when_memory_runs_out(make_engine, drive, make_task) -> None:
    tasks = [
        make_task([index] * 50, task_id=index, max_tokens=200, temperature=0.0, snapshot_key=KEYS[index % 4])
        for index in range(4)
    ]
    alone = {task.task_id: drive(make_engine(), [task])[task.task_id] for task in tasks}
    engine = make_engine(kv_cache_tokens=300)
    order = []
    for task in tasks:
        engine.add(task)
    while engine.has_work():
        for event in engine.step():
            assert isinstance(event, Finished)
            assert_same(event.output, alone[event.task_id])
            order.append(event.task_id)
    assert engine.stats()["preemptions"] > 0
    assert order == [0, 1, 2, 3]
    assert_idle(engine)


def test_a_short_request_joins_a_running_batch_at_once(make_engine, make_task) -> None:
    engine = make_engine()
    for index in range(8):
        engine.add(make_task([index], task_id=index, max_tokens=100))
    for _ in range(10):
        engine.step()
    engine.add(make_task([1] * 64, task_id=99, max_tokens=1))
    assert [e.task_id for e in engine.step() if isinstance(e, Finished)] == [99]


def test_cancelled_requests_free_what_they_hold(make_engine, make_task, drive) -> None:
    engine = make_engine(max_running=3, max_batched_tokens=16)
    for index in range(6):
        engine.add(make_task([index] * 40, task_id=index, max_tokens=300, num_samples=2))
    for _ in range(8):
        engine.step()
    generated = engine.stats()["tokens_generated"]
    for index in range(6):
        engine.cancel(index)
    engine.cancel(12345)
    assert_idle(engine)
    assert not engine.has_work() and engine.step() == []
    assert engine.stats()["tokens_generated"] == generated
    assert len(drive(engine, [make_task([3], max_tokens=5)])[0].sequences[0].tokens) == 5


@dataclass(frozen=True)
class Arrival:
    """A request of a random mix, in steps."""

    length: int
    key: str
    num_samples: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    scored: bool
    stops: bool
    at_step: int
    cancelled_after: int | None

    def task(self, task_id: int, make_task) -> SampleTask:
        prompt = np.random.default_rng(self.seed).integers(0, 256, self.length)
        return make_task(
            prompt.tolist(),
            task_id=task_id,
            snapshot_key=self.key,
            num_samples=self.num_samples,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            prompt_logprobs=self.scored,
            stop_token_ids=frozenset(range(0, 256, 16)) if self.stops else frozenset(),
        )


ARRIVALS = st.builds(
    Arrival,
    length=st.integers(1, 90),
    key=st.sampled_from(KEYS),
    num_samples=st.sampled_from([1, 1, 2, 4]),
    max_tokens=st.integers(1, 24),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    seed=st.integers(0, 2**64 - 1),
    scored=st.booleans(),
    stops=st.booleans(),
    at_step=st.integers(0, 30),
    cancelled_after=st.sampled_from([None, None, None, 0, 1, 5, 12]),
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=7),
    chunk=st.integers(1, 64),
    max_running=st.integers(1, 8),
    kv_cache_tokens=st.integers(128, 700),
)
def test_random_mixes_equal_solo_runs(
    make_engine, drive, make_task, arrivals, chunk, max_running, kv_cache_tokens
) -> None:
    engine = make_engine(max_batched_tokens=chunk, max_running=max_running, kv_cache_tokens=kv_cache_tokens)
    outputs: dict[int, SampleOutput] = {}
    step = 0
    last = max(arrival.at_step + (arrival.cancelled_after or 0) for arrival in arrivals)
    while step <= last or engine.has_work():
        for index, arrival in enumerate(arrivals):
            if arrival.at_step == step:
                engine.add(arrival.task(index, make_task))
            if arrival.cancelled_after is not None and arrival.at_step + arrival.cancelled_after == step:
                engine.cancel(index)
        for event in engine.step():
            assert not isinstance(event, Failed)
            if isinstance(event, Finished):
                outputs[event.task_id] = event.output
        step += 1
        assert step < 20_000
    assert_idle(engine)
    for index, arrival in enumerate(arrivals):
        if index in outputs:
            expected = drive(make_engine(), [replace(arrival, at_step=0).task(index, make_task)])[index]
            assert_same(outputs[index], expected)
        else:
            assert arrival.cancelled_after is not None
