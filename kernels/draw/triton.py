"""advance_drawn in Triton: a program a row, some passes over it."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 4096


def launch(logits, slots, last, lengths, chosen, settings):
    """Arguments as checked by advance_drawn."""
    rows, vocab = logits.shape
    _draw[(rows,)](logits, slots, last, lengths, chosen, *settings, vocab, BLOCK=BLOCK, num_warps=8)


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _lane(spread, low, high, first, second, shift):
    """32 random bits a token: kernels/sampling/noise.py."""
    x = spread ^ low
    x = ((x ^ (x >> 16)) * first) ^ high
    x = (x ^ (x >> shift)) * second
    return x ^ (x >> 16)


@triton.jit
def _scaled(row, i, vocab, factor):
    return tl.load(row + i, mask=i < vocab, other=float("-inf")).to(tl.float32) * factor


@triton.jit
def _ordered(x):
    """An int32 that rises with x."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _kth(row, vocab, factor, floor, k, BLOCK: tl.constexpr):
    """The largest ordered value that at least k tokens at or above floor reach; the least int32 if they are fewer."""
    low = tl.full([], -2147483648, tl.int64)
    high = tl.full([], 2147483647, tl.int64)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        count = 0
        for start in range(0, vocab, BLOCK):
            x = _scaled(row, start + tl.arange(0, BLOCK), vocab, factor)
            count += tl.sum(((x >= floor) & (_ordered(x).to(tl.int64) >= middle)).to(tl.int32), 0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle - 1)
    return low


@triton.jit
def _mass(row, vocab, factor, floor, least, above, peak, BLOCK: tl.constexpr):
    """Summed exp(x - peak) of tokens at or above floor and `least`, and strictly above `above`."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        x = _scaled(row, start + tl.arange(0, BLOCK), vocab, factor)
        key = _ordered(x).to(tl.int64)
        kept = (x >= floor) & (key >= least) & (key > above)
        total += tl.sum(tl.where(kept, tl.exp(x.to(tl.float64) - peak.to(tl.float64)), 0.0), 0)
    return total


@triton.jit
def _draw(
    logits, slots, last, lengths, chosen, temperatures, top_ks, top_ps, min_ps, seeds, vocab, BLOCK: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0)
    slot = tl.load(slots + b)
    if slot < 0:
        tl.store(chosen + b, -1)
        return
    row = logits + b.to(tl.int64) * vocab
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = _scaled(row, i, vocab, 1.0)
        x = tl.where(x == x, x, float("inf"))  # a NaN must come out on top, as it does in torch
        top = tl.max(x, 0)
        first = tl.min(tl.where(x == top, i, 2147483647), 0)
        token = tl.where(top > best, first, token)
        best = tl.maximum(best, top)
    finite = (best > float("-inf")) & (best < float("inf"))
    temperature = tl.load(temperatures + slot)
    length = tl.load(lengths + slot)
    if finite & (temperature > 0):
        factor = 1.0 / temperature
        peak = best * factor
        min_p = tl.load(min_ps + slot)
        top_k = tl.load(top_ks + slot)
        top_p = tl.load(top_ps + slot)
        floor = tl.where(min_p > 0, peak + tl.log(tl.maximum(min_p, 1e-30)), float("-inf"))
        nothing = tl.full([], -2147483649, tl.int64)
        least = nothing
        if (top_k > 0) & (top_k < vocab):
            least = _kth(row, vocab, factor, floor, top_k, BLOCK)
        edge = nothing  # tokens above it are kept, and the first `ties` at it
        ties = tl.full([], 0, tl.int64)
        if top_p < 1:
            wanted = _mass(row, vocab, factor, floor, least, nothing, peak, BLOCK) * tl.maximum(top_p, 1e-30)
            low = tl.full([], -2147483648, tl.int64)
            high = _ordered(peak).to(tl.int64)
            for _ in range(32):
                middle = (low + high) >> 1
                fits = _mass(row, vocab, factor, floor, least, middle, peak, BLOCK) < wanted
                high = tl.where(fits, middle, high)
                low = tl.where(fits, low, tl.minimum(middle + 1, high))
            edge = high
            above = _mass(row, vocab, factor, floor, least, edge, peak, BLOCK)
            bits = edge.to(tl.int32)
            value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            each = tl.exp(value.to(tl.float64) - peak.to(tl.float64))
            ties = tl.maximum(tl.ceil((wanted - above) / each), 1.0).to(tl.int64)
        key64 = _mix64(tl.load(seeds + slot).to(tl.uint64) + 0x9E3779B97F4A7C15)
        key64 = _mix64(key64 + length.to(tl.uint64) * 0x9E3779B97F4A7C15)
        low32 = (key64 & 0xFFFFFFFF).to(tl.uint32)
        high32 = (key64 >> 32).to(tl.uint32)
        winner = tl.full([], float("-inf"), tl.float64)
        seen = tl.full([], 0, tl.int64)
        for start in range(0, vocab, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = _scaled(row, i, vocab, factor)
            order = _ordered(x).to(tl.int64)
            kept = (i < vocab) & (x >= floor) & (order >= least)
            at_edge = kept & (order == edge)
            rank = seen + tl.cumsum(at_edge.to(tl.int64), 0) - 1
            seen += tl.sum(at_edge.to(tl.int64), 0)
            kept = kept & ((order > edge) | (at_edge & (rank < ties)))
            spread = i.to(tl.uint32) * 0x9E3779B1
            upper = _lane(spread, low32, high32, 0x7FEB352D, 0x846CA68B, 15).to(tl.float64)
            lower = _lane(spread, high32, low32, 0x85EBCA6B, 0xC2B2AE35, 13).to(tl.float64)
            u = (upper * 4294967296.0 + lower + 0.5) * 5.421010862427522e-20  # 2 ** -64
            noise = tl.where(u < 1e-8, u + u * u / 2, -tl.log(tl.maximum(1.0 - u, 1e-300)))
            score = x.to(tl.float64) - peak.to(tl.float64) - tl.log(noise)
            score = tl.where(kept, score, float("-inf"))
            top64 = tl.max(score, 0)
            first = tl.min(tl.where(score == top64, i, 2147483647), 0)
            token = tl.where(top64 > winner, first, token)
            winner = tl.maximum(winner, top64)
    token = tl.where(finite, token, -1)
    tl.store(chosen + b, token)
    tl.store(last + slot, tl.maximum(token, 0))
    tl.store(lengths + slot, length + 1)
