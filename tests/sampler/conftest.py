"""Models, adapters and a driver for engine tests."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import torch

from opentinker_server.models.base import BaseModel
from opentinker_server.models.lora import LoraWeights
from opentinker_server.models.registry import resolve_model
from opentinker_server.sampler.base import Failed, Finished, SampleOutput, SampleTask, SamplingSettings
from opentinker_server.sampler.engine import EngineConfig, SamplerEngine


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny; on a busy machine threads that wait for one another cost minutes."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def load_model(cache_dir: Path) -> Callable[[Path], BaseModel]:
    """Loads a model folder in float32."""

    def load(directory: Path) -> BaseModel:
        source = resolve_model(str(directory), cache_dir=cache_dir)
        return BaseModel.load(source, dtype=torch.float32, device="cpu")

    return load


@pytest.fixture(scope="session")
def t0(load_model: Callable[[Path], BaseModel], t0_dir: Path) -> BaseModel:
    return load_model(t0_dir)


@pytest.fixture(scope="session")
def bigram(load_model: Callable[[Path], BaseModel], bigram_dir: Path) -> BaseModel:
    return load_model(bigram_dir)


@pytest.fixture(scope="session")
def chain(load_model: Callable[[Path], BaseModel], chain_dir: Path) -> BaseModel:
    return load_model(chain_dir)


def random_adapter(base: BaseModel, *, seed: int, rank: int = 4, spread: float = 0.15) -> LoraWeights:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * spread

    return LoraWeights(
        scale=2.0,
        factors={
            name: (normal(rank, inputs), normal(outputs, rank)) for name, (inputs, outputs) in base.lora_shapes.items()
        },
    )


@pytest.fixture(scope="session")
def adapters(t0: BaseModel) -> dict[str, LoraWeights]:
    """Three adapters of t0 with large effects and different ranks."""
    return {
        key: random_adapter(t0, seed=seed, rank=rank) for seed, (key, rank) in enumerate((("a", 4), ("b", 8), ("c", 1)))
    }


@pytest.fixture(scope="session")
def make_adapter() -> Callable[..., LoraWeights]:
    return random_adapter


class MakeEngine(Protocol):
    def __call__(self, **limits: int) -> SamplerEngine: ...


@pytest.fixture(scope="session")
def make_engine(t0: BaseModel, adapters: dict[str, LoraWeights]) -> MakeEngine:
    """An engine over t0 that knows snapshots a, b and c."""

    def make(**limits: int) -> SamplerEngine:
        engine = SamplerEngine(t0, EngineConfig(**limits))
        for key, weights in adapters.items():
            engine.add_snapshot(key, weights)
        return engine

    return make


@pytest.fixture(scope="session")
def drive() -> Callable[[SamplerEngine, Sequence[SampleTask]], dict[int, SampleOutput]]:
    """Adds tasks at once, steps until all are done, returns outputs by task id; a failure is raised."""

    def run(engine: SamplerEngine, tasks: Sequence[SampleTask]) -> dict[int, SampleOutput]:
        for task in tasks:
            engine.add(task)
        outputs = {}
        while engine.has_work():
            for event in engine.step():
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Finished):
                    outputs[event.task_id] = event.output
        return outputs

    return run


@pytest.fixture(scope="session")
def make_task() -> Callable[..., SampleTask]:
    """A task from a prompt; keyword arguments go to the settings or to the task, by their name."""

    def make(prompt: Sequence[int], *, task_id: int = 0, **options: object) -> SampleTask:
        names = SamplingSettings.__dataclass_fields__
        settings = {name: options.pop(name) for name in list(options) if name in names}
        return SampleTask(
            task_id=task_id,
            prompt=np.array(prompt, dtype=np.int64),
            settings=SamplingSettings(**{"max_tokens": 1, "seed": 0, **settings}),
            **options,
        )

    return make
