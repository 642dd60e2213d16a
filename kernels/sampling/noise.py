"""Random numbers as a hash of (seed, position, token): no state, so nothing about the batch can change a sample.

A 64-bit key comes from (seed, position) by the finalizer of splitmix64 (Steele, Lea, Flood 2014). Each token then gets
64 bits from two 32-bit lanes, each a two-multiply mixer with one half of the key put in before each multiply. Lanes,
because the race in `host.py` reads only the upper one, and 64-bit multiplies cost nine times as much over a vocabulary.
Leaves choosing to its callers; `reference.py` has the same hash in torch, equal bit by bit.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]

GOLDEN64 = 0x9E3779B97F4A7C15
GOLDEN32 = 0x9E3779B1
# Lane: two multipliers and the shift between them. Lane 0 is Wellons' lowbias32, lane 1 murmur3's fmix32.
LANES = ((0x7FEB352D, 0x846CA68B, 15), (0x85EBCA6B, 0xC2B2AE35, 13))


def stream_keys(seeds: U64, positions: NDArray[np.int64]) -> U64:
    """Keys, uint64 [rows], of the noise at each row's position (index of the token to be chosen in its sequence)."""
    spread = positions.astype(np.uint64) * np.uint64(GOLDEN64)
    return _mix64(_mix64(seeds + np.uint64(GOLDEN64)) + spread)


def _mix64(x: U64) -> U64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=8)
def spread_tokens(vocab: int) -> U32:
    """token * golden ratio for every token, uint32 [vocab]: the part of the hash that never changes."""
    table = np.arange(vocab, dtype=np.uint32) * np.uint32(GOLDEN32)
    table.flags.writeable = False
    return table


def lane_bits(key: int, spread: U32, lane: int, out: U32 | None = None, work: U32 | None = None) -> U32:
    """32 random bits per token, uint32 of spread's shape; out and work are buffers of that shape."""
    first, second, shift = LANES[lane]
    low, high = key & 0xFFFFFFFF, key >> 32
    if lane:
        low, high = high, low
    x = np.bitwise_xor(spread, np.uint32(low), out=out)
    t = np.right_shift(x, np.uint32(16), out=work)
    np.bitwise_xor(x, t, out=x)
    np.multiply(x, np.uint32(first), out=x)
    np.bitwise_xor(x, np.uint32(high), out=x)
    np.right_shift(x, np.uint32(shift), out=t)
    np.bitwise_xor(x, t, out=x)
    np.multiply(x, np.uint32(second), out=x)
    np.right_shift(x, np.uint32(16), out=t)
    return np.bitwise_xor(x, t, out=x)


def exponentials(key: int, tokens: NDArray[np.int64]) -> F64:
    """Standard exponential noise of these tokens, float64: -log(1 - v), v uniform on (0, 1) with 64 bits."""
    spread = tokens.astype(np.uint32) * np.uint32(GOLDEN32)
    high = lane_bits(key, spread, 0).astype(np.float64)
    low = lane_bits(key, spread, 1).astype(np.float64)
    with np.errstate(divide="ignore"):  # v rounds to 1 once in 2**53: infinite noise, that token just loses
        exponential: F64 = -np.log1p(-((high * 2.0**32 + low + 0.5) * 2.0**-64))
    return exponential
