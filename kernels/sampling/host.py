"""Sampling on the CPU, a row at a time: a row of 49k logits stays in L2, a batch of 64 (12 MB) wouldn't.

A row costs 0.1 to 0.2 ms here, against 4 ms for its sort. Equal to `reference.py`, which is the spec.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from flowinfer.kernels.sampling.noise import exponentials, lane_bits, spread_tokens

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_CEILINGS = np.where(_BITS > 0, np.float32(np.inf), np.float32(-np.inf))  # float32 [256, 8]


class RowSampler:
    """Samples rows of one vocabulary; holds the buffers that a row needs, so it belongs to one thread."""

    def __init__(self, vocab: int) -> None:
        self.scaled = np.empty(vocab, np.float32)
        self.weights = np.empty(vocab, np.float32)
        self.drawn = np.empty(vocab, np.float32)
        self.flags = np.empty(vocab, np.bool_)
        self.bits = np.empty((2, vocab), np.uint32)
        self.spread = spread_tokens(vocab)
        self._ceilings = np.empty(((vocab + 7) // 8, 8), np.float32)

    def masked(self, row: F32, allowed: NDArray[np.uint8]) -> F32:
        """The row, in self.scaled, with -inf where the bits `allowed`, the lowest id in the lowest bit, aren't set.

        allowed may be longer than the row. A byte of bits becomes eight ceilings by one look-up: 10 us for 49,152
        tokens whatever is allowed, where a masked copy takes 20 to 380, as it mispredicts branches. fmin: what is
        blocked stays so even where the row holds a NaN, and a NaN that is allowed becomes +inf, which is refused too.
        """
        np.take(_CEILINGS, allowed[: len(self._ceilings)], axis=0, out=self._ceilings, mode="clip")
        return np.fmin(row, self._ceilings.reshape(-1)[: row.size], out=self.scaled)

    def sample(self, row: F32, temperature: float, top_k: int, top_p: float, min_p: float, key: int) -> int:
        """The token of one row, or -1 where the logits hold a NaN or nothing finite. `row` may be self.scaled."""
        scaled = np.multiply(row, np.float32(1) / np.float32(temperature), out=self.scaled)
        best = int(scaled.argmax())
        peak = scaled[best]
        if not np.isfinite(peak):
            return -1
        if top_k == 0 and top_p >= 1 and min_p <= 0:
            return self._race_all(best, peak, key)
        tokens = self._candidates(peak, top_k, top_p, min_p)
        return _race(scaled[tokens], peak, tokens, key)

    def _race_all(self, best: int, peak: np.float32, key: int) -> int:
        """Gumbel-max over the whole vocabulary as a race: least E_i / w_i wins, E_i exponential, w_i = exp(s_i - peak).

        The best token has w = 1, so only E_i < w_i * E_best can win; as E_i = -log(1 - v_i) >= v_i, a compare with the
        upper 32 bits of v_i leaves E_best / p_best tokens on average, and only those need logarithms.
        """
        np.subtract(self.scaled, peak, out=self.weights)
        np.exp(self.weights, out=self.weights)
        bits = lane_bits(key, self.spread, 0, out=self.bits[0], work=self.bits[1])
        bound = exponentials(key, np.array([best]))[0]
        # 1.001 and 1: more than float32 may lose in the compare; a spare survivor costs nothing
        self.weights *= np.float32(min(bound, 64.0) * 2.0**31 * 1.001)
        self.weights += np.float32(1)
        np.right_shift(bits, np.uint32(1), out=self.bits[1])  # 31 bits, as int32: numpy is slow to compare uint32
        np.copyto(self.drawn, self.bits[1].view(np.int32), casting="unsafe")
        tokens = np.flatnonzero(np.less_equal(self.drawn, self.weights, out=self.flags))
        return _race(self.scaled[tokens], peak, tokens, key)

    def _candidates(self, peak: np.float32, top_k: int, top_p: float, min_p: float) -> I64:
        floor = peak + np.float32(math.log(min_p)) if min_p > 0 else np.float32(-np.inf)
        if top_k:
            tokens = self._top_k(top_k, floor)
            total = None
        elif top_p < 1:
            tokens, total = self._nucleus_bound(peak, top_p, floor)
        else:
            return np.flatnonzero(np.greater_equal(self.scaled, floor, out=self.flags))
        return _nucleus(self.scaled[tokens], peak, tokens, top_p, total) if top_p < 1 else tokens

    def _top_k(self, top_k: int, floor: np.float32) -> I64:
        tokens = top_tokens(self.scaled, top_k, self.flags)
        return tokens if floor == -np.inf else tokens[self.scaled[tokens] >= floor]

    def _nucleus_bound(self, peak: np.float32, top_p: float, floor: np.float32) -> tuple[I64, float]:
        """A few tokens that hold the nucleus, and the mass of all: tokens lighter than (1 - p) Z / V can't be in it,
        since together they weigh less than what may be left out."""
        np.subtract(self.scaled, peak, out=self.weights)
        np.exp(self.weights, out=self.weights)
        if floor != -np.inf:
            self.weights *= np.greater_equal(self.scaled, floor, out=self.flags)
        total = float(self.weights.sum(dtype=np.float64))
        cut = np.float32(max((1 - top_p) * total / self.weights.size * 0.999, 1e-38))
        return np.flatnonzero(np.greater_equal(self.weights, cut, out=self.flags)), total


def top_tokens(row: F32, count: int, flags: NDArray[np.bool_] | None = None) -> I64:
    """Ids, ascending, of all tokens at least as good as the count-th best, so ties with it stay. flags: a buffer.

    Every 32nd token gives a bound that a little more than `count` tokens should pass; only those are partitioned.
    """
    probe, rank = row[::32], count // 16 + 4
    tokens = np.arange(0)
    while tokens.size < count and rank < probe.size:
        bound = np.partition(probe, probe.size - rank)[probe.size - rank]
        tokens = np.flatnonzero(np.greater_equal(row, bound, out=flags))
        rank *= 4
    if tokens.size < count:
        tokens = np.arange(row.size)
    if tokens.size <= count:
        return tokens
    values = row[tokens]
    best: I64 = tokens[values >= np.partition(values, values.size - count)[values.size - count]]
    return best


def _nucleus(scaled: F32, peak: np.float32, tokens: I64, top_p: float, total: float | None) -> I64:
    if tokens.size == 1:
        return tokens
    order: I64 = np.argsort(-scaled, kind="stable")  # stable: ties by token id
    weights = np.exp(scaled[order].astype(np.float64) - np.float64(peak))
    before = np.cumsum(weights) - weights
    keep = before < top_p * (weights.sum() if total is None else total)
    keep[0] = True
    return tokens[order[keep]]


def _race(scaled: F32, peak: np.float32, tokens: I64, key: int) -> int:
    if tokens.size == 1:  # common: one likely token
        return int(tokens[0])
    scores = scaled.astype(np.float64) - np.float64(peak) - np.log(exponentials(key, tokens))
    return int(tokens[scores.argmax()])
