"""The loop, in this process, on an engine whose steps fail as a broken device or a bug would make them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from opentinker_client.wire.v1 import error_pb2, policy_pb2
from opentinker_server.models.base import BaseModel
from opentinker_server.models.registry import resolve_model
from opentinker_server.sampler.base import SampleEvent
from opentinker_server.sampler.engine import EngineConfig, SamplerEngine
from opentinker_server.training.trainer import Trainer, TrainerConfig
from opentinker_server.workers.config import WorkerConfig
from opentinker_server.workers.errors import DeviceFault
from opentinker_server.workers.loop import Inbox, WorkerLoop
from opentinker_server.workers.v1 import worker_pb2


class FailingEngine(SamplerEngine):
    """Raises `failure` in its second step, and works otherwise."""

    failure: Exception
    num_calls = 0

    def step(self) -> list[SampleEvent]:
        self.num_calls += 1
        if self.num_calls == 2:
            raise self.failure
        return super().step()


class LoopBed:
    """A loop without a process: commands are queued before it runs, replies are collected."""

    def __init__(self, base: BaseModel, failure: Exception) -> None:
        self.replies: list[worker_pb2.WorkerReply] = []
        self.inbox = Inbox()
        self.engine = FailingEngine(base, EngineConfig(kv_cache_tokens=4096))
        self.engine.failure = failure
        self.loop = WorkerLoop(
            base=base,
            trainer=Trainer(base, TrainerConfig(max_tokens_per_micro_batch=64)),
            sampler=self.engine,
            config=WorkerConfig(model="t0", cache_dir="/c"),
            inbox=self.inbox,
            send=self._collect,
        )

    def put(self, command_id: int, command: worker_pb2.WorkerCommand) -> None:
        command.command_id = command_id
        self.inbox.put(command)

    def _collect(self, reply: worker_pb2.WorkerReply) -> None:
        self.replies.append(reply)

    def final(self, command_id: int) -> worker_pb2.WorkerReply:
        (reply,) = [reply for reply in self.replies if reply.command_id == command_id and reply.final]
        return reply


@pytest.fixture(scope="module")
def base(t0_dir: Path, cache_dir: Path) -> BaseModel:
    torch.set_num_threads(2)
    return BaseModel.load(resolve_model(str(t0_dir), cache_dir=cache_dir), dtype=torch.float32, device="cpu")


class FollowUp(LoopBed):
    """Sends `then` when command 2 is answered, and ends the loop when command 3 is."""

    then: worker_pb2.WorkerCommand

    def _collect(self, reply: worker_pb2.WorkerReply) -> None:
        super()._collect(reply)
        if reply.command_id == 2:
            self.put(3, self.then)
        if reply.command_id == 3:
            self.put(4, worker_pb2.WorkerCommand(get_stats=worker_pb2.GetStats()))
            self.put(5, worker_pb2.WorkerCommand(shutdown=worker_pb2.Shutdown()))


def assert_same_answer(one: worker_pb2.WorkerReply, other: worker_pb2.WorkerReply) -> None:
    """The same tokens; logprobs to rounding, since another process may add up in another order."""
    (first,), (second,) = one.sample.sequences, other.sample.sequences
    assert first.tokens == second.tokens and len(first.tokens) == 4 * 8
    np.testing.assert_allclose(*(np.frombuffer(item.logprobs, np.float32) for item in (first, second)), atol=1e-5)


def test_step_that_fails_ends_the_running_requests_and_the_next_ones_run(base, driver) -> None:
    bed = FollowUp(base, RuntimeError("a bug"))
    bed.then = driver.sample([1, 2], seed=1)
    for command_id in (1, 2):
        bed.put(command_id, driver.sample([1, 2], seed=command_id))
    bed.loop.run()
    assert [bed.final(command_id).error.reason for command_id in (1, 2)] == [error_pb2.ERROR_REASON_INTERNAL] * 2
    assert_same_answer(bed.final(3), driver.call(driver.sample([1, 2], seed=1)))
    stats = bed.final(4).stats.values
    assert stats["sampler_requests"] == 0
    assert stats["sampler_cache_tokens_free"] == stats["sampler_cache_tokens_total"]
    assert bed.final(5).WhichOneof("reply") == "done"


def test_failed_device_answers_everything_and_ends_the_loop(base, driver) -> None:
    bed = LoopBed(base, RuntimeError("CUDA error: an illegal memory access was encountered"))
    create = worker_pb2.CreateAdapter(adapter_id="a", lora=policy_pb2.LoraConfig(rank=4))
    bed.put(1, driver.sample([1, 2], seed=1))
    bed.put(2, worker_pb2.WorkerCommand(create_adapter=create))
    bed.put(3, driver.forward_backward("a", [driver.datum(range(65))] * 100))
    bed.put(4, driver.optim_step("a"))
    with pytest.raises(DeviceFault):
        bed.loop.run()
    assert bed.final(2).WhichOneof("reply") == "done"
    assert [bed.final(command_id).error.reason for command_id in (1, 3, 4)] == [error_pb2.ERROR_REASON_UNAVAILABLE] * 3
