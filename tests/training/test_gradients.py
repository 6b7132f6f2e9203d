"""Gradients and log-probabilities equal those of a plain PEFT loop, whatever the packing and the company."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from opentinker_server.models.base import BaseModel
from opentinker_server.models.lora import LoraWeights
from opentinker_server.models.registry import resolve_model
from opentinker_server.training.datum import TrainDatum, plan_micro_batches
from opentinker_server.training.loss_specs import LOSS_SPECS, resolve_config
from opentinker_server.training.passes import Share, ShareResult, run_pass

TOLERANCE = 1e-5


def random_weights(base: BaseModel, modules: list[str], rank: int, scale: float, seed: int) -> LoraWeights:
    """Both factors non-zero, so that each has a gradient."""
    generator = torch.Generator().manual_seed(seed)

    def factor(*shape: int) -> torch.Tensor:
        return (0.1 * torch.randn(shape, generator=generator)).requires_grad_()

    factors = {}
    for name in modules:
        width_in, width_out = base.lora_shapes[name]
        factors[name] = (factor(rank, width_in), factor(width_out, rank))
    return LoraWeights(scale=scale, factors=factors)


def random_datum(rng: np.random.Generator, length: int, loss: str, num_targets: int = 0) -> TrainDatum:
    shape = (length, num_targets) if num_targets else (length,)
    inputs = {"mask": rng.random(length) < 0.8}
    if loss == "cross_entropy":
        inputs["weights"] = rng.normal(size=shape)
    else:
        inputs |= {"logprobs": rng.normal(-5.5, 0.4, length), "advantages": rng.normal(size=length)}
    return TrainDatum(
        tokens=rng.integers(0, 256, length),
        targets=rng.integers(0, 256, shape),
        inputs={name: values.astype(np.float32) for name, values in inputs.items()},
    )


class StockPeft:
    """One datum at a time through transformers and PEFT, autograd and full logits."""

    def __init__(self, directory: str, base: BaseModel, weights: LoraWeights, rank: int) -> None:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        config = LoraConfig(r=rank, lora_alpha=weights.scale * rank, target_modules=list(weights.factors))
        self.model = get_peft_model(model, config).eval()
        self.factors = {}
        for name in weights.factors:
            layer = self.model.base_model.model.get_submodule(name)
            self.factors[name] = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
            with torch.no_grad():
                for theirs, ours in zip(self.factors[name], weights.factors[name], strict=True):
                    theirs.copy_(ours)

    def run(self, data: list[TrainDatum], loss: str) -> tuple[list[np.ndarray], list[float]]:
        """Log-probabilities and losses; gradients are left on the factors."""
        logprobs, losses = [], []
        for datum in data:
            tokens = torch.from_numpy(datum.tokens)[None]
            targets = torch.from_numpy(datum.targets)
            lp = torch.log_softmax(self.model(tokens).logits[0].float(), dim=-1)
            lp = lp.gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)
            value = stock_loss(loss, lp, {name: torch.from_numpy(x) for name, x in datum.inputs.items()})
            value.backward()
            logprobs.append(lp.detach().numpy())
            losses.append(value.item())
        return logprobs, losses


def stock_loss(loss: str, lp: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Straight from the formulas, with default configuration; fine for tame ratios."""
    mask = inputs["mask"]
    if loss == "cross_entropy":
        return -(inputs["weights"] * (mask if lp.ndim == 1 else mask[:, None]) * lp).sum()
    ratio, advantage = (lp - inputs["logprobs"]).exp(), inputs["advantages"]
    if loss == "importance_sampling":
        terms = ratio * advantage
    elif loss == "ppo":
        terms = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    elif loss == "cispo":
        terms = ratio.clamp(0.8, 1.2).detach() * lp * advantage
    elif loss == "dro":
        terms = lp * advantage - 0.025 * (lp - inputs["logprobs"]) ** 2
    else:
        mean = ((lp - inputs["logprobs"]) * mask).sum() / mask.sum().clamp(min=1)
        s = mean.exp().detach() * (lp - lp.detach()).exp()
        terms = torch.minimum(s * advantage, s.clamp(0.8, 1.2) * advantage)
    return -(terms * mask).sum()


def assert_equal_to_stock(result: ShareResult, stock: StockPeft, data: list[TrainDatum], loss: str) -> None:
    logprobs, losses = stock.run(data, loss)
    for ours, theirs in zip(result.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)
    assert result.losses == pytest.approx(losses, rel=1e-4, abs=1e-4)
    largest = max(theirs.grad.abs().max().item() for pair in stock.factors.values() for theirs in pair)
    assert largest > 1e-3
    for name, pair in stock.factors.items():
        for ours, theirs in zip(result.gradients[name], pair, strict=True):
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours, theirs.grad, atol=TOLERANCE * max(1.0, largest), rtol=TOLERANCE)


MODELS = [f"tiny-{arch}{tied}" for arch in ("llama", "qwen3", "gemma3", "mixtral") for tied in ("", "-tied")]


@pytest.mark.parametrize("model", MODELS)
def test_equal_to_a_plain_peft_loop(model: str, load_base, cache_dir) -> None:
    base = load_base(model)
    weights = random_weights(base, list(base.lora_shapes), rank=4, scale=1.5, seed=1)
    stock = StockPeft(str(resolve_model(model, cache_dir=cache_dir).directory), base, weights, rank=4)
    rng = np.random.default_rng(0)
    data = [random_datum(rng, length, "cross_entropy", k) for length, k in ((3, 0), (40, 0), (1, 0), (21, 3), (40, 2))]
    share = Share(weights=weights, spec=LOSS_SPECS["cross_entropy"], config={}, data=data)
    (result,) = run_pass(base, [share], backward=True, head_chunk_rows=16)
    assert_equal_to_stock(result, stock, data, "cross_entropy")


@pytest.mark.parametrize("loss", list(LOSS_SPECS))
def test_adapters_of_different_build_and_loss_share_a_pass_without_a_trace(loss: str, load_base, cache_dir) -> None:
    base = load_base("tiny-qwen3")
    directory = str(resolve_model("tiny-qwen3", cache_dir=cache_dir).directory)
    rng = np.random.default_rng(2)
    attention = [name for name in base.lora_shapes if "self_attn" in name]
    builds = [(list(base.lora_shapes), 2, 0.5, loss), (attention, 8, 2.0, "cross_entropy"), (["lm_head"], 3, 1.0, loss)]
    shares, stocks = [], []
    for index, (modules, rank, scale, name) in enumerate(builds):
        weights = random_weights(base, modules, rank, scale, seed=index)
        spec = LOSS_SPECS[name]
        data = [random_datum(rng, length, name) for length in (9, 30, 2)]
        shares.append(Share(weights=weights, spec=spec, config=resolve_config(spec, {}), data=data))
        stocks.append(StockPeft(directory, base, weights, rank))
    results = run_pass(base, shares, backward=True, head_chunk_rows=25)
    for share, stock, result in zip(shares, stocks, results, strict=True):
        assert_equal_to_stock(result, stock, list(share.data), share.spec.name)


def test_forward_alone_gives_no_gradient_and_the_same_numbers(load_base) -> None:
    base = load_base("tiny-llama")
    weights = random_weights(base, list(base.lora_shapes), rank=4, scale=1.0, seed=3)
    data = [random_datum(np.random.default_rng(0), 12, "cross_entropy")]
    share = Share(weights=weights, spec=LOSS_SPECS["cross_entropy"], config={}, data=data)
    (forward,) = run_pass(base, [share], backward=False, head_chunk_rows=5)
    (both,) = run_pass(base, [share], backward=True, head_chunk_rows=64)
    assert forward.gradients is None and both.gradients is not None
    assert forward.losses == pytest.approx(both.losses, abs=1e-5)
    np.testing.assert_allclose(forward.logprobs[0], both.logprobs[0], atol=1e-5)


def test_bfloat16_base_keeps_float32_gradients_near_those_of_float32(load_base, cache_dir) -> None:
    exact_base = load_base("tiny-llama")
    half_base = BaseModel.load(resolve_model("tiny-llama", cache_dir=cache_dir), dtype=torch.bfloat16, device="cpu")
    weights = random_weights(exact_base, list(exact_base.lora_shapes), rank=4, scale=1.0, seed=3)
    data = [random_datum(np.random.default_rng(0), length, "cross_entropy") for length in (50, 12)]
    share = Share(weights=weights, spec=LOSS_SPECS["cross_entropy"], config={}, data=data)
    exact, half = (
        run_pass(base, [share], backward=True, head_chunk_rows=16)[0].gradients for base in (exact_base, half_base)
    )
    flat = [torch.cat([t.flatten() for name in sorted(g) for t in g[name]]) for g in (exact, half)]
    assert flat[1].dtype == torch.float32
    assert torch.cosine_similarity(*flat, dim=0) > 0.995


SETTINGS = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@SETTINGS
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=7),
    budget=st.integers(1, 150),
    chunk=st.integers(1, 80),
    loss=st.sampled_from(sorted(LOSS_SPECS)),
    order=st.randoms(use_true_random=False),
)
def test_neither_split_nor_order_nor_chunks_change_a_call(make_rig, t0, lengths, budget, chunk, loss, order) -> None:
    rng = np.random.default_rng(len(lengths))
    data = [random_datum(rng, length, loss) for length in lengths]
    whole = make_rig(t0, max_tokens_per_micro_batch=10_000, head_chunk_rows=10_000)
    split = make_rig(t0, max_tokens_per_micro_batch=budget, head_chunk_rows=chunk)
    permutation = list(range(len(data)))
    order.shuffle(permutation)
    whole.create()
    split.create()
    one, other = whole.run(data, loss), split.run([data[index] for index in permutation], loss)
    for place, index in enumerate(permutation):
        np.testing.assert_allclose(other.logprobs[place], one.logprobs[index], atol=1e-4)
        assert other.losses[place] == pytest.approx(one.losses[index], rel=1e-3, abs=1e-3)
    ours, theirs = split.probe(), whole.probe()
    largest = max(float(tensor.abs().max()) for tensor in theirs.values())
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-4 * max(1.0, largest), rtol=0)


KINDS = ("self_attn", "mlp", "lm_head")
BUILDS = st.tuples(
    st.sets(st.sampled_from(KINDS), min_size=1),
    st.integers(1, 9),  # rank
    st.sampled_from([0.25, 1.0, 2.0]),  # scale
    st.sampled_from(sorted(LOSS_SPECS)),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),  # lengths
)


@settings(parent=SETTINGS, max_examples=40)
@given(
    model=st.sampled_from(MODELS),
    builds=st.lists(BUILDS, min_size=1, max_size=4),
    chunk=st.integers(1, 64),
    recompute=st.booleans(),
    trained_only=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_company_gives_each_adapter_its_solo_run_in_stock_peft(
    load_base, cache_dir, model, builds, chunk, recompute, trained_only, seed
) -> None:
    base = load_base(model)
    directory = str(resolve_model(model, cache_dir=cache_dir).directory)
    rng = np.random.default_rng(seed)
    shares, stocks = [], []
    for index, (kinds, rank, scale, loss, lengths) in enumerate(builds):
        modules = [name for name in base.lora_shapes if any(kind in name for kind in kinds)]
        if not modules:  # experts cannot be adapted
            continue
        weights = random_weights(base, modules, rank, scale, seed=seed + index)
        spec = LOSS_SPECS[loss]
        data = [random_datum(rng, length, loss) for length in lengths]
        config = resolve_config(spec, {})
        shares.append(Share(weights=weights, spec=spec, config=config, data=data, trained_only=trained_only))
        stocks.append(StockPeft(directory, base, weights, rank))
    if not shares:
        return
    results = run_pass(base, shares, backward=True, head_chunk_rows=chunk, recompute=recompute)
    for share, stock, result in zip(shares, stocks, results, strict=True):
        logprobs, losses = stock.run(list(share.data), share.spec.name)
        for datum, ours, theirs in zip(share.data, result.logprobs, logprobs, strict=True):
            wanted = theirs
            if trained_only:
                taking_part = datum.inputs["mask"] * datum.inputs.get("weights", 1.0) != 0
                wanted = np.where(taking_part, theirs, 0.0)
            np.testing.assert_allclose(ours, wanted, atol=TOLERANCE, rtol=TOLERANCE)
        assert result.losses == pytest.approx(losses, rel=1e-4, abs=1e-4)
        largest = max(theirs.grad.abs().max().item() for pair in stock.factors.values() for theirs in pair)
        for name, pair in stock.factors.items():
            for ours, theirs in zip(result.gradients[name], pair, strict=True):
                torch.testing.assert_close(ours, theirs.grad, atol=TOLERANCE * max(1.0, largest), rtol=TOLERANCE)


@SETTINGS
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40), budget=st.integers(1, 500))
def test_micro_batches_hold_every_datum_once_within_the_budget(lengths: list[int], budget: int) -> None:
    plan = plan_micro_batches(lengths, max_tokens=budget)
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
    for batch in plan:
        assert sum(lengths[index] for index in batch) <= budget or len(batch) == 1
    assert len(plan) <= 1 + 2 * sum(lengths) // budget + sum(length > budget for length in lengths)
