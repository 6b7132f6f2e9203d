"""Attention over the slab cache against a plain softmax over each sequence's own history."""

import numpy as np
import pytest
import torch

from opentinker_server.sampler.attention import CachedSpan, KvCacheAttention
from opentinker_server.sampler.kv_cache import Slab, SlabCache

NUM_LAYERS, NUM_KV_HEADS, SHARED, HEAD_DIM = 2, 2, 3, 8


def plain(query_HD, keys_LGD, values_LGD, *, position, scaling, window, softcap) -> torch.Tensor:
    """One query at `position` over keys 0 to position, one head at a time."""
    out = []
    for head, query_D in enumerate(query_HD):
        scores_L = keys_LGD[: position + 1, head // SHARED] @ query_D * scaling
        if softcap is not None:
            scores_L = softcap * torch.tanh(scores_L / softcap)
        if window is not None:
            scores_L[: max(0, position + 1 - window)] = -torch.inf
        out.append(torch.softmax(scores_L, dim=0) @ values_LGD[: position + 1, head // SHARED])
    return torch.stack(out)


def make_cache(capacity_tokens: int = 4096) -> SlabCache:
    return SlabCache(
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
        capacity_tokens=capacity_tokens,
        max_sequences=16,
        max_sequence_tokens=512,
    )


class Sequence:
    """A slab, and the same keys and values kept plainly: [layers, L, G, D]."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        empty = torch.empty(NUM_LAYERS, 0, NUM_KV_HEADS, HEAD_DIM)
        self.keys, self.values = empty, empty.clone()

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = torch.cat([self.keys, keys], dim=1)
        self.values = torch.cat([self.values, values], dim=1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (None, 2.0), (7, 2.0)])
def test_every_row_attends_to_its_own_history(seed: int, window: int | None, softcap: float | None) -> None:
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    cache, sequences = make_cache(), []
    for _ in range(12):
        sequences = [s for s in sequences if rng.random() > 0.15 or cache.free(s.slab)]
        while len(sequences) < 8 and rng.random() < 0.7:
            sequences.append(Sequence(cache.allocate(int(rng.integers(1, 150)))))
        spans, active, row = [], [], 0
        for sequence in sequences:
            start = sequence.keys.shape[1]
            num_tokens = 1 if start and rng.random() < 0.7 else int(rng.integers(1, 40))
            if rng.random() < 0.25:
                continue
            if start + num_tokens > sequence.slab.capacity:
                sequence.slab = cache.grow(sequence.slab, start + num_tokens)
            spans.append(CachedSpan(slab=sequence.slab, first_row=row, start=start, num_tokens=num_tokens))
            active.append(sequence)
            row += num_tokens
        num_rows = row
        if not spans:
            continue
        query = torch.randn(NUM_LAYERS, num_rows, NUM_KV_HEADS * SHARED, HEAD_DIM, generator=generator)
        keys = torch.randn(NUM_LAYERS, num_rows, NUM_KV_HEADS, HEAD_DIM, generator=generator)
        values = torch.randn(NUM_LAYERS, num_rows, NUM_KV_HEADS, HEAD_DIM, generator=generator)
        attention = KvCacheAttention(spans, device=query.device)
        options = {"sliding_window": window, "softcap": softcap, "scaling": 0.4}
        out = [attention.attend(i, query[i], keys[i], values[i], **options) for i in range(NUM_LAYERS)]
        for span, sequence in zip(spans, active, strict=True):
            rows = slice(span.first_row, span.first_row + span.num_tokens)
            sequence.extend(keys[:, rows], values[:, rows])
            for layer in range(NUM_LAYERS):
                for offset in range(span.num_tokens):
                    expected = plain(
                        query[layer, span.first_row + offset],
                        sequence.keys[layer],
                        sequence.values[layer],
                        position=span.start + offset,
                        scaling=0.4,
                        window=window,
                        softcap=softcap,
                    )
                    torch.testing.assert_close(out[layer][span.first_row + offset], expected, atol=1e-5, rtol=1e-5)


def test_slabs_are_counted_and_never_exceed_the_capacity() -> None:
    cache = make_cache(capacity_tokens=300)
    assert cache.max_sequence_tokens == 300
    first, second = cache.allocate(1), cache.allocate(65)
    assert (first.capacity, second.capacity, cache.free_tokens) == (64, 128, 300 - 192)
    assert cache.fits(64) and not cache.fits(129)
    assert cache.fits(200, instead_of=second) is False
    first = cache.grow(first, 100)
    assert cache.free_tokens == 300 - 256
    cache.free(first)
    cache.free(second)
    assert cache.free_tokens == 300 and cache.fits(300)


def test_a_cache_smaller_than_the_smallest_slab_holds_one_sequence() -> None:
    cache = make_cache(capacity_tokens=10)
    slab = cache.allocate(10)
    assert not cache.fits(1)
    cache.free(slab)
    assert cache.fits(10)


def test_freed_memory_is_finite_for_the_next_owner() -> None:
    cache = make_cache()
    keeper, broken = cache.allocate(10), cache.allocate(10)
    nan = torch.full((5, NUM_KV_HEADS, HEAD_DIM), torch.nan)
    query = torch.ones(5, NUM_KV_HEADS * SHARED, HEAD_DIM)
    span = CachedSpan(slab=broken, first_row=0, start=0, num_tokens=5)
    KvCacheAttention([span], device=query.device).attend(
        0, query, nan, nan, scaling=1.0, sliding_window=None, softcap=None
    )
    cache.free(broken)
    assert cache.allocate(10).slot == broken.slot
    assert bool(torch.isfinite(keeper.size_class.storage).all())
