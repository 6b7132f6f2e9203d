"""Adam against an independent float64 formula, torch's own, and exact single-step values."""

import numpy as np
import pytest
import torch

from opentinker_server.training.errors import NonFiniteGradient
from opentinker_server.training.optimizer import AdamSettings, AdamState, AdamStep, adam_steps

SHAPES = [(3, 5), (4, 2), (7,)]


def adam_step(weights, gradients, state, settings) -> float:
    """One adapter's step; raises what refused it."""
    (outcome,) = adam_steps([AdamStep(weights=weights, gradients=gradients, state=state, settings=settings)])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def make(seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


def reference_step(weights, gradients, first, second, step, s: AdamSettings):
    """The formula in float64 numpy; returns new weights and moments."""
    flat = np.concatenate([g.reshape(-1) for g in gradients])
    norm = np.sqrt((flat**2).sum())
    factor = min(1.0, s.grad_clip_norm / norm) if s.grad_clip_norm > 0 else 1.0
    results = []
    for w, g, m, v in zip(weights, gradients, first, second, strict=True):
        g = g * factor
        m = s.beta1 * m + (1 - s.beta1) * g
        v = s.beta2 * v + (1 - s.beta2) * g * g
        m_hat, v_hat = m / (1 - s.beta1**step), v / (1 - s.beta2**step)
        w = w * (1 - s.learning_rate * s.weight_decay) - s.learning_rate * m_hat / (np.sqrt(v_hat) + s.eps)
        results.append((w, m, v))
    return tuple(map(list, zip(*results, strict=True)))


def test_twenty_steps_with_changing_settings_equal_the_formula() -> None:
    rng = np.random.default_rng(0)
    weights = make(1)
    state = AdamState.fresh(weights)
    expected = [w.double().numpy() for w in weights]
    first, second = [np.zeros(s) for s in SHAPES], [np.zeros(s) for s in SHAPES]
    for step in range(1, 21):
        settings = AdamSettings(
            learning_rate=float(rng.uniform(1e-4, 1e-2)),
            beta1=float(rng.uniform(0, 0.95)),
            beta2=float(rng.uniform(0, 0.99)),
            eps=float(rng.choice([1e-12, 1e-3])),
            weight_decay=float(rng.choice([0.0, 0.3])),
            grad_clip_norm=float(rng.choice([0.0, 0.5, 100.0])),
        )
        gradients = make(100 + step)
        expected, first, second = reference_step(
            expected, [g.double().numpy() for g in gradients], first, second, step, settings
        )
        adam_step(weights, gradients, state, settings)
    assert state.step == 20
    for ours, theirs in zip(weights + state.first + state.second, expected + first + second, strict=True):
        np.testing.assert_allclose(ours.double().numpy(), theirs, rtol=1e-5, atol=1e-6)


def test_equals_torch_adamw() -> None:
    weights = make(1)
    theirs = [w.clone().requires_grad_() for w in weights]
    adamw = torch.optim.AdamW(theirs, lr=3e-3, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.2)
    state = AdamState.fresh(weights)
    settings = AdamSettings(learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-5, weight_decay=0.2)
    for step in range(5):
        for weight, gradient in zip(theirs, make(step), strict=True):
            weight.grad = gradient
        adamw.step()
        adam_step(weights, make(step), state, settings)
    for ours, weight in zip(weights, theirs, strict=True):
        torch.testing.assert_close(ours, weight.detach(), rtol=1e-6, atol=1e-7)


def test_zero_gradient_without_decay_changes_no_bit() -> None:
    weights, zeros = make(1), [torch.zeros(shape) for shape in SHAPES]
    assert adam_step(weights, zeros, AdamState.fresh(weights), AdamSettings(learning_rate=0.1)) == 0.0
    assert all(torch.equal(a, b) for a, b in zip(weights, make(1), strict=True))


def test_decay_alone_multiplies_by_one_minus_rate_times_decay() -> None:
    weights, zeros = make(1), [torch.zeros(shape) for shape in SHAPES]
    settings = AdamSettings(learning_rate=0.1, weight_decay=0.1)
    adam_step(weights, zeros, AdamState.fresh(weights), settings)
    assert all(torch.equal(a, b * 0.99) for a, b in zip(weights, make(1), strict=True))


PROBE = {"learning_rate": 10.0, "beta1": 0.0, "beta2": 0.0, "eps": 1e3}


@pytest.mark.parametrize(("share", "factor"), [(0.0, 1.0), (0.25, 0.25), (1.0, 1.0), (3.0, 1.0)])
def test_clipping_scales_by_the_share_of_the_norm_and_reports_the_unclipped_norm(share: float, factor: float) -> None:
    weights = [torch.zeros(shape) for shape in SHAPES]
    gradients = make(5)
    norm = float(torch.cat([g.flatten() for g in gradients]).double().norm())
    settings = AdamSettings(**PROBE, grad_clip_norm=share * norm)
    assert adam_step(weights, make(5), AdamState.fresh(weights), settings) == pytest.approx(norm, rel=1e-6)
    for weight, gradient in zip(weights, gradients, strict=True):
        torch.testing.assert_close(weight, -0.01 * factor * gradient, rtol=4e-3, atol=0)


def test_each_step_uses_its_own_learning_rate() -> None:
    weights = [torch.zeros(2)]
    state = AdamState.fresh(weights)
    for rate, expected in ((1e-2, -1e-2), (1e-3, -1.1e-2)):
        adam_step(weights, [torch.tensor([0.3, 5.0])], state, AdamSettings(learning_rate=rate))
        torch.testing.assert_close(weights[0], torch.full((2,), expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_gradient_is_refused_and_changes_nothing(bad: float) -> None:
    weights, state = make(1), AdamState.fresh(make(1))
    adam_step(weights, make(2), state, AdamSettings())
    before = [t.clone() for t in weights + state.first + state.second]
    gradients = make(3)
    gradients[1][2, 1] = bad
    with pytest.raises(NonFiniteGradient) as error:
        adam_step(weights, gradients, state, AdamSettings(grad_clip_norm=1.0, weight_decay=0.5))
    assert error.value.reason == "NON_FINITE"
    assert state.step == 1
    assert all(torch.equal(a, b) for a, b in zip(before, weights + state.first + state.second, strict=True))


def test_huge_finite_gradient_is_not_mistaken_for_infinity() -> None:
    weights = [torch.zeros(3)]
    norm = adam_step(weights, [torch.full((3,), 1e25)], AdamState.fresh(weights), AdamSettings(grad_clip_norm=1.0))
    assert norm == pytest.approx(3**0.5 * 1e25, rel=1e-6)
    torch.testing.assert_close(weights[0], torch.full((3,), -1e-4), rtol=1e-5, atol=0)


def test_gradient_whose_square_overflows_is_refused() -> None:
    weights = [torch.zeros(3)]
    state = AdamState.fresh(weights)
    with pytest.raises(NonFiniteGradient):
        adam_step(weights, [torch.full((3,), 1e25)], state, AdamSettings())
    assert torch.equal(weights[0], torch.zeros(3)) and state.step == 0
