"""Configuration, frames, fair shares and the meaning of failures, each alone."""

import asyncio
import dataclasses
import errno
import json
import socket
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opentinker_client.wire.v1 import error_pb2
from opentinker_server.sampler.engine import EngineConfig
from opentinker_server.training.trainer import TrainerConfig
from opentinker_server.workers.config import EngineLimits, TrainerLimits, WorkerConfig
from opentinker_server.workers.errors import is_device_fault, to_error_info
from opentinker_server.workers.fair_share import FairShare
from opentinker_server.workers.frames import encode_frame, read_frame, receive_frame


def test_configuration_survives_the_round_trip() -> None:
    config = WorkerConfig(
        model="tiny-llama",
        cache_dir="/c",
        dtype="bfloat16",
        threads=2,
        sampling_weight=2.5,
        trainer=TrainerLimits(max_adapters=3),
        engine=EngineLimits(max_running=7),
    )
    assert WorkerConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    "change",
    [
        {"modle": "x"},
        {"trainer": {"max_adapter": 3}},
        {"trainer": 3},
        {"threads": "2"},
        {"threads": True},
        {"threads": -1},
        {"dtype": "float64"},
        {"sampling_weight": 0},
        {"engine": {"max_running": 0}},
        {"model": ""},
    ],
)
def test_wrong_configuration_is_refused(change: dict) -> None:
    with pytest.raises(ValueError):
        WorkerConfig.from_json(json.dumps({"model": "m", "cache_dir": "/c"} | change))


def test_configuration_without_model_is_refused() -> None:
    with pytest.raises(ValueError, match="model"):
        WorkerConfig.from_json('{"cache_dir": "/c"}')
    with pytest.raises(ValueError):
        WorkerConfig.from_json("[]")


@pytest.mark.parametrize(("limits", "target"), [(TrainerLimits, TrainerConfig), (EngineLimits, EngineConfig)])
def test_limits_are_those_of_trainer_and_engine(limits: type, target: type) -> None:
    def defaults(cls: type) -> dict[str, object]:
        return {field.name: field.default for field in dataclasses.fields(cls)}

    assert defaults(limits) == defaults(target)


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_frames_arrive_whole_and_in_order(payloads: list[bytes]) -> None:
    sender, receiver = socket.socketpair()
    with sender, receiver:
        sender.sendall(b"".join(map(encode_frame, payloads)))
        sender.close()
        assert [receive_frame(receiver) for _ in payloads] == payloads
        assert receive_frame(receiver) is None


def test_frame_larger_than_the_socket_buffer_arrives() -> None:
    payload = bytes(range(256)) * 8192
    sender, receiver = socket.socketpair()
    with sender, receiver:
        thread = threading.Thread(target=sender.sendall, args=(encode_frame(payload),))
        thread.start()
        assert receive_frame(receiver) == payload
        thread.join()


@pytest.mark.parametrize("kept", [0, 3, 4, 6])
def test_stream_that_ends_inside_a_frame_has_ended(kept: int) -> None:
    async def read() -> bytes | None:
        reader = asyncio.StreamReader()
        reader.feed_data(encode_frame(b"payload")[:kept])
        reader.feed_eof()
        return await read_frame(reader)

    sender, receiver = socket.socketpair()
    with receiver:
        sender.sendall(encode_frame(b"payload")[:kept])
        sender.close()
        assert receive_frame(receiver) is None
    assert asyncio.run(read()) is None


def run(shares: FairShare, costs: dict[str, float], rounds: int) -> dict[str, float]:
    """Time that each name got when all always have work."""
    used = dict.fromkeys(costs, 0.0)
    for _ in range(rounds):
        name = shares.pick(list(costs))
        shares.charge(name, costs[name])
        used[name] += costs[name]
    return used


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.01, 5), st.floats(0.01, 5))
def test_time_is_divided_by_weight_whatever_units_cost(
    weight_a: float, weight_b: float, cost_a: float, cost_b: float
) -> None:
    """Start-time fair queueing: service differs by at most one unit of each."""
    used = run(FairShare({"a": weight_a, "b": weight_b}), {"a": cost_a, "b": cost_b}, rounds=300)
    bound = cost_a / weight_a + cost_b / weight_b
    assert abs(used["a"] / weight_a - used["b"] / weight_b) <= bound * (1 + 1e-9)


def test_idleness_earns_no_credit() -> None:
    shares = FairShare()
    for _ in range(100):
        shares.charge(shares.pick(["a"]), 1.0)
    order = []
    for _ in range(6):
        order.append(shares.pick(["a", "b"]))
        shares.charge(order[-1], 1.0)
    assert sorted(order) == ["a", "a", "a", "b", "b", "b"]


def test_rest_settles_what_was_used_before() -> None:
    shares = FairShare()
    shares.charge(shares.pick(["a", "b"]), 1.0)
    shares.charge(shares.pick(["a", "b"]), 100.0)
    shares.rest()
    order = []
    for _ in range(6):
        order.append(shares.pick(["a", "b"]))
        shares.charge(order[-1], 1.0)
    assert order == ["a", "b"] * 3


def test_forgotten_name_starts_like_a_new_one() -> None:
    shares = FairShare()
    shares.charge(shares.pick(["a"]), 100.0)
    shares.forget("a")
    shares.charge(shares.pick(["b"]), 1.0)
    assert shares.pick(["a", "b"]) == "a"


def reason(error: Exception) -> str:
    return error_pb2.ErrorReason.Name(to_error_info(error).reason).removeprefix("ERROR_REASON_")


def test_real_allocation_failure_is_a_limit() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert reason(caught.value) == "LIMIT_EXCEEDED" and not is_device_fault(caught.value)


def test_failures_are_told_apart() -> None:
    assert reason(MemoryError()) == "LIMIT_EXCEEDED"
    assert reason(OSError(errno.ENOSPC, "full")) == "DISK_FULL"
    assert reason(OSError(errno.EIO, "broken")) == "INTERNAL"
    assert reason(ZeroDivisionError()) == "INTERNAL"
    out_of_memory, illegal = torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: illegal address")
    assert reason(out_of_memory) == "LIMIT_EXCEEDED" and not is_device_fault(out_of_memory)
    assert reason(illegal) == "UNAVAILABLE" and is_device_fault(illegal)
