"""Fixtures shared by all tests: models with known answers, made once a session."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Empty folder that stands for the user's model cache."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def t0_dir(cache_dir: Path) -> Path:
    """Random two-layer decoder: hidden 64, vocab 256, float32, context 1,024, untied head."""
    from opentinker_server.models.testing import build_t0

    return build_t0(cache_dir / "t0")


@pytest.fixture(scope="session")
def bigram_dir(cache_dir: Path) -> Path:
    """Model whose next-token distribution depends on the current token only, with known values."""
    from opentinker_server.models.testing import build_bigram_model

    return build_bigram_model(cache_dir / "bigram")


@pytest.fixture(scope="session")
def chain_dir(cache_dir: Path) -> Path:
    """Model with one successor per token: its greedy text is known."""
    from opentinker_server.models.testing import build_chain_model

    return build_chain_model(cache_dir / "chain")


@pytest.fixture(scope="session")
def model_cache() -> Path:
    """The user's own cache, so that the real model is fetched once a machine: `make test` puts it there."""
    from opentinker_server.config import load_config

    return load_config().model.cache_dir
