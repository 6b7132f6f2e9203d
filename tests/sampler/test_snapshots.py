"""Snapshots are frozen, never mixed up, and freed when dropped and unused."""

import math

import numpy as np
import pytest
import torch

from opentinker_server.models.lora import LoraWeights
from opentinker_server.sampler.base import Failed, Finished, SamplingError
from opentinker_server.sampler.engine import EngineConfig, SamplerEngine


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_snapshot_never_changes_while_others_come_and_go(t0, make_adapter, drive, make_task) -> None:
    engine = SamplerEngine(t0, EngineConfig())
    engine.add_snapshot("first", make_adapter(t0, seed=1))
    sequence = list(range(30, 60))

    def logprobs(key: str) -> np.ndarray:
        return drive(engine, [make_task(sequence, snapshot_key=key, prompt_logprobs=True)])[0].prompt_logprobs

    start = logprobs("first")
    for seed in range(2, 6):
        engine.add_snapshot(f"later-{seed}", make_adapter(t0, seed=seed))
        assert np.nanmax(np.abs(logprobs(f"later-{seed}") - start)) > 0.01
        np.testing.assert_array_equal(logprobs("first"), start)


def test_a_known_key_keeps_its_content(t0, make_adapter, drive, make_task) -> None:
    engine = SamplerEngine(t0, EngineConfig())
    task = make_task([1, 2, 3], snapshot_key="k", prompt_logprobs=True)
    engine.add_snapshot("k", make_adapter(t0, seed=1))
    before = drive(engine, [task])[0].prompt_logprobs
    engine.add_snapshot("k", make_adapter(t0, seed=2))
    np.testing.assert_array_equal(drive(engine, [task])[0].prompt_logprobs, before)


def test_running_requests_finish_on_a_dropped_snapshot(make_engine, make_adapter, t0, drive, make_task) -> None:
    tasks = [
        make_task([index, 7, 9], task_id=index, snapshot_key="a", max_tokens=512, temperature=0.0)
        for index in range(16)
    ]
    expected = drive(make_engine(), tasks)
    engine = make_engine()
    for task in tasks:
        engine.add(task)
    for _ in range(40):
        engine.step()
    engine.drop_snapshot("a")
    assert not engine.has_snapshot("a")
    with pytest.raises(SamplingError, match="'a'") as caught:
        engine.add(make_task([1], task_id=99, snapshot_key="a"))
    assert caught.value.reason == "NOT_FOUND"
    for seed in range(20):
        engine.add_snapshot(f"other-{seed}", make_adapter(t0, seed=50 + seed))
    engine.add_snapshot("a", make_adapter(t0, seed=99))
    engine.add(make_task([3, 7, 9], task_id=50, snapshot_key="a", max_tokens=30, temperature=0.0))
    assert engine.stats()["snapshots_dropped_in_use"] == 1
    outputs = {}
    while engine.has_work():
        outputs.update({e.task_id: e.output for e in engine.step() if isinstance(e, Finished)})
    for index in range(16):
        sequence = outputs[index].sequences[0]
        assert sequence.tokens.tolist() == expected[index].sequences[0].tokens.tolist()
        np.testing.assert_allclose(sequence.logprobs, expected[index].sequences[0].logprobs, atol=1e-4)
    assert outputs[50].sequences[0].tokens.tolist() != outputs[3].sequences[0].tokens.tolist()[:30]
    assert engine.stats()["snapshots_dropped_in_use"] == 0


def test_100_rounds_of_loading_and_dropping_leave_nothing(make_engine, make_adapter, t0, drive, make_task) -> None:
    engine = make_engine()
    start = engine.stats()
    for round_number in range(100):
        engine.add_snapshot("again", make_adapter(t0, seed=round_number, rank=64))
        for index in range(4):
            engine.add(make_task([index] * 20, task_id=index, snapshot_key="again", max_tokens=6))
        engine.step()
        engine.drop_snapshot("again")
        while engine.has_work():
            engine.step()
        if round_number == 20:
            settled = resident_bytes()
    end = engine.stats()
    for gauge in ("snapshots", "snapshot_bytes", "snapshots_dropped_in_use", "cache_tokens_free", "running"):
        assert end[gauge] == start[gauge]
    assert resident_bytes() < 1.05 * settled


def test_unknown_snapshot_fails_alone_and_never_gives_base_output(make_engine, drive, make_task) -> None:
    engine = make_engine()
    tasks = [
        make_task([5, 6, 7], task_id=index, snapshot_key=key, max_tokens=8, temperature=0.0)
        for index, key in enumerate(("a", "", "b"))
    ]
    alone = {task.task_id: drive(make_engine(), [task])[task.task_id] for task in tasks}
    for task in tasks[:2]:
        engine.add(task)
    for missing in ("A", "aa", "gone"):
        with pytest.raises(SamplingError, match=repr(missing)) as caught:
            engine.add(make_task([5, 6, 7], task_id=9, snapshot_key=missing))
        assert caught.value.reason == "NOT_FOUND"
        assert caught.value.field == missing
    outputs = drive(engine, tasks[2:])
    for task in tasks:
        assert outputs[task.task_id].sequences[0].tokens.tolist() == (alone[task.task_id].sequences[0].tokens.tolist())
    assert len({tuple(output.sequences[0].tokens.tolist()) for output in outputs.values()}) == 3


def test_dropping_an_unknown_snapshot_is_not_found(make_engine) -> None:
    for key in ("gone", ""):
        with pytest.raises(SamplingError) as caught:
            make_engine().drop_snapshot(key)
        assert caught.value.reason == "NOT_FOUND"
    assert make_engine().has_snapshot("")


def test_snapshot_that_does_not_fit_is_refused_and_running_work_goes_on(
    make_engine, make_adapter, t0, drive, make_task
) -> None:
    tasks = [make_task([index], task_id=index, snapshot_key="a", max_tokens=20) for index in range(8)]
    expected = drive(make_engine(), tasks)
    engine = make_engine(max_lora_rank=8)
    for task in tasks:
        engine.add(task)
    engine.step()
    good = make_adapter(t0, seed=3)
    name = next(iter(good.factors))
    a, b = good.factors[name]
    refused = [
        (make_adapter(t0, seed=3, rank=9), "LIMIT_EXCEEDED", "9.*8"),
        (LoraWeights(scale=1.0, factors={"model.layers.7.mlp.up_proj": (a, b)}), "WRONG_KIND", "layers.7"),
        (LoraWeights(scale=1.0, factors={name: (a[:, :-1], b)}), "WRONG_KIND", name),
        (LoraWeights(scale=1.0, factors={name: (a, b[:, :-1])}), "WRONG_KIND", name),
    ]
    for weights, reason, pattern in refused:
        with pytest.raises(SamplingError, match=pattern) as caught:
            engine.add_snapshot("new", weights)
        assert caught.value.reason == reason
        assert not engine.has_snapshot("new")
    outputs = drive(engine, [])
    for index in range(8):
        assert outputs[index].sequences[0].tokens.tolist() == expected[index].sequences[0].tokens.tolist()


@pytest.mark.parametrize("scored", [False, True])
def test_weights_that_are_not_finite_fail_their_requests_only(
    make_engine, make_adapter, t0, drive, make_task, scored
) -> None:
    """Slabs of the failed requests are used again by others, whose results must not notice."""
    tasks = [
        make_task([index] * 30, task_id=index, snapshot_key=key, max_tokens=60, temperature=0.0)
        for index, key in enumerate(("a", "", "b", "c"))
    ]
    expected = drive(make_engine(), tasks)
    engine = make_engine(max_batched_tokens=40)
    broken = make_adapter(t0, seed=1)
    engine.add_snapshot("nan", LoraWeights(scale=math.nan, factors=broken.factors))
    for index in range(3):
        prompt = [index] * 60
        engine.add(make_task(prompt, task_id=100 + index, snapshot_key="nan", max_tokens=9, prompt_logprobs=scored))
        engine.add(tasks[index])
    outputs, failures, waiting = {}, {}, [tasks[3]]
    while engine.has_work():
        if len(failures) == 3 and waiting:
            engine.add(waiting.pop())
        for event in engine.step():
            if isinstance(event, Failed):
                failures[event.task_id] = event.error
            elif isinstance(event, Finished):
                outputs[event.task_id] = event.output
    assert {error.reason for error in failures.values()} == {"NON_FINITE"}
    assert set(failures) == {100, 101, 102}
    for task_id, output in outputs.items():
        sequence = output.sequences[0]
        assert sequence.tokens.tolist() == expected[task_id].sequences[0].tokens.tolist()
        assert np.isfinite(sequence.logprobs).all()
    assert set(outputs) == {0, 1, 2, 3}
    engine.drop_snapshot("nan")
    assert engine.stats()["snapshots_dropped_in_use"] == 0


def test_bfloat16_base_returns_float32_logprobs_close_to_float32(t0_dir, cache_dir, t0, drive, make_task) -> None:
    from opentinker_server.models.base import BaseModel
    from opentinker_server.models.registry import resolve_model

    source = resolve_model(str(t0_dir), cache_dir=cache_dir)
    half = SamplerEngine(BaseModel.load(source, dtype=torch.bfloat16, device="cpu"), EngineConfig())
    full = SamplerEngine(t0, EngineConfig())
    task = make_task(list(range(40)), max_tokens=3, prompt_logprobs=True)
    one, other = drive(half, [task])[0], drive(full, [task])[0]
    assert one.sequences[0].logprobs.dtype == np.float32
    # bfloat16 carries 8 bits: logits of about 5 are rounded to 0.03, twice over two layers.
    assert np.nanmax(np.abs(one.prompt_logprobs - other.prompt_logprobs)) < 0.5
    assert np.nanmean(np.abs(one.prompt_logprobs - other.prompt_logprobs)) < 0.1
