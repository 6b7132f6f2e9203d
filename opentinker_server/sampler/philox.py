"""Counter-based random numbers: a pure function of a key and a counter, so no state and no order of draws.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011),
vectorised over rows.
"""

import numpy as np

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counter_4N: np.ndarray, key_2N: np.ndarray) -> np.ndarray:
    """Four random 32-bit words per row: uint64 [4, N], each below 2**32.

    counter_4N: uint64 [4, N] and key_2N: uint64 [2, N] hold 32-bit words.
    """
    c0, c1, c2, c3 = counter_4N
    k0, k1 = key_2N
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _32) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _32) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack([c0, c1, c2, c3])


def uniforms(seeds_N: np.ndarray, sample_indices_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per row: float64 [N] with 53 random bits.

    seeds_N: uint64 [N]; sample_indices_N and positions_N: uint64 [N], each below 2**32.
    """
    zeros_N = np.zeros_like(seeds_N)
    counter_4N = np.stack([positions_N, sample_indices_N, zeros_N, zeros_N])
    words_4N = philox4x32(counter_4N, np.stack([seeds_N & _LOW, seeds_N >> _32]))
    bits_N = ((words_4N[0] << _32) | words_4N[1]) >> np.uint64(11)
    return bits_N.astype(np.float64) * 2.0**-53
