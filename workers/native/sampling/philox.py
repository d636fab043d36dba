"""Counter-based noise: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011), so that the noise of a token depends only on seed, sequence, position and token id.

That is what makes a sampled answer equal on every worker, alone or in a batch, split or whole.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_ROUNDS = 10

Words = NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], seed: int) -> NDArray[np.uint64]:
    """Return [n, 4] 32-bit words (as uint64) for n counters under a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        left, right = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (
            (right >> _32) ^ c1 ^ np.uint64(k0),
            right & _LOW,
            (left >> _32) ^ c3 ^ np.uint64(k1),
            left & _LOW,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), axis=1)


def gumbel_noise(
    token_ids: NDArray[np.int64], seed: int, sequence: int, position: int, stream: int = 0
) -> NDArray[np.float64]:
    """Return one Gumbel(0, 1) draw per token id.

    g = -log(-log u), u = (w + 0.5) * 2^-32, w = word (id mod 4) of Philox with key = seed and
    counter = (sequence, position, id div 4, stream).
    """
    groups, inverse = np.unique(token_ids >> 2, return_inverse=True)
    full = np.ones(len(groups), dtype=np.uint64)
    counter = (
        full * np.uint64(sequence),
        full * np.uint64(position),
        groups.astype(np.uint64),
        full * np.uint64(stream),
    )
    words = philox4x32(counter, seed)[inverse, token_ids & 3]
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise
