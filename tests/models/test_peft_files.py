"""Adapters as PEFT makes, names, writes and reads them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from opentinker_server.models.attention import PackedCausalAttention
from opentinker_server.models.base import BaseModel
from opentinker_server.models.lora import LoraRows, LoraWeights
from opentinker_server.models.peft_adapter import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    LoraSettings,
    expected_shapes,
    export_peft,
    init_adapter,
    make_peft_config,
    merge_into_base,
    read_peft,
    to_peft_tensors,
)

TINY_NAMES = [f"tiny-{arch}{tied}" for arch in ("llama", "qwen3", "gemma3", "mixtral") for tied in ("", "-tied")]
TOKENS = torch.arange(3, 40)
STOCK_LOGPROBS = """
import sys, torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
model, adapter, out = sys.argv[1:]
stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
if adapter:
    stock = PeftModel.from_pretrained(stock, adapter)
with torch.no_grad():
    save_file({"logprobs": stock(torch.arange(3, 40)[None]).logits[0].log_softmax(-1)}, out)
"""
"""Runs in a process that knows only transformers and PEFT."""


def live_logprobs(base: BaseModel, weights: LoraWeights) -> Tensor:
    rows = LoraRows.from_segments([(0, len(TOKENS), weights)])
    attention = PackedCausalAttention([(0, len(TOKENS))])
    with torch.no_grad():
        hidden_ND = base.hidden_states(TOKENS, torch.arange(len(TOKENS)), attention=attention, lora=rows)
        return base.logits(hidden_ND, lora=rows).log_softmax(-1)


def stock_logprobs(model: Path, adapter: Path | None, scratch: Path) -> Tensor:
    out = scratch / "logprobs.safetensors"
    subprocess.run([sys.executable, "-c", STOCK_LOGPROBS, str(model), str(adapter or ""), str(out)], check=True)
    return load_file(out)["logprobs"]


def trained(base: BaseModel, lora: LoraSettings) -> LoraWeights:
    """As after training: PEFT's initial A, and a B that is no longer zero."""
    generator = torch.Generator().manual_seed(11)
    factors = {
        name: (a_RI, torch.randn(b_OR.shape, generator=generator) * 0.05)
        for name, (a_RI, b_OR) in init_adapter(lora, base).items()
    }
    return LoraWeights(scale=lora.scale, factors=factors)


def test_seed_determines_the_weights_whatever_ran_before(t0_base):
    lora = LoraSettings(rank=4, seed=7)
    first = to_peft_tensors(init_adapter(lora, t0_base))
    torch.manual_seed(123)
    state = torch.get_rng_state()
    torch.rand(5)
    second = to_peft_tensors(init_adapter(lora, t0_base))
    torch.set_rng_state(state)
    init_adapter(lora, t0_base)
    assert torch.equal(torch.get_rng_state(), state), "the process's generator is left as it was"
    other = to_peft_tensors(init_adapter(replace(lora, seed=8), t0_base))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, other[name]) == name.endswith("lora_B.weight")


def test_initial_weights_follow_pefts_rule(t0_base):
    """A uniform in +-sqrt(6 / ((1 + 5) * in)) = +-1 / sqrt(in), B zero."""
    for a_RI, b_OR in init_adapter(LoraSettings(rank=16, seed=1), t0_base).values():
        bound = a_RI.shape[1] ** -0.5
        assert 0.97 * bound < a_RI.abs().max() <= bound
        assert a_RI.mean().abs() < 0.1 * bound
        assert not b_OR.any()


def test_options_choose_the_modules(t0_base, tmp_path):
    lora = LoraSettings(rank=4, seed=7, train_mlp=False, train_unembed=False)
    export_peft(tmp_path, lora, t0_base, init_adapter(lora, t0_base))
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    assert len(tensors) == 2 * 4 * 2
    assert all(".self_attn." in name for name in tensors)
    assert all(tensor.shape[0] == 4 for name, tensor in tensors.items() if "lora_A" in name)
    head = init_adapter(LoraSettings(rank=4, train_mlp=False, train_attn=False), t0_base)
    assert list(head) == ["lm_head"]


def test_nothing_to_adapt_is_refused(t0_base, load_base):
    with pytest.raises(ValueError, match="attn, mlp, unembed"):
        init_adapter(LoraSettings(rank=4, train_attn=False, train_mlp=False, train_unembed=False), t0_base)
    with pytest.raises(ValueError, match=r"tiny-mixtral offers attn, unembed.*asked for mlp"):
        init_adapter(LoraSettings(rank=4, train_attn=False, train_unembed=False), load_base("tiny-mixtral"))


@pytest.mark.parametrize("rank", [0, -3])
def test_a_rank_below_one_is_refused_with_the_limit(rank, t0_base):
    with pytest.raises(ValueError, match=f"rank is {rank}; it must be at least 1"):
        make_peft_config(LoraSettings(rank=rank), t0_base)


@pytest.mark.parametrize(
    ("lora", "scale"),
    [
        (LoraSettings(rank=64, alpha=16, use_rslora=True), 2.0),
        (LoraSettings(rank=8, alpha=4), 0.5),
        (LoraSettings(rank=16), 2.0),
    ],
)
def test_scale_survives_export_and_stock_peft(lora, scale, t0_base, t0_dir, tmp_path):
    assert lora.scale == scale
    weights = trained(t0_base, lora)
    export_peft(tmp_path, lora, t0_base, weights.factors)
    recorded = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert (recorded["r"], recorded["lora_alpha"], recorded["use_rslora"]) == (lora.rank, lora.alpha, lora.use_rslora)
    assert recorded["base_model_name_or_path"] == "t0"
    stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(t0_dir, dtype=torch.float32), tmp_path)
    layer = stock.base_model.model.get_submodule("model.layers.0.self_attn.q_proj")
    assert layer.scaling["default"] == scale
    with torch.no_grad():
        expected = stock(TOKENS[None]).logits[0].log_softmax(-1)
    torch.testing.assert_close(live_logprobs(t0_base, weights), expected, atol=1e-4, rtol=0)
    again = LoraWeights(scale=lora.scale, factors=read_peft(tmp_path, lora, t0_base))
    assert torch.equal(live_logprobs(t0_base, again), live_logprobs(t0_base, weights))


@pytest.mark.parametrize("name", TINY_NAMES)
def test_stock_peft_finds_every_key_and_gives_the_live_logprobs(name, load_base, tmp_path):
    base = load_base(name)
    lora = LoraSettings(rank=4, seed=3)
    weights = trained(base, lora)
    export_peft(tmp_path, lora, base, weights.factors)
    stock = AutoModelForCausalLM.from_pretrained(base.info.tokenizer_directory, dtype=torch.float32)
    model = PeftModel.from_pretrained(stock, tmp_path)
    result = model.load_adapter(tmp_path, adapter_name="again")
    assert not result.unexpected_keys
    assert not [key for key in result.missing_keys if "lora" in key]
    with torch.no_grad():
        expected = model(TOKENS[None]).logits[0].log_softmax(-1)
    torch.testing.assert_close(live_logprobs(base, weights), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_merged_model_gives_the_live_logprobs(name, load_base, tmp_path):
    base = load_base(name)
    weights = trained(base, LoraSettings(rank=4, seed=3))
    merge_into_base(tmp_path, base, weights)
    merged, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        logprobs = merged(TOKENS[None]).logits[0].log_softmax(-1)
    torch.testing.assert_close(logprobs, live_logprobs(base, weights), atol=1e-4, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == (
        AutoTokenizer.from_pretrained(base.info.tokenizer_directory).chat_template
    )


def test_adapted_tied_head_exports_load_in_a_new_process(load_base, tmp_path):
    base = load_base("tiny-llama-tied")
    lora = LoraSettings(rank=4, seed=3)
    weights = trained(base, lora)
    assert "lm_head" in weights.factors
    live = live_logprobs(base, weights)
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    adapter.mkdir()
    export_peft(adapter, lora, base, weights.factors)
    merge_into_base(merged, base, weights)
    model = base.info.tokenizer_directory
    torch.testing.assert_close(stock_logprobs(model, adapter, tmp_path), live, atol=1e-4, rtol=0)
    torch.testing.assert_close(stock_logprobs(merged, None, tmp_path), live, atol=1e-4, rtol=0)
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is False
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    assert torch.equal(after.get_input_embeddings().weight, before.get_input_embeddings().weight)
    assert not torch.equal(after.get_output_embeddings().weight, after.get_input_embeddings().weight)
    assert torch.equal(base.module.get_input_embeddings().weight, before.get_input_embeddings().weight)


def test_merging_leaves_a_tied_head_tied_when_it_was_not_adapted(load_base, tmp_path):
    base = load_base("tiny-llama-tied")
    merge_into_base(tmp_path, base, trained(base, LoraSettings(rank=4, train_unembed=False)))
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True


class TestReading:
    lora = LoraSettings(rank=4, seed=3)

    @pytest.fixture
    def exported(self, t0_base, tmp_path) -> Path:
        export_peft(tmp_path, self.lora, t0_base, init_adapter(self.lora, t0_base))
        return tmp_path

    def test_a_round_trip_is_exact(self, exported, t0_base):
        before = to_peft_tensors(init_adapter(self.lora, t0_base))
        after = to_peft_tensors(read_peft(exported, self.lora, t0_base))
        assert before.keys() == after.keys() == expected_shapes(self.lora, t0_base).keys()
        assert all(torch.equal(before[name], after[name]) for name in before)

    @pytest.mark.parametrize("fault", ["missing", "unexpected", "shape"])
    def test_a_wrong_tensor_is_refused_by_name(self, fault, exported, t0_base):
        tensors = load_file(exported / WEIGHTS_FILE)
        name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
        if fault == "missing":
            del tensors[name]
        elif fault == "unexpected":
            name = "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"
            tensors[name] = torch.zeros(4, 64)
        else:
            tensors[name] = torch.zeros(5, 64)
        save_file(tensors, exported / WEIGHTS_FILE)
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            read_peft(exported, self.lora, t0_base)

    @pytest.mark.parametrize(
        ("key", "value"),
        [("lora_alpha", 8), ("use_rslora", True), ("alpha_pattern", {"q_proj": 9}), ("use_dora", True)],
    )
    def test_a_setting_that_changes_the_numbers_is_refused(self, key, value, exported, t0_base):
        recorded = json.loads((exported / CONFIG_FILE).read_text())
        (exported / CONFIG_FILE).write_text(json.dumps({**recorded, key: value}))
        with pytest.raises(ValueError, match=key):
            read_peft(exported, self.lora, t0_base)

    def test_a_torn_file_is_refused(self, exported, t0_base):
        data = (exported / WEIGHTS_FILE).read_bytes()
        (exported / WEIGHTS_FILE).write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match=WEIGHTS_FILE):
            read_peft(exported, self.lora, t0_base)

    def test_a_missing_file_is_refused_by_name(self, exported, t0_base):
        (exported / WEIGHTS_FILE).unlink()
        with pytest.raises(ValueError, match=WEIGHTS_FILE):
            read_peft(exported, self.lora, t0_base)

    def test_a_non_finite_value_is_refused_by_name(self, exported, t0_base):
        tensors = load_file(exported / WEIGHTS_FILE)
        tensors["base_model.model.lm_head.lora_B.weight"][3, 1] = float("nan")
        save_file(tensors, exported / WEIGHTS_FILE)
        with pytest.raises(ValueError, match=r"lm_head\.lora_B"):
            read_peft(exported, self.lora, t0_base)
