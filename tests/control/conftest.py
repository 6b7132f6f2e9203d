"""Raw stubs on real servers: what the wire says, without the public client between."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.server import RunningServer

from opentinker_client.wire.v1 import (
    datum_pb2,
    error_pb2,
    operation_pb2,
    operation_pb2_grpc,
    policy_pb2,
    registry_pb2_grpc,
    sampling_pb2,
    sampling_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    tensor_pb2,
    training_pb2,
    training_pb2_grpc,
)

BASE_MODEL = "t0"


def tensor(array: np.ndarray) -> tensor_pb2.Tensor:
    """float32 or int64, any shape."""
    dtype = {"f": tensor_pb2.DTYPE_FLOAT32, "i": tensor_pb2.DTYPE_INT64}[array.dtype.kind]
    return tensor_pb2.Tensor(data=array.tobytes(), dtype=dtype, shape=array.shape)


class RawClient:
    """One session on one channel; every method is one call of the wire."""

    def __init__(self, address: str):
        self.channel = grpc.insecure_channel(address)
        self.sessions = session_pb2_grpc.SessionServiceStub(self.channel)
        self.training = training_pb2_grpc.TrainingServiceStub(self.channel)
        self.operations = operation_pb2_grpc.OperationServiceStub(self.channel)
        self.sampling = sampling_pb2_grpc.SamplingServiceStub(self.channel)
        self.registry = registry_pb2_grpc.RegistryServiceStub(self.channel)
        request = session_pb2.CreateSessionRequest(client_key=self.key())
        self.session_id: str = self.sessions.CreateSession(request).session_id

    def beat(self) -> float:
        """Renews the lease; returns its seconds."""
        return self.sessions.Heartbeat(session_pb2.HeartbeatRequest(session_id=self.session_id)).lease_s

    @staticmethod
    def key() -> str:
        """A fresh client_key."""
        return uuid.uuid4().hex

    @staticmethod
    def datum(length: int = 5, seed: int = 0) -> datum_pb2.Datum:
        """Random tokens and targets, weights of one."""
        ids = np.random.default_rng(seed).integers(0, 256, length + 1)
        text = datum_pb2.TextChunk(tokens=ids[:-1].astype("<i4").tobytes())
        return datum_pb2.Datum(
            model_input=datum_pb2.ModelInput(chunks=[datum_pb2.Chunk(text=text)]),
            target_tokens=tensor(ids[1:].astype("<i8")),
            weights=tensor(np.ones(length, "<f4")),
        )

    @staticmethod
    def place(adapter_id: str, seq_id: int, abandoned: Sequence[int] = ()) -> training_pb2.Sequence:
        """A place in an adapter's order."""
        return training_pb2.Sequence(adapter_id=adapter_id, seq_id=seq_id, abandoned_seq_ids=abandoned)

    def ended(self, operation: operation_pb2.Operation, *, timeout_s: float = 60.0) -> operation_pb2.Operation:
        """The operation when it has ended."""
        request = operation_pb2.WaitOperationRequest(op_id=operation.op_id, timeout_ms=int(timeout_s * 1e3))
        return self.operations.WaitOperation(request).operation

    def creation(self, **fields: object) -> training_pb2.CreateAdapterRequest:
        """A request for a small adapter with a fresh key."""
        values = {"base_model": BASE_MODEL, "lora": policy_pb2.LoraConfig(rank=4, seed=1), **fields}
        return training_pb2.CreateAdapterRequest(session_id=self.session_id, client_key=self.key(), **values)

    def adapter(self, **fields: object) -> str:
        """Id of a new live adapter."""
        operation = self.ended(self.training.CreateAdapter(self.creation(**fields)).operation)
        assert operation.state == operation_pb2.OPERATION_STATE_SUCCEEDED, operation.error
        return operation.adapter.adapter_id

    def stream(
        self,
        place: training_pb2.Sequence,
        data: Sequence[datum_pb2.Datum],
        *,
        loss_fn: str = "cross_entropy",
        forward_only: bool = False,
        num_datums: int | None = None,
    ) -> Iterator[training_pb2.ForwardBackwardRequest]:
        """The messages of a ForwardBackward, one datum a message."""
        header = training_pb2.ForwardBackwardHeader(
            sequence=place,
            loss_fn=loss_fn,
            forward_only=forward_only,
            num_datums=len(data) if num_datums is None else num_datums,
        )
        yield training_pb2.ForwardBackwardRequest(header=header)
        for datum in data:
            yield training_pb2.ForwardBackwardRequest(batch=training_pb2.DatumBatch(data=[datum]))

    def forward_backward(
        self, place: training_pb2.Sequence, data: Sequence[datum_pb2.Datum], **options: object
    ) -> operation_pb2.Operation:
        """Acknowledged, not waited for."""
        return self.training.ForwardBackward(self.stream(place, data, **options)).operation

    def optim_step(self, place: training_pb2.Sequence, learning_rate: float = 1e-3) -> operation_pb2.Operation:
        """Acknowledged, not waited for."""
        adam = training_pb2.AdamParams(learning_rate=learning_rate)
        return self.training.OptimStep(training_pb2.OptimStepRequest(sequence=place, adam=adam)).operation

    def save(self, place: training_pb2.Sequence, name: str, **fields: object) -> operation_pb2.Operation:
        """Acknowledged, not waited for."""
        request = training_pb2.SaveCheckpointRequest(sequence=place, name=name, **fields)
        return self.training.SaveCheckpoint(request).operation

    def publish(self, place: training_pb2.Sequence, name: str = "", **fields: object) -> operation_pb2.Operation:
        """Acknowledged, not waited for."""
        request = training_pb2.PublishSnapshotRequest(sequence=place, name=name, **fields)
        return self.training.PublishSnapshot(request).operation

    def sampler(self, **target: object) -> sampling_pb2.Sampler:
        """Bound to `uri`, `policy` or `base_model`."""
        request = sampling_pb2.CreateSamplerRequest(session_id=self.session_id, client_key=self.key(), **target)
        return self.sampling.CreateSampler(request).sampler

    def sample(self, sampler_id: str, *, max_tokens: int = 8, seed: int = 3) -> list[int]:
        """Token ids of one sample after a fixed prompt."""
        return np.frombuffer(
            self.sampling.Sample(self.sample_request(sampler_id, max_tokens=max_tokens, seed=seed)).sequences[0].tokens,
            "<i4",
        ).tolist()

    @staticmethod
    def sample_request(sampler_id: str, *, max_tokens: int = 8, seed: int = 3) -> sampling_pb2.SampleRequest:
        """One sample after a fixed prompt, never stopped by a rule."""
        text = datum_pb2.TextChunk(tokens=np.array([1, 2, 3], "<i4").tobytes())
        return sampling_pb2.SampleRequest(
            sampler_id=sampler_id,
            prompt=datum_pb2.ModelInput(chunks=[datum_pb2.Chunk(text=text)]),
            num_samples=1,
            params=sampling_pb2.SamplingParams(
                max_tokens=max_tokens, seed=seed, stop_token_ids=sampling_pb2.StopTokenIds()
            ),
        )

    def close(self) -> None:
        """Close the channel; the session is left to its lease."""
        self.channel.close()


class Refusal:
    """What a failed call said. Filled when the block of `refused` ends."""

    code: grpc.StatusCode
    info: error_pb2.ErrorInfo
    trailing: dict[str, str | bytes]


@contextlib.contextmanager
def refused(reason: str) -> Iterator[Refusal]:
    """The block must fail with that ErrorReason."""
    refusal = Refusal()
    try:
        yield refusal
    except grpc.RpcError as error:
        refusal.code = error.code()
        refusal.trailing = dict(error.trailing_metadata() or ())
        assert "grpc-status-details-bin" in refusal.trailing, f"{error.code()} {error.details()} without details"
        status = error_pb2.ErrorStatus.FromString(refusal.trailing["grpc-status-details-bin"])
        refusal.info = error_pb2.ErrorInfo()
        assert status.details[0].Unpack(refusal.info)
        assert error_pb2.ErrorReason.Name(refusal.info.reason) == f"ERROR_REASON_{reason}", refusal.info
        assert status.code == refusal.code.value[0] and refusal.info.request_id
    else:
        raise AssertionError(f"not refused; expected {reason}")


def worker_pids() -> set[int]:
    """Device workers that this process has started and that run."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == os.getpid() and b"opentinker_server.workers.main" in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
    return found


@pytest.fixture(name="refused", scope="session")
def refused_fixture() -> Callable[[str], contextlib.AbstractContextManager[Refusal]]:
    return refused


@pytest.fixture(name="worker_pids", scope="session")
def worker_pids_fixture() -> Callable[[], set[int]]:
    return worker_pids


@pytest.fixture
def connect() -> Iterator[Callable[[str], RawClient]]:
    """Opens sessions; channels are closed at the end."""
    clients: list[RawClient] = []

    def connect(address: str) -> RawClient:
        clients.append(RawClient(address))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture(scope="session")
def control_server(t0_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Shared by the tests that do it no harm; gives a missing sequence id two seconds."""
    settings = {"scheduler.gap_timeout_s": 2.0, "training.max_adapters": 100}
    with RunningServer(t0_dir, tmp_path_factory.mktemp("control") / "state", **settings) as server:
        yield server


@pytest.fixture
def raw(control_server: RunningServer, connect: Callable[[str], RawClient]) -> RawClient:
    """A session of its own on the shared server."""
    return connect(control_server.address)
