"""CASES area M: names never become paths, nothing is unpickled, loopback unless told otherwise."""

import io
import os
import pickle
import socket
from pathlib import Path

import numpy as np
import pytest
from support.calls import ce

import opentinker_client as ot
from opentinker_client.wire.v1 import datum_pb2, tensor_pb2, training_pb2, training_pb2_grpc

EVIL = [
    "../../x",
    "/tmp/x",
    "a/../../b",
    "..",
    ".",
    "x" * 300,
    "nul\0byte",
    "%2e%2e%2fx",
    "back\\slash",
    "a/b",
    "-rf",
    " spaced ",
    "new\nline",
]


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.name.startswith("opentinker.db")}


@pytest.mark.parametrize("name", EVIL)
def test_se1_evil_names_are_refused_and_touch_nothing(
    t0_service: ot.ServiceClient, t0_state_dir: Path, name: str
) -> None:
    trainer = t0_service.create_lora_training_client("t0", rank=2, seed=1).result()
    registry = t0_service.create_registry_client()
    before, around = tree(t0_state_dir), set(os.listdir(t0_state_dir.parent))
    calls = [
        lambda: trainer.save_state(name),
        lambda: trainer.save_weights_for_sampler(name),
        lambda: trainer.load_state(f"opentinker://{trainer.model_id}/checkpoints/{name}"),
        lambda: t0_service.create_sampling_client(model_path=f"opentinker://{trainer.model_id}/snapshots/{name}"),
        lambda: t0_service.create_sampling_client(model_path=name),
        lambda: t0_service.create_sampling_client(model_path=f"opentinker://{name}/snapshots/1"),
        lambda: registry.delete_checkpoint_from_tinker_path(f"opentinker://{trainer.model_id}/checkpoints/{name}"),
        lambda: registry.download(f"opentinker://{name}/checkpoints/x", t0_state_dir.parent / "never"),
        lambda: t0_service.attach(name),
    ]
    for number, call in enumerate(calls):
        with pytest.raises((ot.BadRequestError, ot.NotFoundError, ValueError)):
            call().result()
            pytest.fail(f"call {number} accepted {name!r}")
    assert tree(t0_state_dir) == before
    assert set(os.listdir(t0_state_dir.parent)) - {"never"} == around - {"never"}


def test_se1_an_empty_checkpoint_name_is_refused(t0_service: ot.ServiceClient) -> None:
    trainer = t0_service.create_lora_training_client("t0", rank=2, seed=1).result()
    with pytest.raises((ot.BadRequestError, ValueError), match="name"):
        trainer.save_state("").result()


class Payload:
    """Leaves a marker when unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (open, (str(self.marker), "w"))


def test_se3_pickles_stay_bytes(t0_service: ot.ServiceClient, t0_channel, tmp_path: Path) -> None:
    marker = tmp_path / "unpickled"
    blob = pickle.dumps(Payload(marker))
    pickle.loads(pickle.dumps(Payload(tmp_path / "works"))).close()
    assert (tmp_path / "works").exists()
    trainer = t0_service.create_lora_training_client("t0", rank=2, seed=1).result()
    with pytest.raises((TypeError, ValueError)):
        ot.TensorData.from_numpy(np.array([Payload(marker)], dtype=object))
    buffer = io.BytesIO()
    np.save(buffer, np.array([Payload(marker)], dtype=object), allow_pickle=True)
    stub = training_pb2_grpc.TrainingServiceStub(t0_channel)
    for number, data in enumerate((blob, buffer.getvalue())):
        tensor = tensor_pb2.Tensor(data=data, dtype=tensor_pb2.DTYPE_FLOAT32, shape=[3])
        item = datum_pb2.Datum(target_tokens=tensor, weights=tensor)
        item.model_input.chunks.add().text.tokens = np.array([1, 2, 3], "<i4").tobytes()
        header = training_pb2.ForwardBackwardHeader(
            sequence=training_pb2.Sequence(adapter_id=trainer.model_id, seq_id=number + 1),
            loss_fn="cross_entropy",
            num_datums=1,
        )
        messages = [
            training_pb2.ForwardBackwardRequest(header=header),
            training_pb2.ForwardBackwardRequest(batch=training_pb2.DatumBatch(data=[item])),
        ]
        with pytest.raises(Exception, match="INVALID_ARGUMENT"):
            stub.ForwardBackward(iter(messages))
    assert not marker.exists()


def test_se3_a_planted_pickle_file_is_refused(start_server, t0_dir: Path, tmp_path: Path) -> None:
    """Checkpoint files replaced on disk are refused by their hash before anything reads them."""
    marker = tmp_path / "unpickled"
    with start_server(t0_dir, state_dir=tmp_path / "state") as server:
        service = ot.ServiceClient(base_url=server.address)
        trainer = service.create_lora_training_client("t0", rank=2, seed=1).result()
        trainer.forward_backward([ce([1, 2, 3])], "cross_entropy")
        trainer.optim_step(ot.AdamParams()).result()
        path = trainer.save_state("one").result().path
        files = list((tmp_path / "state").rglob("*.safetensors"))
        assert len(files) >= 2
        for file in files:
            file.write_bytes(pickle.dumps(Payload(marker)))
        with pytest.raises(ot.APIError, match="safetensors"):
            service.create_training_client_from_state_with_optimizer(path).result()
        trainer.forward([ce([1, 2, 3])], "cross_entropy").result()
        service.close().result()
    assert not marker.exists()


def test_server_listens_on_loopback_only_by_default(t0_address: str) -> None:
    host, _, port = t0_address.rpartition(":")
    assert host in {"127.0.0.1", "localhost"}
    try:
        outside = socket.gethostbyname(socket.gethostname())
    except OSError:
        pytest.skip("this machine has no address of its own")
    if not outside.startswith("127."):
        with pytest.raises(OSError):
            socket.create_connection((outside, int(port)), timeout=2)
