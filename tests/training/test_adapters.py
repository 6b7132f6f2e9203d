"""Adapters beside one another, slots used again, limits, interrupted calls, optimizer steps."""

import numpy as np
import pytest
import torch

from opentinker_server.models.attention import PackedCausalAttention
from opentinker_server.models.lora import LoraRows
from opentinker_server.training.datum import TrainDatum
from opentinker_server.training.errors import NonFiniteGradient, TrainingError
from opentinker_server.training.optimizer import AdamSettings

LEARN = AdamSettings(learning_rate=1e-2)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_moves_only_its_adapter_and_clips_by_its_own_norm(make_rig, t0, make_datum) -> None:
    rng = np.random.default_rng(0)
    small = make_datum(rng, 12, weights=np.ones(12))
    large = make_datum(rng, 12, weights=np.full(12, 1000.0))
    clipped = AdamSettings(learning_rate=1.0, beta1=0.0, beta2=0.0, eps=1e3, grad_clip_norm=0.1)

    def solo(datum, step) -> dict[str, torch.Tensor]:
        rig = make_rig(t0)
        rig.create()
        rig.run([datum])
        rig.trainer.optim_step("a", step)
        return rig.weights()

    rig = make_rig(t0)
    for name in "ab":
        rig.create(name)
    start = rig.weights("b")
    rig.run([small], adapter_id="a")
    rig.run([large], adapter_id="b")
    rig.trainer.optim_step("a", clipped)
    assert equal(rig.weights("b"), start)
    assert equal(rig.weights("a"), solo(small, clipped))
    rig.trainer.optim_step("b", LEARN)
    assert equal(rig.weights("b"), solo(large, LEARN))
    assert equal(rig.weights("a"), solo(small, clipped))


def test_random_interleavings_equal_solo_runs(make_rig, t0, make_datum) -> None:
    rng = np.random.default_rng(1)
    scripts = {
        name: [[make_datum(rng, int(rng.integers(3, 20))) for _ in range(2)] for _ in range(2)] for name in "abc"
    }
    builds = {"a": {"rank": 2, "seed": 1}, "b": {"rank": 8, "seed": 2}, "c": {"rank": 4, "train_mlp": False}}

    def play(rig, name: str, turn: int) -> None:
        """Turn 2k is forward_backward of call k, turn 2k + 1 its step."""
        if turn % 2 == 0:
            rig.run(scripts[name][turn // 2], adapter_id=name)
        else:
            rig.trainer.optim_step(name, AdamSettings(learning_rate=1e-2, grad_clip_norm=0.5))

    expected = {}
    for name, build in builds.items():
        solo = make_rig(t0)
        solo.create(name, **build)
        for turn in range(4):
            play(solo, name, turn)
        expected[name] = solo.weights(name)
    for _ in range(50):
        rig = make_rig(t0)
        for name, build in builds.items():
            rig.create(name, **build)
        turns = dict.fromkeys(builds, 0)
        for name in rng.permutation([name for name in builds for _ in range(4)]):
            play(rig, str(name), turns[str(name)])
            turns[str(name)] += 1
        assert all(equal(rig.weights(name), expected[name]) for name in builds)


def test_a_slot_used_again_holds_a_fresh_adapter(make_rig, t0, make_datum) -> None:
    rng = np.random.default_rng(2)
    data = [make_datum(rng, 15)]
    rig = make_rig(t0, max_adapters=1)
    rig.create("a", seed=3)
    for _ in range(3):
        rig.run(data)
        rig.trainer.optim_step("a", LEARN)
    rig.run(data)
    rig.trainer.drop_adapter("a")
    rig.create("b", seed=7)
    other = make_rig(t0)
    other.create("b", seed=7)
    assert equal(rig.weights("b"), other.weights("b"))
    assert rig.trainer.step("b") == 0
    with torch.no_grad():
        base_lp = base_logprobs(t0, data[0])
    np.testing.assert_allclose(rig.logprobs(data[0], "b"), base_lp, atol=1e-6)
    start = rig.weights("b")
    for _ in range(2):
        rig.run(data, adapter_id="b")
        other.run(data, adapter_id="b")
        assert rig.trainer.optim_step("b", LEARN) == other.trainer.optim_step("b", LEARN)
    assert equal(rig.weights("b"), other.weights("b"))
    assert all((rig.weights("b")[name] != start[name]).any() for name in start)


def base_logprobs(base, datum: TrainDatum) -> np.ndarray:
    """Of the stock forward pass of the same weights, without any adapter."""
    length = len(datum.tokens)
    hidden = base.hidden_states(
        torch.from_numpy(datum.tokens),
        torch.arange(length),
        attention=PackedCausalAttention([(0, length)]),
        lora=LoraRows.from_segments([]),
    )
    logprobs = torch.log_softmax(base.logits(hidden, lora=None), dim=-1)
    return logprobs[torch.arange(length), torch.from_numpy(datum.targets)].numpy()


def test_the_limit_is_told_and_harms_nobody(make_rig, t0, make_datum) -> None:
    rng = np.random.default_rng(3)
    data = [make_datum(rng, 10)]
    rig, solo = make_rig(t0, max_adapters=2, max_rank=16), make_rig(t0)
    solo.create("a")
    for name in "ab":
        rig.create(name)
    running = rig.trainer.forward_backward("a", data, "cross_entropy", {}, backward=True)
    next(running)
    with pytest.raises(TrainingError, match="limit 2") as error:
        rig.create("c")
    assert (error.value.reason, error.value.limit) == ("LIMIT_EXCEEDED", 2)
    with pytest.raises(StopIteration):
        next(running)
    solo.run(data)
    assert rig.trainer.optim_step("a", LEARN) == solo.trainer.optim_step("a", LEARN)
    assert equal(rig.weights("a"), solo.weights("a"))
    rig.trainer.drop_adapter("b")
    rig.create("c")
    rig.trainer.drop_adapter("c")
    for rank in (0, 17, 10_000):
        with pytest.raises(TrainingError, match="16"):
            rig.create("c", rank=rank)
    with pytest.raises(TrainingError) as error:
        rig.create("a")
    assert error.value.reason == "ALREADY_EXISTS"
    with pytest.raises(TrainingError) as error:
        rig.trainer.drop_adapter("nobody")
    assert error.value.reason == "NOT_FOUND"


def test_options_choose_the_modules_and_the_seed_the_weights(rig, t0) -> None:
    base_before = {name: tensor.clone() for name, tensor in t0.module.state_dict().items()}
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        rig.create(name, rank=4, train_mlp=False, train_unembed=False, seed=seed)
    first = rig.weights("a")
    assert all("self_attn" in name for name in first)
    assert all(len(tensor) == 4 for name, tensor in first.items() if name.endswith(".A"))
    assert equal(first, rig.weights("b")) and not equal(first, rig.weights("c"))
    rig.run([TrainDatum(tokens=np.arange(9), targets=np.arange(1, 10))])
    rig.trainer.optim_step("a", LEARN)
    assert not equal(first, rig.weights("a"))
    assert equal(base_before, t0.module.state_dict())


def test_a_call_that_is_closed_or_fails_adds_no_gradient(make_rig, t0, make_datum) -> None:
    rng = np.random.default_rng(5)
    data = [make_datum(rng, 40) for _ in range(4)]
    rig, solo = make_rig(t0, max_tokens_per_micro_batch=50), make_rig(t0, max_tokens_per_micro_batch=50)
    for one in (rig, solo):
        one.create()
        one.run(data[:2])
    for resumptions in range(len(data) + 1):
        generator = rig.trainer.forward_backward("a", data, "cross_entropy", {}, backward=True)
        assert [next(generator) for _ in range(resumptions)] == list(range(1, resumptions + 1))
        generator.close()
    broken = TrainDatum(tokens=np.array([1, 10_000]), targets=np.array([1, 2]))
    with pytest.raises(IndexError):
        rig.run([*data, broken])
    assert rig.trainer.optim_step("a", LEARN) == solo.trainer.optim_step("a", LEARN)
    assert equal(rig.weights(), solo.weights())


def test_gradients_of_successive_calls_add_up_until_the_step(rig, make_datum, difference) -> None:
    rng = np.random.default_rng(6)
    data = [make_datum(rng, length) for length in (20, 33)]
    rig.create()
    for datum in data:
        rig.run([datum])
    added = rig.probe()
    together = rig.gradient_of(data)
    assert difference(added, together) <= 1e-5 * max(float(t.abs().max()) for t in together.values())
    after_first = rig.weights()
    rig.trainer.optim_step("a", AdamSettings(learning_rate=1.0, beta1=0.0, beta2=0.0, eps=1.0))
    assert equal(after_first, rig.weights())


def test_decay_without_gradient_scales_every_weight(rig) -> None:
    rig.create()
    rig.run([TrainDatum(tokens=np.arange(4), targets=np.arange(4), inputs={"weights": np.zeros(4, np.float32)})])
    start = rig.weights()
    rig.trainer.optim_step("a", AdamSettings(learning_rate=0.1, weight_decay=0.1))
    assert all(torch.equal(tensor, start[name] * 0.99) for name, tensor in rig.weights().items())


def test_clipping_takes_its_share_and_reports_the_unclipped_norm(rig, make_datum) -> None:
    data = [make_datum(np.random.default_rng(7), 20)]
    probe = {"learning_rate": 1e4, "beta1": 0.0, "beta2": 0.0, "eps": 1e6}
    moved, norms = [], []
    for share in (0.0, 0.25):
        rig.create("x")
        start = rig.weights("x")
        rig.run(data, adapter_id="x")
        clip = share * norms[0] if norms else 0.0
        norms.append(rig.trainer.optim_step("x", AdamSettings(**probe, grad_clip_norm=clip))["grad_norm"])
        moved.append({name: tensor - start[name] for name, tensor in rig.weights("x").items()})
        rig.trainer.drop_adapter("x")
    assert norms[0] == norms[1] > 0
    for name in moved[0]:
        if name.endswith(".B"):
            torch.testing.assert_close(moved[1][name], 0.25 * moved[0][name], rtol=1e-3, atol=1e-7)


def test_step_counter_belongs_to_the_adapter(make_rig, t0, make_datum) -> None:
    rig = make_rig(t0)
    data = [make_datum(np.random.default_rng(8), 30)]
    rig.create("a")
    for _ in range(10):
        rig.run(data)
        rig.trainer.optim_step("a", LEARN)
    gradient = rig.gradient_of(data)
    rig.create("b")
    start = rig.weights("b")
    rig.run(data, adapter_id="b")
    assert rig.trainer.optim_step("b", AdamSettings(learning_rate=1e-3))["step"] == 1.0
    assert (rig.trainer.step("a"), rig.trainer.step("b")) == (10, 1)
    moved = 0
    for name, tensor in rig.weights("b").items():
        delta = (tensor - start[name]).abs()
        if name.endswith(".A"):
            # B is still zero, so A has no gradient yet.
            assert not delta.any()
            continue
        live = gradient[name] != 0
        assert ((delta[live] >= 0.999e-3) & (delta[live] <= 1.001e-3)).all() and not delta[~live].any()
        moved += int(live.sum())
    assert moved > 1000


def test_non_finite_gradient_refuses_the_step_and_training_goes_on(make_rig, t0, make_datum) -> None:
    rig, solo = make_rig(t0), make_rig(t0)
    rng = np.random.default_rng(9)
    good, bad = [make_datum(rng, 10)], [make_datum(rng, 10, weights=np.full(10, 3e38))]
    for one in (rig, solo):
        one.create()
        one.run(good)
        one.trainer.optim_step("a", LEARN)
    rig.run(bad)
    before = rig.weights()
    with pytest.raises(NonFiniteGradient):
        rig.trainer.optim_step("a", LEARN)
    assert equal(before, rig.weights()) and rig.trainer.step("a") == 1
    for one in (rig, solo):
        one.run(good)
    assert rig.trainer.optim_step("a", LEARN) == solo.trainer.optim_step("a", LEARN)
    assert equal(rig.weights(), solo.weights())


def test_a_snapshot_does_not_follow_the_policy(rig, make_datum) -> None:
    rig.create()
    snapshot = rig.trainer.snapshot("a")
    kept = {name: (a.clone(), b.clone()) for name, (a, b) in snapshot.factors.items()}
    rig.run([make_datum(np.random.default_rng(10), 10)])
    rig.trainer.optim_step("a", LEARN)
    for name, pair in snapshot.factors.items():
        assert all(torch.equal(now, then) and not now.requires_grad for now, then in zip(pair, kept[name], strict=True))


def test_overfitting_makes_the_wanted_token_certain(rig) -> None:
    """The first completion token is trained, too."""
    datum = TrainDatum(
        tokens=np.array([11, 12, 13, 21]),
        targets=np.array([12, 13, 21, 22]),
        inputs={"weights": np.float32([0, 0, 1, 1])},
    )
    rig.create()
    for _ in range(60):
        rig.run([datum])
        rig.trainer.optim_step("a", LEARN)
    assert np.exp(rig.logprobs(datum))[2] > 0.99
