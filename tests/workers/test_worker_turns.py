"""Several things at once in one worker: sampling during training, adapters side by side, cancelling."""

import asyncio
from contextlib import aclosing
from itertools import pairwise

import pytest

from opentinker_client.wire.v1 import error_pb2
from opentinker_server.backends.base import WorkerError
from opentinker_server.workers.v1 import worker_pb2


def long_call(driver, adapter_id: str, num_micro_batches: int) -> worker_pb2.WorkerCommand:
    """Each datum of 128 rows fills a micro-batch."""
    return driver.forward_backward(adapter_id, [driver.datum(range(129)) for _ in range(num_micro_batches)])


async def record(driver, command: worker_pb2.WorkerCommand, name: str, events: list[str]) -> worker_pb2.WorkerReply:
    collected = []
    async with aclosing(driver.worker.stream(command)) as replies:
        async for reply in replies:
            events.append(name)
            collected.append(reply)
    return collected[-1]


def turns(events: list[str]) -> int:
    """How often the sequence changes from one name to another."""
    return sum(first != second for first, second in pairwise(events))


def test_deltas_arrive_between_the_micro_batches_of_a_long_call(driver) -> None:
    adapter_id, events = driver.new_adapter(), []

    async def both() -> tuple[worker_pb2.WorkerReply, worker_pb2.WorkerReply]:
        return await asyncio.gather(
            record(driver, long_call(driver, adapter_id, 20), "training", events),
            record(driver, driver.sample([1], stream=True, max_tokens=200, seed=1), "sampling", events),
        )

    trained, sampled = driver.run(both())
    assert len(trained.forward_backward.outputs) == 20 and len(sampled.sample.sequences) == 1
    assert events.count("training") == 20, "one reply a micro-batch, the last of them the result"
    assert turns(events) >= 10


def test_answers_do_not_depend_on_what_runs_between(driver) -> None:
    adapter_id = driver.trained_adapter()
    driver.publish(adapter_id, "company")
    training = driver.forward_backward(adapter_id, [driver.datum(range(129)) for _ in range(6)], forward_only=True)
    alone = driver.call(training)
    sampling = dict(key="company", seed=4, max_tokens=40)
    sampled_alone = driver.call(driver.sample([7], **sampling)).sample
    training.command_id = 0

    async def both() -> list[worker_pb2.WorkerReply]:
        return await asyncio.gather(driver.worker.call(training), driver.worker.call(driver.sample([7], **sampling)))

    trained, sampled = driver.run(both())
    assert trained.forward_backward == alone.forward_backward
    assert sampled.sample == sampled_alone


def test_adapters_take_turns(driver) -> None:
    names, events = [driver.new_adapter(), driver.new_adapter()], []

    async def both() -> None:
        await asyncio.gather(*(record(driver, long_call(driver, name, 12), name, events) for name in names))

    driver.run(both())
    assert [events.count(name) for name in names] == [12, 12]
    assert turns(events) >= 8


def reason(error: WorkerError) -> str:
    return error_pb2.ErrorReason.Name(error.error_info.reason)


def test_cancel_stops_a_sampling_request(driver) -> None:
    async def cancel_after_first_delta() -> None:
        command = driver.sample([1], stream=True, max_tokens=1000)
        async for _ in driver.worker.stream(command):
            await driver.worker.cancel(command.command_id)

    with pytest.raises(WorkerError) as caught:
        driver.run(cancel_after_first_delta())
    assert reason(caught.value) == "ERROR_REASON_CANCELLED"
    assert driver.stats()["sampler_requests"] == 0


def test_leaving_a_stream_early_stops_its_request(driver) -> None:
    async def leave() -> None:
        async with aclosing(driver.worker.stream(driver.sample([1], stream=True, max_tokens=1000))) as replies:
            async for _ in replies:
                break

    driver.run(leave())
    stats = driver.stats()
    assert stats["sampler_requests"] == 0 and stats["sampler_cache_tokens_free"] == stats["sampler_cache_tokens_total"]


def test_cancelled_await_stops_its_request(driver) -> None:
    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(driver.worker.call(driver.sample([1], max_tokens=1000)), 0.1)

    driver.run(give_up())
    assert driver.stats()["sampler_requests"] == 0


def test_cancel_removes_what_waits_and_breaks_off_what_runs(driver) -> None:
    adapter_id = driver.new_adapter()

    async def cancel_both() -> list[BaseException | worker_pb2.WorkerReply]:
        running = long_call(driver, adapter_id, 20)
        waiting = driver.forward_backward(adapter_id, [driver.datum([1, 2])])
        replies = driver.worker.stream(running)
        assert (await anext(replies)).datums_done == 1
        others = [asyncio.create_task(driver.worker.call(waiting)), asyncio.create_task(anext_final(replies))]
        await asyncio.sleep(0)
        await driver.worker.cancel(waiting.command_id)
        await driver.worker.cancel(running.command_id)
        return await asyncio.gather(*others, return_exceptions=True)

    for outcome in driver.run(cancel_both()):
        assert isinstance(outcome, WorkerError) and reason(outcome) == "ERROR_REASON_CANCELLED"
    stepped = driver.call(driver.optim_step(adapter_id))
    assert stepped.step == 1 and stepped.optim_step.metrics["grad_norm"] == 0.0, "nothing was applied"


async def anext_final(replies) -> worker_pb2.WorkerReply:
    return [reply async for reply in replies][-1]


def test_cancel_of_an_unknown_command_is_ignored(driver) -> None:
    driver.run(driver.worker.cancel(10**9))
