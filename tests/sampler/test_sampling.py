"""The arithmetic of one draw, against slow formulas written independently."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker_server.sampler.base import SamplingError, SamplingSettings
from opentinker_server.sampler.sampling import RowSettings, sample, top_logprobs

LN = math.log


def draw(logits_RV: torch.Tensor, *, count_per_row: int = 1, topk: int = 0, **kwargs: object):
    """Draws from each row with its own sample indices."""
    rows = logits_RV.repeat_interleave(count_per_row, dim=0)
    num_rows = rows.shape[0]
    chosen = SamplingSettings(max_tokens=1, seed=11, **kwargs)
    built = RowSettings.build(
        [chosen] * num_rows,
        sample_indices=list(range(num_rows)),
        positions=[3] * num_rows,
        vocab_size=rows.shape[1],
        device=rows.device,
    )
    return sample(rows, built, topk=topk)


def reference_probs(logits: list[float], temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Temperature, then exactly top_k with ties to the lower id, then the nucleus of what is left."""
    values = np.array(logits, dtype=np.float64) / temperature
    probs = np.exp(values - values.max())
    probs /= probs.sum()
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: len(logits) if top_k == -1 else top_k]
    total = probs[order].sum()
    kept, mass = [], 0.0
    for index in order:
        if mass >= top_p * total - 1e-6 * total and kept and top_p < 1:
            break
        kept.append(index)
        mass += probs[index]
    out = np.zeros(len(logits))
    out[kept] = probs[kept] / probs[kept].sum()
    return out


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, -3.0, 4.0]), min_size=2, max_size=40),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 1, 2, 5, 100]),
    top_p=st.sampled_from([0.05, 0.37, 0.8, 0.99, 1.0]),
)
def test_processed_distribution_equals_the_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    expected = reference_probs(logits, temperature, top_k, top_p)
    out = draw(
        torch.tensor([logits]),
        topk=len(logits),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        logprobs_mode="processed",
    )
    actual = np.zeros(len(logits))
    actual[out.topk_ids_RK[0].numpy()] = out.topk_logprobs_RK[0].exp().numpy()
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert expected[out.tokens_R[0]] > 0


@pytest.mark.parametrize("num_kept", [1, 7, 12, 24])
def test_mass_that_rounding_leaves_just_short_reaches_top_p(num_kept: int) -> None:
    """float32(1 / 25) is below 1 / 25, so k equal tokens fall short of k / 25 by rounding only."""
    out = draw(torch.zeros(1, 25), topk=25, top_p=num_kept / 25, logprobs_mode="processed")
    assert int((out.topk_logprobs_RK > -math.inf).sum()) == num_kept


def test_nucleus_wider_than_the_sorted_prefix_is_exact() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 5000) * 0.1
    for top_k, top_p in ((-1, 0.9), (4000, 0.5), (300, 1.0), (10, 0.9)):
        out = draw(logits, topk=5000, top_k=top_k, top_p=top_p, logprobs_mode="processed")
        for row in range(3):
            expected = reference_probs(logits[row].tolist(), 1.0, top_k, top_p)
            support = int((out.topk_logprobs_RK[row] > -math.inf).sum())
            assert abs(support - int((expected > 0).sum())) <= 1  # float32 mass at the edge
            assert support == (expected > 0).sum() or top_p < 1


def test_token_is_the_inverse_of_the_cumulative_distribution() -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, 1000) * 3
    rows = RowSettings.build(
        [SamplingSettings(max_tokens=1, seed=0)] * 501,
        sample_indices=[0] * 501,
        positions=[0] * 501,
        vocab_size=1000,
        device=logits.device,
    )
    grid = torch.linspace(0, 1, 502, dtype=torch.float64)[:-1]
    rows = RowSettings(**{**rows.__dict__, "uniforms_R": grid})
    tokens = sample(logits.expand(501, -1), rows, topk=0).tokens_R
    cdf = torch.softmax(logits[0].double(), dim=0).cumsum(dim=0)
    below = torch.where(tokens > 0, cdf[(tokens - 1).clamp(min=0)], 0.0)
    assert bool((below <= grid + 1e-6).all()) and bool((cdf[tokens] >= grid - 1e-6).all())


def test_draws_follow_a_large_vocabulary_distribution() -> None:
    torch.manual_seed(2)
    logits = torch.randn(1, 700)
    tokens = draw(logits, count_per_row=40_000).tokens_R
    counts = torch.bincount(tokens, minlength=700).double()
    expected = torch.softmax(logits[0].double(), dim=0) * 40_000
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 699 + 5 * math.sqrt(2 * 699)


def test_greedy_takes_the_lowest_of_equal_ids_and_reports_the_model() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    for extra in ({"temperature": 0.0}, {"temperature": 0.0, "top_p": 0.1}, {"top_k": 1, "top_p": 0.1}):
        out = draw(logits, count_per_row=20, **extra)
        assert out.tokens_R.tolist() == [1] * 20
        np.testing.assert_allclose(out.logprobs_R, torch.log_softmax(logits, -1)[0, 1], atol=1e-6)


def test_processed_greedy_is_certain() -> None:
    out = draw(torch.tensor([[0.0, 2.0]]), topk=2, temperature=0.0, logprobs_mode="processed")
    assert out.logprobs_R.tolist() == [0.0]
    assert out.topk_logprobs_RK.tolist() == [[0.0, -math.inf]]


def test_tiny_temperature_does_not_overflow() -> None:
    out = draw(torch.tensor([[300.0, 200.0, -300.0]]), count_per_row=50, temperature=1e-37)
    assert out.tokens_R.tolist() == [0] * 50
    assert bool(torch.isfinite(out.logprobs_R).all())


def test_tokens_of_zero_probability_are_never_drawn() -> None:
    logits = torch.full((1, 600), -math.inf)
    logits[0, [255, 256, 599]] = 0.0
    tokens = draw(logits, count_per_row=3000).tokens_R
    assert set(tokens.tolist()) == {255, 256, 599}


def test_a_row_that_is_not_finite_reports_nan_and_leaves_the_others_alone() -> None:
    good = torch.tensor([[0.0, 1.0, 2.0, 0.5]])
    for bad in (torch.full((1, 4), math.nan), torch.tensor([[0.0, math.inf, 0.0, 0.0]])):
        for extra in ({}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}):
            alone = draw(good, topk=2, **extra)
            out = draw(torch.cat([good, bad]), topk=2, **extra)
            assert out.tokens_R[0] == alone.tokens_R[0]
            assert out.logprobs_R[0] == alone.logprobs_R[0]
            assert math.isnan(out.logprobs_R[1])
            assert 0 <= int(out.tokens_R[1]) < 4


def test_mixed_settings_in_one_batch_equal_single_rows() -> None:
    torch.manual_seed(3)
    logits = torch.randn(24, 300) * 2
    options = [
        SamplingSettings(max_tokens=1, seed=seed, temperature=t, top_k=k, top_p=p, logprobs_mode=mode)
        for seed, (t, k, p, mode) in enumerate(
            (t, k, p, mode)
            for t in (0.0, 0.6, 1.0)
            for k, p in ((-1, 1.0), (5, 1.0), (-1, 0.7), (20, 0.5))
            for mode in ("model", "processed")
        )
    ]

    def run(index: list[int]):
        rows = RowSettings.build(
            [options[i] for i in index],
            sample_indices=index,
            positions=[i + 5 for i in index],
            vocab_size=300,
            device=logits.device,
        )
        return sample(logits[index], rows, topk=3)

    together = run(list(range(24)))
    for i in range(24):
        alone = run([i])
        assert together.tokens_R[i] == alone.tokens_R[0]
        np.testing.assert_allclose(together.logprobs_R[i], alone.logprobs_R[0], atol=1e-6)
        assert together.topk_ids_RK[i].tolist() == alone.topk_ids_RK[0].tolist()


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.sampled_from([-1.0, -2.0, -0.5]), min_size=1, max_size=30), k=st.integers(1, 30))
def test_top_logprobs_break_ties_by_lower_id(values: list[float], k: int) -> None:
    ids, logprobs = top_logprobs(torch.tensor([values]), k)
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert ids[0].tolist() == expected
    assert logprobs[0].tolist() == [values[i] for i in expected]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", 0),
        ("top_k", -2),
        ("max_tokens", 0),
        ("seed", -1),
        ("seed", 2**64),
        ("stop_texts", ("a", "")),
        ("logprobs_mode", "tempered"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(SamplingError, match=field) as caught:
        SamplingSettings(**{"max_tokens": 1, "seed": 0, field: value})
    assert caught.value.reason == "INVALID_ARGUMENT"
    assert caught.value.field == field
