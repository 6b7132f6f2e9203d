"""Checkpoints resume exactly, snapshots hold weights only, and damaged or foreign files are refused whole."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from opentinker_server.models.lora import LoraWeights
from opentinker_server.models.peft_adapter import LoraSettings
from opentinker_server.training.errors import TrainingError
from opentinker_server.training.optimizer import AdamSettings
from opentinker_server.training.state_files import (
    MANIFEST_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    content_hash,
    read_weights,
)

LEARN = AdamSettings(learning_rate=1e-2, beta1=0.9, beta2=0.95)
LORA = LoraSettings(rank=4, seed=7)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def data(make_datum) -> list:
    rng = np.random.default_rng(0)
    return [make_datum(rng, length) for length in (20, 9, 31)]


def train(rig, data, steps: int, adapter_id: str = "a") -> None:
    for _ in range(steps):
        rig.run(data, adapter_id=adapter_id)
        rig.trainer.optim_step(adapter_id, LEARN)


@pytest.fixture
def saved(rig, data, tmp_path) -> Path:
    """A checkpoint after five steps of adapter `a`, which stays live."""
    rig.create()
    train(rig, data, 5)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    rig.trainer.save_state("a", folder)
    return folder


def test_resuming_with_the_optimizer_equals_never_having_stopped(rig, make_rig, t0, data, saved) -> None:
    resumed, cold = (make_rig(t0, max_tokens_per_micro_batch=64, head_chunk_rows=16) for _ in range(2))
    resumed.trainer.create_adapter("a", LORA, directory=saved, with_optimizer=True)
    cold.trainer.create_adapter("a", LORA, directory=saved, with_optimizer=False)
    assert (resumed.trainer.step("a"), cold.trainer.step("a")) == (5, 0)
    for one in (rig, resumed, cold):
        train(one, data, 1)
    assert equal(rig.weights(), resumed.weights())
    lp = [one.logprobs(data[0]) for one in (rig, resumed, cold)]
    np.testing.assert_array_equal(lp[0], lp[1])
    assert np.abs(lp[0] - lp[2]).max() > 1e-4


def test_loading_into_a_live_adapter_rewinds_it_and_drops_its_gradient(rig, data, saved) -> None:
    at_save = rig.weights()
    train(rig, data, 1)
    expected = rig.weights()
    rig.run(data[:1])
    rig.trainer.load_state("a", saved, with_optimizer=True)
    assert equal(rig.weights(), at_save) and rig.trainer.step("a") == 5
    train(rig, data, 1)
    assert equal(rig.weights(), expected)
    rig.trainer.load_state("a", saved, with_optimizer=False)
    assert equal(rig.weights(), at_save) and rig.trainer.step("a") == 0
    assert rig.trainer.optim_step("a", LEARN)["grad_norm"] == 0.0
    assert equal(rig.weights(), at_save)


def test_saving_changes_nothing_and_reports_what_was_written(rig, data, saved, tmp_path) -> None:
    before = rig.weights()
    rig.run(data)
    (tmp_path / "again").mkdir()
    info = rig.trainer.save_state("a", tmp_path / "again")
    assert equal(before, rig.weights()) and info.step == 5
    assert info.size_bytes == sum(path.stat().st_size for path in (tmp_path / "again").iterdir())
    names = {path.name for path in saved.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", OPTIMIZER_FILE, STATE_FILE, MANIFEST_FILE}
    assert all((saved / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)
    assert rig.trainer.optim_step("a", LEARN)["grad_norm"] > 0


FILES = ["adapter_config.json", "adapter_model.safetensors", OPTIMIZER_FILE, STATE_FILE]


def assert_refused(rig, folder: Path, data, *, reason: str, field: str, lora: LoraSettings = LORA) -> str:
    """Loading fails naming `field`, live or new, and changes neither weights nor gradient."""
    rig.run(data)
    before = rig.weights()
    with pytest.raises(TrainingError) as error:
        rig.trainer.load_state("a", folder, with_optimizer=True)
    assert (error.value.reason, error.value.field) == (reason, field)
    assert field in str(error.value) or reason == "WRONG_KIND"
    with pytest.raises(TrainingError):
        rig.trainer.create_adapter("new", lora, directory=folder, with_optimizer=True)
    with pytest.raises(TrainingError, match="No live adapter new"):
        rig.trainer.step("new")
    assert equal(before, rig.weights())
    assert rig.trainer.optim_step("a", LEARN)["grad_norm"] > 0
    return str(error.value)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_file_is_refused_by_name(rig, data, saved, name: str, damage: str) -> None:
    path = saved / name
    content = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(content[:-1])
    elif damage == "flip":
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    else:
        path.unlink()
    assert_refused(rig, saved, data, reason="CORRUPT_DATA", field=name)


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"files": {"../../x": {"sha256": "", "size_bytes": 1}}}'])
def test_a_bad_manifest_is_refused(rig, data, saved, content: bytes | None) -> None:
    path = saved / MANIFEST_FILE
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert_refused(rig, saved, data, reason="CORRUPT_DATA", field=MANIFEST_FILE)


def reseal(folder: Path) -> None:
    """Gives the manifest the hashes of the files as they are, as someone who edits a checkpoint would."""
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))


@pytest.mark.parametrize("file", ["adapter_model.safetensors", OPTIMIZER_FILE])
@pytest.mark.parametrize("change", ["missing", "unexpected", "shape", "dtype"])
def test_every_tensor_is_checked_by_name_shape_and_dtype(rig, data, saved, file: str, change: str) -> None:
    tensors = load_file(saved / file)
    name = sorted(tensors)[3]
    if change == "missing":
        del tensors[name]
    elif change == "unexpected":
        name = "base_model.model.extra.lora_A.weight"
        tensors[name] = torch.zeros(4, 64)
    elif change == "shape":
        tensors[name] = tensors[name].T.contiguous()
    else:
        tensors[name] = tensors[name].to(torch.float16)
    save_file(tensors, saved / file)
    reseal(saved)
    assert_refused(rig, saved, data, reason="CORRUPT_DATA", field=name)


def test_a_snapshot_serves_weights_only(rig, data, saved, tmp_path) -> None:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    at_save = rig.weights()
    info = rig.trainer.write_snapshot("a", folder)
    assert info.step == 5 and not (folder / OPTIMIZER_FILE).exists()
    assert info.sha256 == content_hash(rig.trainer.snapshot("a"))
    train(rig, data, 1)
    message = assert_refused(rig, folder, data, reason="WRONG_KIND", field="kind")
    assert "snapshot" in message and "checkpoint" in message
    rig.trainer.load_state("a", folder, with_optimizer=False)
    assert equal(rig.weights(), at_save) and rig.trainer.step("a") == 0
    weights = read_weights(folder, base=rig.base, sha256=info.sha256)
    assert content_hash(weights) == info.sha256
    assert content_hash(read_weights(saved, base=rig.base)) == info.sha256
    with pytest.raises(TrainingError, match="sha256") as error:
        read_weights(folder, base=rig.base, sha256="0" * 64)
    assert error.value.reason == "CORRUPT_DATA"


def test_a_checkpoint_of_another_base_or_build_names_both(rig, data, saved, make_rig, load_base, tmp_path) -> None:
    other = make_rig(load_base("tiny-llama"))
    other.create()
    message = assert_refused(other, saved, data, reason="WRONG_KIND", field="base_model")
    assert rig.base.info.name in message and "tiny-llama" in message
    wide = make_rig(rig.base)
    wide.create(rank=8, train_mlp=False)
    build = LoraSettings(rank=8, train_mlp=False)
    message = assert_refused(wide, saved, data, reason="WRONG_KIND", field="rank", lora=build)
    assert all(text in message for text in ("rank 4", "rank 8", "train_mlp True", "train_mlp False"))
    reseeded = make_rig(rig.base)
    reseeded.create(seed=99)
    reseeded.trainer.load_state("a", saved, with_optimizer=True)
    assert equal(reseeded.weights(), rig.weights())


def test_a_missing_folder_is_not_found(rig, data, tmp_path) -> None:
    rig.create()
    assert_refused(rig, tmp_path / "nowhere", data, reason="NOT_FOUND", field="nowhere")


ON_A_SMALL_DISK = """
import sys
from pathlib import Path
import numpy as np
import torch
from opentinker_server.models.base import BaseModel
from opentinker_server.models.peft_adapter import LoraSettings
from opentinker_server.models.registry import resolve_model
from opentinker_server.training.datum import TrainDatum
from opentinker_server.training.errors import TrainingError
from opentinker_server.training.optimizer import AdamSettings
from opentinker_server.training.trainer import Trainer, TrainerConfig

torch.set_num_threads(1)
model, disk = sys.argv[1], Path(sys.argv[2])
base = BaseModel.load(resolve_model(model, cache_dir=disk), dtype=torch.float32, device="cpu")
trainer = Trainer(base, TrainerConfig())
trainer.create_adapter("a", LoraSettings(rank=4), directory=None, with_optimizer=False)
for _ in trainer.forward_backward(
    "a", [TrainDatum(tokens=np.arange(9), targets=np.arange(9))], "cross_entropy", {}, backward=True
):
    pass
folder, filler = disk / "save", disk / "filler"
folder.mkdir()
for save in (trainer.save_state, trainer.write_snapshot):
    for free_pages in range(48):
        filler.write_bytes(bytes(4096 * (48 - free_pages)))
        try:
            saved = save("a", folder)
            break
        except TrainingError as error:
            assert error.reason == "DISK_FULL" and not list(folder.iterdir())
            filler.unlink()
    print(free_pages * 4096 >= saved.size_bytes, free_pages)
    for path in [*folder.iterdir(), filler]:
        path.unlink()
print(trainer.optim_step("a", AdamSettings())["grad_norm"] > 0, trainer.step("a"))
"""


def test_a_disk_that_fills_up_at_any_point_is_told_and_nothing_is_left_behind(t0_dir, tmp_path) -> None:
    """On a disk of 48 pages of which ever more are free, until both kinds fit; then training goes on.

    The disk exists in a mount namespace of its own, where the system allows one.
    """
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("no right to make a mount namespace")
    mount = 'mount -t tmpfs -o size=192k tmpfs "$4" && exec "$1" -c "$2" "$3" "$4"'
    arguments = [sys.executable, ON_A_SMALL_DISK, str(t0_dir), str(tmp_path)]
    result = subprocess.run(["unshare", "-m", "sh", "-c", mount, "sh", *arguments], capture_output=True, text=True)
    checkpoint, snapshot, after = result.stdout.splitlines() or [result.stderr]
    assert checkpoint.startswith("True ") and int(checkpoint.split()[1]) > 30
    assert snapshot.startswith("True ") and int(snapshot.split()[1]) > 10
    assert after == "True 1"


def test_content_hash_is_of_scale_names_shapes_and_values() -> None:
    def weights(scale: float = 2.0, name: str = "m", value: float = 1.0, order: int = 1) -> LoraWeights:
        items = [(name, (torch.full((2, 4), value), torch.zeros(4, 2))), ("n", (torch.ones(1, 8), torch.ones(8, 1)))]
        return LoraWeights(scale=scale, factors=dict(items[::order]))

    same = content_hash(weights())
    assert same == content_hash(weights()) == content_hash(weights(order=-1))
    assert len(same) == 64 and same == same.lower()
    others = {content_hash(w) for w in (weights(scale=1.0), weights(name="k"), weights(value=1.0000001))}
    assert len(others | {same}) == 4
