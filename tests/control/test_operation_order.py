"""The queue of one adapter: order, identity, gaps, refusals; against a simple model under random schedules."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker_client.wire.v1 import operation_pb2
from opentinker_server.scheduler.errors import ServiceError
from opentinker_server.scheduler.operations import CANCELLED, FAILED, SUCCEEDED, Operation, OperationStore
from opentinker_server.scheduler.queues import AdapterQueue

KIND = operation_pb2.OPERATION_KIND_OPTIM_STEP


class Log:
    """Operations that record when they ran."""

    def __init__(self, gap_timeout_s: float = 60.0):
        self.ran: list[int] = []
        self.queue = AdapterQueue("a", gap_timeout_s=gap_timeout_s)

    def operation(self, seq_id: int, payload: bytes = b"p", *, fail: bool = False) -> Operation:
        async def run(operation: Operation) -> operation_pb2.OptimStepResult:
            await asyncio.sleep(0)
            if fail:
                raise ServiceError("INVALID_ARGUMENT", "no")
            self.ran.append(operation.seq_id)
            return operation_pb2.OptimStepResult()

        return Operation("a", seq_id, KIND, payload, "request", run)

    def submit(self, seq_id: int, payload: bytes = b"p", *, fail: bool = False) -> Operation:
        known = self.queue.find(seq_id, payload)
        if known is not None:
            return known
        operation = self.operation(seq_id, payload, fail=fail)
        self.queue.submit(operation)
        return operation


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 20))


def test_operations_run_in_the_order_of_their_ids_whatever_the_arrival() -> None:
    async def body() -> None:
        log = Log()
        operations = [log.submit(seq_id) for seq_id in (3, 1, 4, 2)]
        await asyncio.gather(*(operation.ended.wait() for operation in operations))
        assert log.ran == [1, 2, 3, 4]
        assert log.queue.first_free() == 5
        await log.queue.close()

    run(body)


def test_repetition_is_the_same_operation_and_another_payload_a_conflict() -> None:
    async def body() -> None:
        log = Log()
        first = log.submit(1)
        assert log.submit(1) is first
        await first.ended.wait()
        assert log.submit(1) is first and log.ran == [1]
        with pytest.raises(ServiceError, match="another payload"):
            log.submit(1, b"other")
        await log.queue.close()

    run(body)


def test_refused_and_abandoned_ids_do_not_block() -> None:
    async def body() -> None:
        log = Log()
        log.queue.refuse(1, b"bad", ServiceError("INVALID_DATUM", "datum 0 is bad"))
        log.queue.abandon([2])
        third = log.submit(3)
        await third.ended.wait()
        assert log.ran == [3]
        with pytest.raises(ServiceError, match="datum 0 is bad"):
            log.submit(1, b"bad")
        with pytest.raises(ServiceError, match="another payload"):
            log.submit(1, b"good")
        with pytest.raises(ServiceError, match="given up"):
            log.submit(2)
        await log.queue.close()

    run(body)


def test_a_failed_operation_does_not_block_the_next() -> None:
    async def body() -> None:
        log = Log()
        bad, good = log.submit(1, fail=True), log.submit(2)
        await good.ended.wait()
        assert bad.state == FAILED and bad.error is not None and bad.error.request_id == "request"
        assert good.state == SUCCEEDED and log.ran == [2]
        await log.queue.close()

    run(body)


def test_a_missing_id_fails_what_waits_for_it_and_then_counts_as_used() -> None:
    async def body() -> None:
        log = Log(gap_timeout_s=0.05)
        second, fourth = log.submit(2), log.submit(4)
        await asyncio.gather(second.ended.wait(), fourth.ended.wait())
        for operation in (second, fourth):
            assert operation.state == FAILED and operation.error is not None
            assert "seq_id 1" in operation.error.message and operation.error.expected == 1
        with pytest.raises(ServiceError, match="given up"):
            log.submit(1)
        fifth = log.submit(5)
        await fifth.ended.wait()
        assert log.ran == [5]
        await log.queue.close()

    run(body)


def test_a_late_id_within_the_time_is_run_first() -> None:
    async def body() -> None:
        log = Log(gap_timeout_s=5.0)
        second = log.submit(2)
        await asyncio.sleep(0.02)
        assert log.queue.missing() == 1
        log.submit(1)
        await second.ended.wait()
        assert log.ran == [1, 2]
        await log.queue.close()

    run(body)


def test_cancel_ends_a_queued_operation_only() -> None:
    async def body() -> None:
        log = Log()
        third, second = log.submit(3), log.submit(2)
        log.queue.cancel(second)
        assert second.state == CANCELLED
        first = log.submit(1)
        await third.ended.wait()
        log.queue.cancel(first)
        assert first.state == SUCCEEDED and log.ran == [1, 3]
        await log.queue.close()

    run(body)


def test_ids_far_away_are_refused() -> None:
    async def body() -> None:
        log = Log()
        for seq_id in (0, -1, 10**9):
            with pytest.raises(ServiceError, match="seq_id"):
                log.submit(seq_id)
        await log.queue.close()

    run(body)


def test_waiters_are_woken_and_results_expire() -> None:
    async def body() -> None:
        log = Log()
        store = OperationStore(result_ttl_s=0.0)
        second = store.add(log.submit(2))
        assert (await store.wait(second.op_id, timeout_s=0.01)) is second and not second.ended.is_set()
        waiter = asyncio.create_task(store.wait(second.op_id, timeout_s=10))
        log.submit(1)
        assert (await waiter).state == SUCCEEDED
        await asyncio.sleep(0.01)
        store.sweep()
        with pytest.raises(ServiceError, match="no operation"):
            store.get(second.op_id)
        await log.queue.close()

    run(body)


Action = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 8), st.sampled_from([b"p", b"q"])),
    st.tuples(st.just("refuse"), st.integers(1, 8), st.just(b"r")),
    st.tuples(st.just("abandon"), st.integers(1, 8), st.just(b"")),
    st.tuples(st.just("turn"), st.just(0), st.just(b"")),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(Action, max_size=40))
def test_random_schedules_equal_a_simple_model(actions: list[tuple[str, int, bytes]]) -> None:
    """Whatever comes in whatever order: each id runs at most once, with its first payload, in order."""

    async def body() -> None:
        log = Log(gap_timeout_s=60.0)
        first: dict[int, tuple[str, bytes]] = {}
        for what, seq_id, payload in actions:
            if what == "turn":
                await asyncio.sleep(0)
            elif what == "submit":
                try:
                    log.submit(seq_id, payload)
                    accepted = True
                except ServiceError:
                    accepted = False
                known = first.setdefault(seq_id, ("submit", payload))
                assert accepted == (known == ("submit", payload))
            elif what == "refuse":
                log.queue.refuse(seq_id, payload, ServiceError("INVALID_DATUM", "bad"))
                first.setdefault(seq_id, ("refuse", payload))
            else:
                log.queue.abandon([seq_id])
                first.setdefault(seq_id, ("abandon", payload))
        used = 0
        while used + 1 in first:
            used += 1
        for _ in range(200):
            await asyncio.sleep(0)
        assert log.ran == [seq_id for seq_id in range(1, used + 1) if first[seq_id][0] == "submit"]
        assert log.queue.next_seq_id == used + 1
        await log.queue.close()

    run(body)


def test_passes_are_under_way_together_and_a_step_waits_for_all_of_them() -> None:
    async def body() -> None:
        queue = AdapterQueue("a", gap_timeout_s=60)
        gates = {seq_id: asyncio.Event() for seq_id in range(1, 6)}

        def submit(seq_id: int, kind: operation_pb2.OperationKind) -> Operation:
            async def run(operation: Operation) -> operation_pb2.OptimStepResult:
                await gates[seq_id].wait()
                return operation_pb2.OptimStepResult()

            made = Operation("a", seq_id, kind, b"p", "request", run)
            queue.submit(made)
            return made

        both = operation_pb2.OPERATION_KIND_FORWARD_BACKWARD
        made = [submit(seq_id, KIND if seq_id == 4 else both) for seq_id in range(1, 6)]

        async def running() -> list[int]:
            await asyncio.sleep(0.01)
            return [operation.seq_id for operation in queue.running]

        assert await running() == [1, 2, 3]
        gates[2].set()
        assert await running() == [1, 3]
        assert queue.waiting() == made[3:], "the step is still to be failed, or cancelled, as queued"
        gates[1].set(), gates[3].set()
        assert await running() == [4]
        gates[4].set()
        assert await running() == [5]
        await queue.close(ServiceError("STATE_LOST", "the worker died"))
        assert made[4].error.message == "the worker died"

    run(body)
