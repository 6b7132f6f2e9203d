"""Calls of several adapters share passes, and no one is the worse for it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from opentinker_client.wire.v1 import datum_pb2, policy_pb2, training_pb2
from opentinker_server.models.base import BaseModel
from opentinker_server.models.registry import resolve_model
from opentinker_server.sampler.engine import EngineConfig, SamplerEngine
from opentinker_server.training import optimizer
from opentinker_server.training.trainer import Trainer, TrainerConfig
from opentinker_server.workers.adapter_commands import AdapterCommands, queue_of
from opentinker_server.workers.training_turns import Outcome, TrainingTurns
from opentinker_server.workers.v1 import worker_pb2


@pytest.fixture(scope="module")
def base(t0_dir: Path, cache_dir: Path) -> BaseModel:
    return BaseModel.load(resolve_model(str(t0_dir), cache_dir=cache_dir), dtype=torch.float32, device="cpu")


class Bed:
    """Turns without a process around them."""

    def __init__(self, base: BaseModel, *, deterministic: bool = False, max_rows: int = 64) -> None:
        self.trainer = Trainer(base, TrainerConfig(max_tokens_per_micro_batch=max_rows))
        commands = AdapterCommands(base=base, trainer=self.trainer, sampler=SamplerEngine(base, EngineConfig()))
        self.turns = TrainingTurns(commands, max_rows=max_rows, deterministic=deterministic)
        self.outcomes: list[tuple[int, Outcome]] = []
        self._next_id = 1

    def put(self, **body: object) -> int:
        command = worker_pb2.WorkerCommand(command_id=self._next_id, **body)
        self.turns.add(command, queue_of(command))
        self._next_id += 1
        return command.command_id

    def create(self, name: str, rank: int = 4) -> None:
        lora = policy_pb2.LoraConfig(rank=rank, seed=3, alpha=8)
        self.put(create_adapter=worker_pb2.CreateAdapter(adapter_id=name, lora=lora))
        self.run()

    def train(self, name: str, driver, lengths: list[int], *, loss_fn: str = "cross_entropy") -> int:
        data = [driver.datum(range(length + 1)) for length in lengths]
        return self.put(forward_backward=worker_pb2.ForwardBackward(adapter_id=name, loss_fn=loss_fn, data=data))

    def step(self, name: str, **adam: float) -> int:
        adam = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8} | adam
        return self.put(optim_step=worker_pb2.OptimStep(adapter_id=name, adam=training_pb2.AdamParams(**adam)))

    def run(self) -> None:
        while self.turns:
            self.outcomes += self.turns.run()

    def final(self, command_id: int) -> worker_pb2.WorkerReply:
        (outcome,) = [out for number, out in self.outcomes if number == command_id and not isinstance(out, int)]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def weights(self, name: str) -> np.ndarray:
        return self.trainer.snapshot(name).factors["model.layers.0.self_attn.q_proj"][1].numpy().copy()


def solo(base: BaseModel, work: Callable[[Bed], None], name: str) -> np.ndarray:
    bed = Bed(base)
    bed.create(name)
    work(bed)
    bed.run()
    return bed.weights(name)


def test_calls_of_many_adapters_share_one_pass_and_steps_one_operation(base, driver) -> None:
    bed = Bed(base)
    names = ["a", "b", "c"]
    for name in names:
        bed.create(name)
    calls = [bed.train(name, driver, [5 + i, 3]) for i, name in enumerate(names)]
    steps = [bed.step(name, learning_rate=0.01 * (1 + i)) for i, name in enumerate(names)]
    assert [number for number, _ in bed.turns.run()] == calls and bed.turns.num_passes == 1
    bed.outcomes.clear()
    bed.run()
    assert [number for number, _ in bed.outcomes] == steps
    for i, name in enumerate(names):

        def alone(other: Bed, i: int = i, name: str = name) -> None:
            other.train(name, driver, [5 + i, 3])
            other.step(name, learning_rate=0.01 * (1 + i))

        np.testing.assert_allclose(bed.weights(name), solo(base, alone, name), atol=1e-7)


def test_calls_of_one_adapter_join_up_to_its_next_step(base, driver) -> None:
    bed = Bed(base)
    bed.create("a")
    first, second, step, third = (
        bed.train("a", driver, [6]),
        bed.train("a", driver, [9, 2]),
        bed.step("a"),
        bed.train("a", driver, [6]),
    )
    assert [number for number, _ in bed.turns.run()] == [first, second]
    assert [number for number, _ in bed.turns.run()] == [step]
    bed.run()
    assert bed.final(third).step == 1

    def alone(other: Bed) -> None:
        other.train("a", driver, [6, 9, 2])
        other.step("a")

    np.testing.assert_allclose(bed.weights("a"), solo(base, alone, "a"), atol=1e-7)


def test_a_pass_stays_within_its_rows(base, driver) -> None:
    bed = Bed(base, max_rows=20)
    for name in "abc":
        bed.create(name)
    calls = [bed.train("a", driver, [12]), bed.train("b", driver, [12]), bed.train("c", driver, [7])]
    assert [number for number, _ in bed.turns.run()] == [calls[0], calls[2]]
    assert [number for number, _ in bed.turns.run()] == [calls[1]]


def test_deterministic_turns_run_every_call_alone(base, driver) -> None:
    def work(bed: Bed, name: str) -> None:
        for length in (6, 11):
            bed.train(name, driver, [length, 3])
            bed.step(name)

    bed = Bed(base, deterministic=True)
    for name in "ab":
        bed.create(name)
    for name in "ab":
        work(bed, name)
    bed.run()
    assert bed.turns.num_passes == 4
    for name in "ab":
        assert np.array_equal(bed.weights(name), solo(base, lambda other, name=name: work(other, name), name))


def test_who_is_to_blame_fails_alone(base, driver) -> None:
    """A pass that fails is run again call by call, since nothing of it was applied."""
    bed = Bed(base)
    for name in "ab":
        bed.create(name)
    bad, good = bed.train("a", driver, [5]), bed.train("b", driver, [6])
    token = np.array([300], "<i4").tobytes()  # beyond the vocabulary: the check is the control plane's
    broken = bed.turns._queues["a"][0].command.forward_backward.data[0]
    broken.model_input.chunks.append(datum_pb2.Chunk(text=datum_pb2.TextChunk(tokens=token)))
    broken.target_tokens.shape[0] += 1
    broken.target_tokens.data += np.array([1], "<i8").tobytes()
    bed.run()
    with pytest.raises(IndexError):
        bed.final(bad)
    assert len(bed.final(good).forward_backward.outputs) == 1
    step = bed.step("a")
    bed.run()
    assert bed.final(step).optim_step.metrics["grad_norm"] == 0.0


def test_a_gradient_that_is_not_finite_refuses_that_step_only(base, driver) -> None:
    bed = Bed(base)
    for name in "ab":
        bed.create(name)
        bed.train(name, driver, [5])
    bed.run()
    bed.trainer._adapters["a"].gradient_P[0] = torch.inf
    before = bed.weights("a")
    bad, good = bed.step("a"), bed.step("b")
    bed.run()
    with pytest.raises(Exception, match="norm is inf"):
        bed.final(bad)
    assert np.array_equal(bed.weights("a"), before) and bed.trainer.step("a") == 0
    assert bed.final(good).step == 1


def test_a_step_that_breaks_off_loses_the_adapter_for_all_to_see(base, driver, monkeypatch) -> None:
    def broken_apply(*arguments: object) -> None:
        raise RuntimeError("a fault of the trainer")

    bed = Bed(base)
    bed.create("a")
    monkeypatch.setattr(optimizer, "_apply", broken_apply)
    broken = bed.step("a")
    bed.run()
    with pytest.raises(Exception, match="broke off"):
        bed.final(broken)
    later = bed.train("a", driver, [3])
    bed.run()
    with pytest.raises(Exception, match="was lost in a fault"):
        bed.final(later)
    bed.put(drop_adapter=worker_pb2.DropAdapter(adapter_id="a"))
    gone = bed.train("a", driver, [3])
    bed.run()
    with pytest.raises(Exception, match="No live adapter"):
        bed.final(gone)


def test_a_cancelled_call_leaves_no_gradient(base, driver) -> None:
    bed = Bed(base, max_rows=8)
    bed.create("a")
    call = bed.train("a", driver, [8, 8, 8])
    assert bed.turns.run() == [(call, 1)]
    assert bed.turns.cancel(call) and not bed.turns.cancel(call) and not bed.turns
    step = bed.step("a")
    bed.run()
    assert bed.final(step).optim_step.metrics["grad_norm"] == 0.0
