"""Random numbers against the published vectors of Random123, and their statistics."""

import numpy as np
import pytest

from opentinker_server.sampler.philox import philox4x32, uniforms

KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (
        [0xFFFFFFFF] * 4,
        [0xFFFFFFFF] * 2,
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox4x32(np.array([counter], dtype=np.uint64).T, np.array([key], dtype=np.uint64).T)
    assert words[:, 0].tolist() == expected


def test_a_row_does_not_depend_on_its_company() -> None:
    rng = np.random.default_rng(0)
    seeds, samples, positions = (rng.integers(0, 2**31, 50).astype(np.uint64) for _ in range(3))
    together = uniforms(seeds, samples, positions)
    alone = [uniforms(seeds[i : i + 1], samples[i : i + 1], positions[i : i + 1])[0] for i in range(50)]
    assert together.tolist() == alone


@pytest.mark.parametrize("varied", [0, 1, 2])
def test_numbers_are_uniform_along_each_argument(varied: int) -> None:
    arguments = [np.full(20_000, 7, dtype=np.uint64) for _ in range(3)]
    arguments[varied] = np.arange(20_000, dtype=np.uint64)
    values = uniforms(*arguments)
    assert values.min() >= 0 and values.max() < 1
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    chi_square = ((counts - 200) ** 2 / 200).sum()
    assert chi_square < 167  # p = 1e-5 at 99 degrees of freedom
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def test_high_bits_of_the_seed_matter() -> None:
    one, zero = np.ones(1, dtype=np.uint64), np.zeros(1, dtype=np.uint64)
    assert uniforms(one, zero, zero) != uniforms(one + np.uint64(2**32), zero, zero)
