"""Rows of several adapters in one pass give what stock PEFT gives for each adapter alone, gradients included."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from opentinker_server.models.attention import PackedCausalAttention
from opentinker_server.models.base import BaseModel
from opentinker_server.models.lora import LoraRows, LoraWeights
from opentinker_server.models.registry import ModelSource

TINY_NAMES = ["tiny-llama", "tiny-qwen3", "tiny-gemma3", "tiny-mixtral", "tiny-llama-tied", "tiny-gemma3-tied"]
LENGTHS = [12, 30, 7, 30, 9]


def packed_logits(base: BaseModel, sequences: list[Tensor], adapters: list[LoraWeights | None]) -> list[Tensor]:
    """Logits [T, V] of each sequence under its adapter, all in one pass."""
    ends = torch.tensor([len(sequence) for sequence in sequences]).cumsum(0).tolist()
    segments = [(end - len(sequence), end) for sequence, end in zip(sequences, ends, strict=True)]
    lora = LoraRows.from_segments(
        [(start, end, weights) for (start, end), weights in zip(segments, adapters, strict=True)]
    )
    positions_N = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    hidden_ND = base.hidden_states(
        torch.cat(sequences), positions_N, attention=PackedCausalAttention(segments), lora=lora
    )
    logits_NV = base.logits(hidden_ND, lora=lora)
    return [logits_NV[start:end] for start, end in segments]


def stock_peft(base: BaseModel, weights: LoraWeights) -> torch.nn.Module:
    """Plain transformers model with the adapter loaded through plain PEFT, trainable."""
    stock = AutoModelForCausalLM.from_pretrained(
        base.info.tokenizer_directory, dtype=torch.float32, attn_implementation="eager"
    )
    rank = next(iter(weights.factors.values()))[0].shape[0]
    config = LoraConfig(r=rank, lora_alpha=weights.scale * rank, target_modules=list(weights.factors), lora_dropout=0.0)
    model = get_peft_model(stock, config).eval()
    with torch.no_grad():
        for name, (a_RI, b_OR) in weights.factors.items():
            layer = model.base_model.model.get_submodule(name)
            layer.lora_A["default"].weight.copy_(a_RI)
            layer.lora_B["default"].weight.copy_(b_OR)
    return model


@pytest.fixture(scope="module", params=TINY_NAMES)
def base(request, load_base) -> BaseModel:
    return load_base(request.param)


def test_mixed_adapters_equal_stock_peft_with_gradients(base, random_adapter):
    first = random_adapter(base, rank=4, seed=1, scale=2.0, requires_grad=True)
    second = random_adapter(
        base, rank=7, seed=2, scale=0.25, requires_grad=True, modules=lambda name: "q_proj" in name or "head" in name
    )
    owners = [first, None, second, first, second]
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(0, base.info.vocab_size, (length,), generator=generator) for length in LENGTHS]
    directions = [
        torch.randn(length, base.info.vocab_size, generator=generator) / (length * base.info.vocab_size)
        for length in LENGTHS
    ]
    logits = packed_logits(base, sequences, owners)
    sum((values * direction).sum() for values, direction in zip(logits, directions, strict=True)).backward()

    for weights in (first, second):
        model = stock_peft(base, weights)
        for index in [index for index, owner in enumerate(owners) if owner is weights]:
            expected = model(sequences[index][None]).logits[0]
            torch.testing.assert_close(logits[index], expected, atol=1e-5, rtol=1e-5)
            (expected * directions[index]).sum().backward()
        for name, factors in weights.factors.items():
            layer = model.base_model.model.get_submodule(name)
            for factor, half in zip(factors, (layer.lora_A, layer.lora_B), strict=True):
                expected_grad = half["default"].weight.grad
                assert expected_grad.abs().max() > 0
                torch.testing.assert_close(factor.grad, expected_grad, atol=1e-5, rtol=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(
        base.info.tokenizer_directory, dtype=torch.float32, attn_implementation="eager"
    )
    torch.testing.assert_close(logits[1], plain(sequences[1][None]).logits[0], atol=1e-5, rtol=1e-5)


def test_base_is_frozen_and_unchanged_by_a_backward_pass(base, random_adapter):
    before = {name: tensor.clone() for name, tensor in base.module.state_dict().items()}
    weights = random_adapter(base, rank=2, seed=0, requires_grad=True)
    packed_logits(base, [torch.arange(9)], [weights])[0].sum().backward()
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in base.module.parameters())
    for name, tensor in base.module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_row_slots_equal_segments(base, random_adapter):
    adapters = [random_adapter(base, rank=rank, seed=rank) for rank in (1, 3)]
    slots_N = torch.tensor([0, 0, -1, 1, 1, 1, -1, 0])
    segments = [(0, 2, adapters[0]), (2, 3, None), (3, 6, adapters[1]), (7, 8, adapters[0])]
    hidden_ND = torch.randn(8, base.info.hidden_size, generator=torch.Generator().manual_seed(5))
    by_segments = base.logits(hidden_ND, lora=LoraRows.from_segments(segments))
    by_slots = base.logits(hidden_ND, lora=LoraRows.from_row_slots(slots_N, adapters))
    torch.testing.assert_close(by_slots, by_segments, atol=1e-6, rtol=0)
    assert torch.equal(by_slots[[2, 6]], base.logits(hidden_ND, lora=None)[[2, 6]])


def test_row_slots_have_the_gradients_of_segments(load_base, random_adapter):
    base = load_base("tiny-llama")
    hidden_ND = torch.randn(6, base.info.hidden_size, generator=torch.Generator().manual_seed(5))
    grads = []
    for as_slots in (True, False):
        adapters = [random_adapter(base, rank=3, seed=seed, requires_grad=True) for seed in (1, 2)]
        if as_slots:
            rows = LoraRows.from_row_slots(torch.tensor([1, 1, -1, 0, 0, 1]), adapters)
        else:
            rows = LoraRows.from_segments([(0, 2, adapters[1]), (3, 5, adapters[0]), (5, 6, adapters[1])])
        base.logits(hidden_ND, lora=rows).square().sum().backward()
        grads.append([factor.grad for weights in adapters for factor in weights.factors["lm_head"]])
    for slot_grad, segment_grad in zip(*grads, strict=True):
        torch.testing.assert_close(slot_grad, segment_grad, atol=1e-5, rtol=1e-5)


def test_rows_of_one_adapter_are_one_group_wherever_they_lie():
    one, two = LoraWeights(scale=1.0, factors={}), LoraWeights(scale=1.0, factors={})
    rows = LoraRows.from_segments([(4, 6, one), (0, 2, one), (2, 3, two), (3, 3, two), (7, 8, None)])
    assert [weights is one for weights in rows.adapters] == [True, False]
    assert rows.slot_of_row == (0, 0, 1, -1, 0, 0, -1, -1)
    groups = rows.groups(9, torch.device("cpu"))
    assert (groups.counts, groups.row_order_P.tolist()) == ((4, 1), [0, 1, 4, 5, 2])


def test_overlapping_segments_are_refused():
    weights = LoraWeights(scale=1.0, factors={})
    with pytest.raises(ValueError, match=r"\(2, 5\) overlaps"):
        LoraRows.from_segments([(0, 3, weights), (2, 5, None)])


def test_bfloat16_base_keeps_float32_masters(load_base, random_adapter):
    source = ModelSource(name="tiny-llama", directory=load_base("tiny-llama").info.tokenizer_directory)
    base = BaseModel.load(source, dtype=torch.bfloat16, device="cpu")
    weights = random_adapter(base, rank=4, seed=1, requires_grad=True)
    tokens = [torch.arange(11)]
    logits = packed_logits(base, tokens, [weights])[0]
    assert logits.dtype == torch.bfloat16
    logits.float().sum().backward()
    for factors in weights.factors.values():
        assert all(factor.grad.dtype == torch.float32 and factor.grad.isfinite().all() for factor in factors)
    expected = packed_logits(load_base("tiny-llama"), tokens, [weights])[0]
    assert (logits.float() - expected).abs().max() < 0.05 * expected.abs().max()
    cast = packed_logits(base, tokens, [weights.to(torch.device("cpu"), torch.bfloat16)])[0]
    assert torch.equal(cast, logits)
