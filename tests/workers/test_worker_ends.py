"""How workers end, and who hears of it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opentinker_client.wire.v1 import error_pb2
from opentinker_server.backends.base import WorkerDied, WorkerError, WorkerExit
from opentinker_server.backends.local import LocalBackend
from opentinker_server.workers.config import WorkerConfig
from opentinker_server.workers.v1 import worker_pb2

PARENT = """
import asyncio, sys
from opentinker_server.backends.local import LocalBackend
from opentinker_server.workers.config import WorkerConfig

async def main():
    worker = await LocalBackend().start_worker(WorkerConfig.from_json(sys.argv[1]))
    print(worker.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def is_running(pid: int) -> bool:
    """Neither gone nor ended and waiting for its parent to look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


def children() -> set[int]:
    return {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def test_killed_worker_ends_every_wait_and_tells_its_owner(driver, t0_config) -> None:
    """Also: another worker is not concerned, and the next one starts."""

    async def scenario() -> tuple[list[object], list[WorkerExit]]:
        worker = await LocalBackend().start_worker(t0_config)
        exits: list[WorkerExit] = []
        worker.on_exit(exits.append)
        streaming = driver.sample([1], stream=True, max_tokens=1000)

        async def stream() -> None:
            async for _ in worker.stream(streaming):
                if is_running(worker.pid):
                    os.kill(worker.pid, signal.SIGKILL)

        unknown = driver.forward_backward("a", [driver.datum(range(129))] * 50)
        create = worker_pb2.WorkerCommand(create_adapter=worker_pb2.CreateAdapter(adapter_id="a", lora={"rank": 4}))
        await worker.call(create)
        outcomes: list[object] = list(await asyncio.gather(stream(), worker.call(unknown), return_exceptions=True))
        outcomes += await asyncio.gather(worker.call(driver.sample([1])), return_exceptions=True)
        await asyncio.sleep(0)
        worker.on_exit(exits.append)
        await worker.stop()
        await asyncio.sleep(0)
        return outcomes, exits

    outcomes, exits = driver.run(scenario())
    assert [type(outcome) for outcome in outcomes] == [WorkerDied] * 3
    assert "signal 9" in str(outcomes[0])
    assert len(exits) == 2 and exits[0] == exits[1]
    assert exits[0].code == -signal.SIGKILL and not exits[0].requested
    assert any("loaded" in line for line in exits[0].stderr_tail)
    assert driver.stats()["adapters"] >= 0


def test_stop_tells_unfinished_commands_and_waits_for_the_process(driver, t0_config) -> None:
    async def scenario() -> tuple[list[object], WorkerExit, int]:
        worker = await LocalBackend().start_worker(t0_config)
        exits: list[WorkerExit] = []
        worker.on_exit(exits.append)
        sampling = asyncio.create_task(worker.call(driver.sample([1], max_tokens=1000)))
        await worker.call(worker_pb2.WorkerCommand(get_stats=worker_pb2.GetStats()))
        await asyncio.gather(worker.stop(), worker.stop())
        outcomes = await asyncio.gather(sampling, return_exceptions=True)
        return outcomes, exits[0], worker.pid

    (outcome,), end, pid = driver.run(scenario())
    assert isinstance(outcome, WorkerError) and outcome.error_info.reason == error_pb2.ERROR_REASON_UNAVAILABLE
    assert (end.code, end.requested) == (0, True)
    assert not is_running(pid)


def test_sigterm_ends_the_worker_after_the_running_unit(driver, t0_config) -> None:
    async def scenario() -> tuple[object, int]:
        worker = await LocalBackend().start_worker(t0_config)
        ended = asyncio.get_running_loop().create_future()
        worker.on_exit(ended.set_result)
        sampling = asyncio.create_task(worker.call(driver.sample([1], max_tokens=1000)))
        await worker.call(worker_pb2.WorkerCommand(get_stats=worker_pb2.GetStats()))
        os.kill(worker.pid, signal.SIGTERM)
        (outcome,) = await asyncio.gather(sampling, return_exceptions=True)
        return outcome, (await ended).code

    outcome, code = driver.run(scenario())
    assert isinstance(outcome, WorkerError) and outcome.error_info.reason == error_pb2.ERROR_REASON_UNAVAILABLE
    assert code == 0


def test_worker_dies_with_its_parent(t0_config) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, t0_config.to_json()], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker_pid = int(parent.stdout.readline())
    assert is_running(worker_pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until_gone(worker_pid, timeout_s=10)


def test_worker_that_cannot_start_says_why(driver, cache_dir) -> None:
    config = WorkerConfig(model="no-such-model", cache_dir=str(cache_dir))
    with pytest.raises(WorkerError) as caught:
        driver.run(LocalBackend().start_worker(config))
    assert caught.value.error_info.reason == error_pb2.ERROR_REASON_FAILED_PRECONDITION
    assert "no-such-model" in str(caught.value) and "tiny-llama" in str(caught.value)


def test_cancelled_start_leaves_no_process(driver, t0_config) -> None:
    before = children()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(LocalBackend().start_worker(t0_config), 0.3)

    driver.run(give_up())
    assert children() == before
