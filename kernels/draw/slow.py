"""The edges of top-k and of the nucleus by bisection over the 32 bits of a float, one program and a pass a bit."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(x):
    """An int32 that rises with x."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The float32 whose `ordered` this int64 is."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(row, i, vocab, factor):
    x = tl.load(row + i, mask=i < vocab, other=float("-inf")).to(tl.float32) * factor
    return tl.where(x == 0, 0.0, x)


@triton.jit
def least_kept(row, vocab, factor, floor, top_k, BLOCK: tl.constexpr):
    """The largest ordered value that at least top_k tokens at or above the floor reach; that of the floor without."""
    low = ordered(floor).to(tl.int64)
    high = tl.full([], 2147483647, tl.int64)
    high = tl.where((top_k > 0) & (top_k < vocab), high, low)
    while low < high:
        middle = (low + high + 1) >> 1
        count = 0
        for start in range(0, vocab, BLOCK):
            x = _scaled(row, start + tl.arange(0, BLOCK), vocab, factor)
            count += tl.sum(((x >= floor) & (ordered(x).to(tl.int64) >= middle)).to(tl.int32), 0)
        low = tl.where(count >= top_k, middle, low)
        high = tl.where(count >= top_k, high, middle - 1)
    return low


@triton.jit
def _mass(row, vocab, factor, floor, least, above, peak, BLOCK: tl.constexpr):
    """Summed exp(x - peak) of tokens at or above floor and `least`, and strictly above `above`."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        x = _scaled(row, start + tl.arange(0, BLOCK), vocab, factor)
        key = ordered(x).to(tl.int64)
        kept = (x >= floor) & (key >= least) & (key > above)
        total += tl.sum(tl.where(kept, tl.exp(x.to(tl.float64) - peak.to(tl.float64)), 0.0), 0)
    return total


@triton.jit
def mass_edge(row, vocab, factor, floor, least, peak, top_p, BLOCK: tl.constexpr):
    """Ordered value above which all are in the nucleus, and how many at it are too, the lowest tokens first."""
    edge = tl.full([], -2147483649, tl.int64)
    ties = tl.full([], 0, tl.int64)
    if top_p < 1:
        wanted = _mass(row, vocab, factor, floor, least, edge, peak, BLOCK) * tl.maximum(top_p, 1e-30)
        low = least
        edge = ordered(peak).to(tl.int64)
        while low < edge:
            middle = (low + edge) >> 1
            fits = _mass(row, vocab, factor, floor, least, middle, peak, BLOCK) < wanted
            edge = tl.where(fits, middle, edge)
            low = tl.where(fits, low, middle + 1)
        above = _mass(row, vocab, factor, floor, least, edge, peak, BLOCK)
        each = tl.exp(value_of(edge).to(tl.float64) - peak.to(tl.float64))
        ties = tl.maximum(tl.ceil((wanted - above) / each), 1.0).to(tl.int64)
    return edge, ties
