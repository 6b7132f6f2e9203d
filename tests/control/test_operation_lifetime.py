"""What an adapter's queue and the operation store keep, for how long, and how they end."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable

import pytest

from opentinker_client.wire.v1 import operation_pb2
from opentinker_server.scheduler.errors import ServiceError
from opentinker_server.scheduler.operations import FAILED, SUCCEEDED, Operation, OperationStore
from opentinker_server.scheduler.queues import MAX_BEHIND, AdapterQueue

KIND = operation_pb2.OPERATION_KIND_OPTIM_STEP


def operation(seq_id: int, act: Callable[[], Awaitable[None]] | None = None) -> Operation:
    async def run(_: Operation) -> operation_pb2.OptimStepResult:
        if act is not None:
            await act()
        return operation_pb2.OptimStepResult()

    return Operation("a", seq_id, KIND, b"p", "request", run)


def submit(queue: AdapterQueue, seq_id: int) -> Operation:
    made = operation(seq_id)
    queue.submit(made)
    return made


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 20))


def test_calls_that_go_on_arriving_do_not_put_off_the_end_of_a_gap() -> None:
    async def body() -> None:
        queue = AdapterQueue("a", gap_timeout_s=0.2)
        started = asyncio.get_running_loop().time()
        first = submit(queue, 2)
        for seq_id in range(3, 40):
            await asyncio.sleep(0.05)
            if first.ended.is_set():
                break
            submit(queue, seq_id)
        assert first.state == FAILED
        assert 0.15 < asyncio.get_running_loop().time() - started < 1.0
        await queue.close()

    run(body)


def test_each_gap_has_its_whole_time() -> None:
    async def body() -> None:
        queue = AdapterQueue("a", gap_timeout_s=0.3)
        third = submit(queue, 3)
        await asyncio.sleep(0.2)
        first = submit(queue, 1)
        await first.ended.wait()
        await asyncio.sleep(0.2)  # 0.4 s after the third arrived, 0.2 s after the second began to be missed
        assert not third.ended.is_set()
        second = submit(queue, 2)
        await third.ended.wait()
        assert (second.state, third.state) == (SUCCEEDED, SUCCEEDED)
        await queue.close()

    run(body)


def test_a_queue_survives_the_cancellation_of_all_that_waits_for_a_gap() -> None:
    async def body() -> None:
        queue = AdapterQueue("a", gap_timeout_s=0.05)
        second = submit(queue, 2)
        await asyncio.sleep(0.01)
        queue.cancel(second)
        await asyncio.sleep(0.15)
        first, third = submit(queue, 1), submit(queue, 3)
        await asyncio.gather(first.ended.wait(), third.ended.wait())
        assert (first.state, third.state) == (SUCCEEDED, SUCCEEDED)
        await queue.close()

    run(body)


def test_a_finished_queue_leaves_no_task() -> None:
    async def body() -> None:
        before = asyncio.all_tasks()
        queue = AdapterQueue("a", gap_timeout_s=60)

        async def unload() -> None:
            queue.finish()

        last, never = operation(1, unload), operation(2)
        queue.submit(last)
        queue.submit(never)
        await last.ended.wait()
        await asyncio.sleep(0)
        assert last.state == SUCCEEDED and not never.ended.is_set()
        assert asyncio.all_tasks() == before

        idle = AdapterQueue("a", gap_timeout_s=60)
        await asyncio.sleep(0)
        idle.finish()
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == before

    run(body)


def test_what_an_operation_worked_on_is_not_kept_with_its_result() -> None:
    class Payload:
        pass

    async def body() -> None:
        queue, store = AdapterQueue("a", gap_timeout_s=60), OperationStore(result_ttl_s=60)
        payload = Payload()
        alive = weakref.ref(payload)

        async def act(held: Payload = payload) -> None:
            assert held is not None

        done = store.add(operation(1, act))
        queue.submit(done)
        del payload, act
        await done.ended.wait()
        await asyncio.sleep(0)
        gc.collect()
        assert alive() is None
        assert store.get(done.op_id).to_message().HasField("optim_step")
        await queue.close()

    run(body)


def test_forgotten_results_leave_their_ids_used() -> None:
    async def body() -> None:
        queue, store = AdapterQueue("a", gap_timeout_s=60), OperationStore(result_ttl_s=0.0)
        first = store.add(submit(queue, 1))
        await first.ended.wait()
        cancelled = store.add(submit(queue, 3))
        queue.cancel(cancelled)
        await asyncio.sleep(0.01)
        queue.forget(store.sweep())
        assert first not in store and store.at("a", 1) is None and store.at("a", 3) is None
        with pytest.raises(ServiceError, match="no longer kept"):
            queue.find(1, b"p")
        with pytest.raises(ServiceError, match="given up"):
            queue.find(3, b"p")
        second, fourth = submit(queue, 2), submit(queue, 4)
        await fourth.ended.wait()
        assert second.state == SUCCEEDED
        await queue.close()

    run(body)


def test_refusals_do_not_pile_up() -> None:
    async def body() -> None:
        queue = AdapterQueue("a", gap_timeout_s=60)
        count = MAX_BEHIND + 500
        for seq_id in range(1, count + 1):
            queue.refuse(seq_id, b"bad", ServiceError("INVALID_DATUM", "bad"))
        await submit_and_wait(queue, count + 1)
        queue.forget([])
        with pytest.raises(ServiceError, match="no longer kept"):
            queue.find(1, b"bad")
        with pytest.raises(ServiceError, match="bad"):
            queue.find(count, b"bad")
        await queue.close()

    async def submit_and_wait(queue: AdapterQueue, seq_id: int) -> None:
        await submit(queue, seq_id).ended.wait()

    run(body)


def test_a_store_that_closes_takes_nothing_more_and_keeps_what_it_has() -> None:
    async def body() -> None:
        store = OperationStore(result_ttl_s=60)
        kept = store.add(operation(1))
        store.close()
        with pytest.raises(ServiceError) as caught:
            store.add(operation(2))
        assert caught.value.reason == "UNAVAILABLE"
        assert store.get(kept.op_id) is kept and store.at("a", 1) is kept

    run(body)


@pytest.mark.parametrize("size", [2**62 * 2**62, -(2**90), 7, None])
def test_errors_carry_sizes_of_any_claim(size: int | None) -> None:
    info = ServiceError("INVALID_DATUM", "bad", expected=size, actual=size, limit=size).info
    if size is None:
        assert not info.HasField("expected")
    else:
        assert (info.expected > 0) == (size > 0)
        assert info.expected == size or abs(size) >= 2**63
