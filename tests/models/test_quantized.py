"""A base model in four bits is, to every part of the server, the model that its four bits stand for."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from opentinker_server.models import quantized
from opentinker_server.models.base import BaseModel
from opentinker_server.models.peft_adapter import LoraSettings, merge_into_base
from opentinker_server.models.registry import resolve_model
from opentinker_server.training.datum import TrainDatum
from opentinker_server.training.trainer import Trainer, TrainerConfig

pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def pair(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[BaseModel, BaseModel]:
    """The quantised model, and an ordinary one with the weights that it stands for."""
    source = resolve_model("tiny-llama", cache_dir=cache_dir)
    four_bits = BaseModel.load(source, dtype=torch.float32, device="cpu", quantization="nf4")
    dense = AutoModelForCausalLM.from_pretrained(source.directory, dtype=torch.float32)
    state = {
        key.replace(".base.", "."): value
        for key, value in quantized.dense_state(four_bits.module, torch.float32).items()
    }
    original = dense.state_dict()["model.layers.0.mlp.up_proj.weight"].clone()
    dense.load_state_dict(state)
    assert 1e-4 < (original - state["model.layers.0.mlp.up_proj.weight"]).abs().max() < 0.1
    directory = tmp_path_factory.mktemp("dense")
    dense.save_pretrained(directory)
    for file in source.directory.glob("tokenizer*"):
        (directory / file.name).write_bytes(file.read_bytes())
    return four_bits, BaseModel.load(
        resolve_model(str(directory), cache_dir=cache_dir), dtype=torch.float32, device="cpu"
    )


def test_it_takes_four_bits(pair) -> None:
    weight = pair[0].module.model.layers[0].mlp.up_proj.base.weight
    assert weight.dtype == torch.uint8
    assert weight.nbytes * 8 == pair[1].module.model.layers[0].mlp.up_proj.base.weight.nbytes


def test_training_on_it_gives_the_numbers_of_what_it_stands_for(pair) -> None:
    rng = np.random.default_rng(0)
    data = [TrainDatum(tokens=rng.integers(0, 64, n), targets=rng.integers(0, 64, n)) for n in (9, 30)]
    results = []
    for base in pair:
        trainer = Trainer(base, TrainerConfig())
        trainer.create_adapter("a", LoraSettings(rank=4, seed=1), directory=None, with_optimizer=False)
        call = trainer.begin("a", data, "cross_entropy", {}, backward=True)
        trainer.run([call])
        gradient_P = call.gradient_P
        results.append((trainer.finish(call).logprobs, gradient_P))
    (ours, ours_P), (theirs, theirs_P) = results
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    torch.testing.assert_close(ours_P, theirs_P, atol=1e-4, rtol=1e-4)


def test_the_merged_export_is_an_ordinary_model(pair, tmp_path) -> None:
    four_bits, dense = pair
    trainer = Trainer(four_bits, TrainerConfig())
    trainer.create_adapter("a", LoraSettings(rank=4, seed=1), directory=None, with_optimizer=False)
    weights = trainer.snapshot("a")
    for _, b_OR in weights.factors.values():
        b_OR.normal_(std=0.1)
    merge_into_base(tmp_path / "four", four_bits, weights)
    merge_into_base(tmp_path / "dense", dense, weights)
    tokens = torch.arange(12)[None]
    logits = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)(tokens).logits
        for name in ("four", "dense")
    ]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


def test_without_the_library_the_error_says_what_to_install(monkeypatch, cache_dir) -> None:
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'opentinker\[quantized\]'"):
        BaseModel.load(
            resolve_model("tiny-llama", cache_dir=cache_dir), dtype=torch.float32, device="cpu", quantization="nf4"
        )
