"""A bench for the trainer: small models, random datums, and the probes of the failure cases."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from opentinker_server.models.base import BaseModel
from opentinker_server.models.lora import LoraWeights
from opentinker_server.models.peft_adapter import LoraSettings
from opentinker_server.models.registry import resolve_model
from opentinker_server.training.datum import TrainDatum
from opentinker_server.training.optimizer import AdamSettings
from opentinker_server.training.trainer import ForwardBackwardOutput, Trainer, TrainerConfig

torch.set_num_threads(1)  # more only wait for one another on models of this size

LINEAR_PROBE = AdamSettings(learning_rate=1e4, beta1=0.0, beta2=0.0, eps=1e6)
"""One step changes each weight by -0.01 times its gradient, as long as that is far below 1,000,000."""


class Rig:
    """One trainer and the ways in which tests use it."""

    def __init__(self, base: BaseModel, **config: int) -> None:
        self.base = base
        self.trainer = Trainer(base, TrainerConfig(**config))

    def create(self, adapter_id: str = "a", **lora: object) -> None:
        self.trainer.create_adapter(
            adapter_id, LoraSettings(**{"rank": 4, "seed": 7} | lora), directory=None, with_optimizer=False
        )

    def run(
        self, data: list[TrainDatum], loss: str = "cross_entropy", adapter_id: str = "a", *, backward=True, **config
    ) -> ForwardBackwardOutput:
        """The whole call."""
        generator = self.trainer.forward_backward(adapter_id, data, loss, config, backward=backward)
        while True:
            try:
                next(generator)
            except StopIteration as end:
                return end.value

    def logprobs(self, datum: TrainDatum, adapter_id: str = "a") -> np.ndarray:
        plain = TrainDatum(tokens=datum.tokens, targets=datum.targets)
        return self.run([plain], adapter_id=adapter_id, backward=False).logprobs[0]

    def weights(self, adapter_id: str = "a") -> dict[str, torch.Tensor]:
        return named(self.trainer.snapshot(adapter_id))

    def probe(self, adapter_id: str = "a") -> dict[str, torch.Tensor]:
        """The accumulated gradient of every B factor (which starts at zero), by a linear probe step."""
        before = self.weights(adapter_id)
        self.trainer.optim_step(adapter_id, LINEAR_PROBE)
        after = self.weights(adapter_id)
        return {name: (before[name] - after[name]) * 100 for name in before if name.endswith(".B")}

    def gradient_of(self, data: list[TrainDatum], loss: str = "cross_entropy", **config) -> dict[str, torch.Tensor]:
        """The gradient of one call on a fresh adapter, which is dropped again."""
        self.create("probe")
        try:
            self.run(data, loss, "probe", **config)
            return self.probe("probe")
        finally:
            self.trainer.drop_adapter("probe")


def named(weights: LoraWeights) -> dict[str, torch.Tensor]:
    return {
        f"{module}.{half}": tensor
        for module, pair in weights.factors.items()
        for half, tensor in zip("AB", pair, strict=True)
    }


@pytest.fixture(scope="session")
def load_base(cache_dir: Path) -> Callable[[str], BaseModel]:
    """Base model in float32 by name or directory, loaded once a session."""
    loaded: dict[str, BaseModel] = {}

    def load(name: str) -> BaseModel:
        if name not in loaded:
            source = resolve_model(name, cache_dir=cache_dir)
            loaded[name] = BaseModel.load(source, dtype=torch.float32, device="cpu")
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def t0(t0_dir: Path, load_base) -> BaseModel:
    return load_base(str(t0_dir))


@pytest.fixture
def rig(t0: BaseModel) -> Rig:
    """A trainer on T0 with micro-batches of 64 tokens, so that most calls need several."""
    return Rig(t0, max_tokens_per_micro_batch=64, head_chunk_rows=16)


@pytest.fixture(scope="session")
def make_rig() -> type[Rig]:
    return Rig


@pytest.fixture(scope="session")
def make_datum() -> Callable[..., TrainDatum]:
    """make_datum(rng, length, **inputs): random tokens and targets below 256."""

    def make(rng: np.random.Generator, length: int, **inputs) -> TrainDatum:
        return TrainDatum(
            tokens=rng.integers(0, 256, length),
            targets=rng.integers(0, 256, length),
            inputs={name: np.asarray(value, dtype=np.float32) for name, value in inputs.items()},
        )

    return make


@pytest.fixture(scope="session")
def dial() -> Callable[..., TrainDatum]:
    """dial(datum, logprobs, ratios, advantages): the same datum with exactly these importance ratios."""

    def turn(datum: TrainDatum, logprobs: np.ndarray, ratios, advantages) -> TrainDatum:
        q = (logprobs.astype(np.float64) - np.log(np.asarray(ratios, dtype=np.float64))).astype(np.float32)
        return TrainDatum(
            tokens=datum.tokens,
            targets=datum.targets,
            inputs={
                "logprobs": q,
                "advantages": np.asarray(advantages, dtype=np.float32),
                "mask": np.ones(len(q), dtype=np.float32),
            },
        )

    return turn


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="session")
def difference() -> Callable[..., float]:
    """Largest absolute difference between two sets of named tensors."""
    return largest_difference
