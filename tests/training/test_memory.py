"""Recomputation changes memory and nothing else; what cannot fit is refused before it begins."""

import numpy as np
import pytest
import torch

from opentinker_server.training import memory
from opentinker_server.training.errors import TrainingError
from opentinker_server.training.memory import MemoryPlan, free_bytes, plan_memory

TINY = [f"tiny-{arch}" for arch in ("llama", "qwen3", "gemma3", "mixtral")]


@pytest.mark.parametrize("name", TINY)
def test_a_recomputed_backward_pass_gives_the_same_gradient(name, make_rig, load_base, make_datum) -> None:
    rng = np.random.default_rng(0)
    base = load_base(name)
    data = [make_datum(rng, length) for length in (33, 9, 33, 20)]
    kept, again = make_rig(base, recompute="never"), make_rig(base, recompute="always")
    for rig in (kept, again):
        rig.create()
        rig.run(data)
    assert torch.equal(kept.trainer._adapters["a"].gradient_P, again.trainer._adapters["a"].gradient_P), (
        "the same operations in the same order"
    )


def test_recomputation_keeps_a_fraction(t0) -> None:
    plan = plan_memory(t0, budget_bytes=2**30, head_chunk_rows=1)
    assert plan.row_bytes_recomputed < 0.8 * plan.row_bytes  # of two layers, one is always whole


@pytest.mark.parametrize("rows", [5, 100, 300])
def test_the_plan_is_no_less_than_what_autograd_keeps(t0, rows: int) -> None:
    plan = plan_memory(t0, budget_bytes=2**30, head_chunk_rows=1)
    lora = memory.LoraSettings(rank=16)
    factors = {
        name: (a.requires_grad_(), b.requires_grad_())
        for name, (a, b) in memory.init_adapter(lora, t0).items()
        if name != "lm_head"
    }
    weights = memory.LoraWeights(scale=lora.scale, factors=factors)
    fixed = 2**17  # rotary tables, indices
    assert memory._kept_bytes(t0, weights, rows, recompute=False) <= rows * plan.row_bytes + fixed


def test_a_datum_that_cannot_fit_is_refused_with_the_numbers(make_rig, t0, make_datum) -> None:
    rng = np.random.default_rng(1)
    row_bytes = plan_memory(t0, budget_bytes=2**30, head_chunk_rows=256).row_bytes
    head_bytes = plan_memory(t0, budget_bytes=2**30, head_chunk_rows=256).head_bytes
    budget = head_bytes + 50 * row_bytes
    rig = make_rig(t0, memory_bytes=budget, recompute="never")
    rig.create()
    with pytest.raises(TrainingError, match="datum 1: its 51 tokens need") as refusal:
        rig.run([make_datum(rng, 20), make_datum(rng, 51)])
    assert (refusal.value.reason, refusal.value.actual, refusal.value.limit) == ("LIMIT_EXCEEDED", 51, 50)
    rig.run([make_datum(rng, 51)], backward=False)
    generator = rig.trainer.forward_backward("a", [make_datum(rng, 30)] * 2, "cross_entropy", {}, backward=True)
    assert list(generator) == [1, 2], "micro-batches are cut to what fits"
    auto = make_rig(t0, memory_bytes=budget)
    auto.create()
    call = auto.trainer.begin("a", [make_datum(rng, 51)], "cross_entropy", {}, backward=True)
    assert call.recompute
    assert not auto.trainer.begin("a", [make_datum(rng, 50)], "cross_entropy", {}, backward=True).recompute


def test_free_memory_is_read_and_the_plan_says_what_it_means() -> None:
    assert 2**20 < free_bytes(torch.device("cpu")) < 2**50
    plan = MemoryPlan(budget_bytes=2**30, head_bytes=2**20, row_bytes=2**20, row_bytes_recomputed=2**17)
    assert plan.max_rows(recompute=False) == 1023 and plan.needed_bytes(2, recompute=False) == 3 * 2**20
    assert "1.0 GiB a pass; 1.00 MiB a token, up to 1023 tokens" in str(plan)
