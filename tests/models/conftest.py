"""Models and adapters shared by the tests of `opentinker_server.models`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from opentinker_server.models.base import BaseModel
from opentinker_server.models.lora import LoraWeights
from opentinker_server.models.registry import ModelSource, resolve_model

BaseLoader = Callable[[str], BaseModel]
RandomAdapter = Callable[..., LoraWeights]


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def load_base(cache_dir: Path) -> BaseLoader:
    """Loads a model of the registry in float32, once a session."""
    loaded: dict[str, BaseModel] = {}

    def load(name: str) -> BaseModel:
        if name not in loaded:
            source = resolve_model(name, cache_dir=cache_dir)
            loaded[name] = BaseModel.load(source, dtype=torch.float32, device="cpu")
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def t0_base(t0_dir: Path) -> BaseModel:
    return BaseModel.load(ModelSource(name="t0", directory=t0_dir), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="session")
def random_adapter() -> RandomAdapter:
    """Makes an adapter with both factors random, of every adaptable module unless `modules` says less."""

    def make(
        base: BaseModel,
        *,
        rank: int,
        seed: int,
        scale: float = 0.5,
        requires_grad: bool = False,
        modules: Callable[[str], bool] = lambda name: True,
    ) -> LoraWeights:
        generator = torch.Generator().manual_seed(seed)
        factors = {}
        for name, (width_in, width_out) in base.lora_shapes.items():
            if modules(name):
                a_RI = torch.randn(rank, width_in, generator=generator) * 0.1
                b_OR = torch.randn(width_out, rank, generator=generator) * 0.1
                factors[name] = (a_RI.requires_grad_(requires_grad), b_OR.requires_grad_(requires_grad))
        return LoraWeights(scale=scale, factors=factors)

    return make
