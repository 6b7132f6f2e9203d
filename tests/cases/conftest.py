"""One real server per model, shared by the case tests; the public client talks to it over loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from support.server import RunningServer

import opentinker_client as ot


@pytest.fixture(scope="session")
def start_server() -> Callable[..., RunningServer]:
    """Starts a server of the test's own: `with start_server(model_dir, state_dir=...) as server`."""

    def start(model: Path, *, state_dir: Path, **settings: object) -> RunningServer:
        return RunningServer(model, state_dir, **settings)

    return start


def _serve(model: Path, tmp_path_factory: pytest.TempPathFactory, **settings: object) -> Iterator[RunningServer]:
    with RunningServer(model, tmp_path_factory.mktemp("state") / "state", **settings) as server:
        yield server


@pytest.fixture(scope="session")
def t0_server(t0_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    yield from _serve(t0_dir, tmp_path_factory, **{"training.max_adapters": 1000})


@pytest.fixture(scope="session")
def t0_address(t0_server: RunningServer) -> str:
    return t0_server.address


@pytest.fixture(scope="session")
def t0_state_dir(t0_server: RunningServer) -> Path:
    return t0_server.state_dir


@pytest.fixture(scope="session")
def t0_channel(t0_address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(t0_address) as channel:
        yield channel


def _service(server: RunningServer) -> Iterator[ot.ServiceClient]:
    service = ot.ServiceClient(base_url=server.address)
    yield service
    service.close().result()


@pytest.fixture(scope="session")
def t0_service(t0_server: RunningServer) -> Iterator[ot.ServiceClient]:
    yield from _service(t0_server)


@pytest.fixture(scope="session")
def bigram_service(bigram_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ot.ServiceClient]:
    for server in _serve(bigram_dir, tmp_path_factory):
        yield from _service(server)


@pytest.fixture(scope="session")
def chain_service(chain_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ot.ServiceClient]:
    for server in _serve(chain_dir, tmp_path_factory):
        yield from _service(server)


@pytest.fixture(scope="session")
def t0_limited_service(t0_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ot.ServiceClient]:
    """Two training adapters at most."""
    for server in _serve(t0_dir, tmp_path_factory, **{"training.max_adapters": 2}):
        yield from _service(server)


@pytest.fixture(scope="session")
def t0_small_context_service(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ot.ServiceClient]:
    """Context of 64 tokens, never stops by itself."""
    from opentinker_server.models.testing import build_t0

    for server in _serve(build_t0(cache_dir / "t0-ctx64", context=64), tmp_path_factory):
        yield from _service(server)
