"""A packed forward pass is the stock transformers forward pass of each segment."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
)

from opentinker_server.models.attention import PackedCausalAttention
from opentinker_server.models.base import BaseModel
from opentinker_server.models.registry import ModelSource

TINY_NAMES = [f"tiny-{arch}{tied}" for arch in ("llama", "qwen3", "gemma3", "mixtral") for tied in ("", "-tied")]
LENGTHS = [5, 40, 1, 40, 17]
"""Longer and shorter than gemma's window of 16; two of one length, which run as one batch."""
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def forward(base: BaseModel, sequences: list[Tensor]) -> tuple[Tensor, Tensor]:
    """hidden_ND and logits_NV of the sequences packed in order."""
    ends = torch.tensor([len(sequence) for sequence in sequences]).cumsum(0).tolist()
    segments = [(end - len(sequence), end) for sequence, end in zip(sequences, ends, strict=True)]
    positions_N = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    with torch.no_grad():
        hidden_ND = base.hidden_states(
            torch.cat(sequences), positions_N, attention=PackedCausalAttention(segments), lora=None
        )
        return hidden_ND, base.logits(hidden_ND, lora=None)


def random_sequences(lengths: list[int], vocab_size: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in lengths]


def assert_equals_stock(base: BaseModel, directory: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    sequences = random_sequences(LENGTHS, base.info.vocab_size)
    hidden_ND, logits_NV = forward(base, sequences)
    start = 0
    for sequence in sequences:
        rows = slice(start, start + len(sequence))
        with torch.no_grad():
            expected = stock(sequence[None], output_hidden_states=True)
        torch.testing.assert_close(hidden_ND[rows], expected.hidden_states[-1][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits_NV[rows], expected.logits[0], atol=1e-5, rtol=1e-5)
        start = rows.stop


def save_random(config: PreTrainedConfig, directory: Path) -> ModelSource:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return ModelSource(name="random", directory=directory)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_packed_segments_equal_the_stock_forward(name, load_base):
    base = load_base(name)
    assert base.info.tied_head == name.endswith("-tied")
    assert_equals_stock(base, base.info.tokenizer_directory)


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(
            **SMALL, sliding_window=16, attn_logit_softcapping=0.5, final_logit_softcapping=0.2, initializer_range=0.3
        ),
        Gemma3TextConfig(**SMALL, sliding_window=16, final_logit_softcapping=0.2, initializer_range=0.3),
        LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, initializer_range=0.3),
    ],
    ids=["gemma2: both softcaps", "gemma3: final softcap", "llama: biases"],
)
def test_softcaps_windows_and_biases_are_honoured(config, tmp_path):
    source = save_random(config, tmp_path)
    base = BaseModel.load(source, dtype=torch.float32, device="cpu")
    assert_equals_stock(base, tmp_path)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_a_segment_does_not_depend_on_what_is_packed_before_it(name, load_base):
    base = load_base(name)
    before, other, sequence = random_sequences([23, 23, 37], base.info.vocab_size)
    assert not torch.equal(before, other)
    alone = forward(base, [sequence])[1]
    torch.testing.assert_close(forward(base, [before, sequence])[1][23:], alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(forward(base, [other, sequence])[1][23:], alone, atol=1e-5, rtol=0)


def test_attention_matters_in_t0(t0_base):
    (sequence,) = random_sequences([20], 256)
    changed = sequence.clone()
    changed[0] = (changed[0] + 1) % 256
    difference = (forward(t0_base, [sequence])[1] - forward(t0_base, [changed])[1])[-1].abs().max()
    assert difference > 1e-3


def test_rows_outside_every_segment_get_zeros_and_disturb_no_other():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(9, heads, 4, generator=generator) for heads in (4, 2, 2))
    settings = {"scaling": 0.5, "sliding_window": None, "softcap": None}
    out = PackedCausalAttention([(6, 8), (1, 4)]).attend(0, query, key, value, **settings)
    assert out[[0, 4, 5, 8]].abs().max() == 0
    dense = PackedCausalAttention([(0, 3), (3, 5)]).attend(
        0, *(x[[1, 2, 3, 6, 7]] for x in (query, key, value)), **settings
    )
    torch.testing.assert_close(out[[1, 2, 3, 6, 7]], dense, atol=1e-6, rtol=0)


@pytest.mark.parametrize("segments", [[(0, 0)], [(3, 2)], [(0, 4), (3, 6)], [(-1, 2)]])
def test_empty_or_overlapping_segments_are_refused(segments):
    with pytest.raises(ValueError, match="Segment"):
        PackedCausalAttention(segments)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_attention_follows_its_formula(window, softcap):
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(7, heads, 4, generator=generator) for heads in (4, 2, 2))
    out = PackedCausalAttention([(0, 7)]).attend(
        0, query, key, value, scaling=0.3, sliding_window=window, softcap=softcap
    )
    for row in range(7):
        for head in range(4):
            first = 0 if window is None else max(0, row - window + 1)
            scores = key[first : row + 1, head // 2] @ query[row, head] * 0.3
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            expected = torch.softmax(scores, 0) @ value[first : row + 1, head // 2]
            torch.testing.assert_close(out[row, head], expected, atol=1e-6, rtol=1e-5)


def test_a_rotary_embedding_that_depends_on_the_batch_is_refused(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    source = save_random(LlamaConfig(**SMALL, rope_parameters=rope), tmp_path)
    with pytest.raises(ValueError, match="dynamic"):
        BaseModel.load(source, dtype=torch.float32, device="cpu")


def test_a_head_that_does_more_than_we_know_is_refused(tmp_path):
    sizes = {key: value for key, value in SMALL.items() if key != "head_dim"}
    source = save_random(CohereConfig(**sizes, logit_scale=0.25, initializer_range=0.3), tmp_path)
    with pytest.raises(ValueError, match="head of cohere"):
        BaseModel.load(source, dtype=torch.float32, device="cpu")


def test_layers_without_attention_are_refused(tmp_path):
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    source = save_random(config, tmp_path)
    with pytest.raises(ValueError, match="mamba"):
        BaseModel.load(source, dtype=torch.float32, device="cpu")


def test_info_describes_the_model(load_base):
    info = load_base("tiny-qwen3").info
    assert (info.arch, info.num_layers, info.hidden_size, info.head_dim) == ("qwen3", 2, 64, 16)
    assert (info.num_attention_heads, info.num_kv_heads, info.max_context_length) == (4, 2, 1024)
    assert info.eos_token_ids == (257,)
    assert info.adaptable == ("attn", "mlp", "unembed")
    assert load_base("tiny-mixtral").info.adaptable == ("attn", "unembed")


def test_bfloat16_stays_near_float32(load_base):
    base = load_base("tiny-llama")
    source = ModelSource(name="tiny-llama", directory=base.info.tokenizer_directory)
    half = BaseModel.load(source, dtype=torch.bfloat16, device="cpu")
    sequences = random_sequences(LENGTHS, base.info.vocab_size)
    logits_NV = forward(half, sequences)[1]
    assert logits_NV.dtype == torch.bfloat16
    expected = forward(base, sequences)[1]
    assert (logits_NV.float() - expected).abs().max() < 0.05 * expected.abs().max()
