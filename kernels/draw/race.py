"""The Gumbel race in Triton: which token of a block scores best, by the hashed noise of kernels/sampling/noise.py."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

NOBODY = tl.constexpr(2147483647)  # instead of a token


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def key_halves(seed, position):
    """Of stream_keys' key, uint32."""
    key = _mix64(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    key = _mix64(key + position.to(tl.uint64) * 0x9E3779B97F4A7C15)
    return (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def _lane(spread, low, high, first, second, shift):
    x = spread ^ low
    x = ((x ^ (x >> 16)) * first) ^ high
    x = (x ^ (x >> shift)) * second
    return x ^ (x >> 16)


@triton.jit
def _upper(token, low, high):
    """The upper 32 of a token's 64 random bits."""
    return _lane(token.to(tl.uint32) * 0x9E3779B1, low, high, 0x7FEB352D, 0x846CA68B, 15)


@triton.jit
def _score(x, token, low, high):
    """x - log(noise) in float64, of one token."""
    lower = _lane(token.to(tl.uint32) * 0x9E3779B1, high, low, 0x85EBCA6B, 0xC2B2AE35, 13)
    u = _upper(token, low, high).to(tl.float64) * 4294967296.0 + lower.to(tl.float64) + 0.5
    u *= 5.421010862427522e-20  # 2 ** -64
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * (0.25 + u * 0.2))))
    noise = tl.where(u < 1e-3, series, -tl.log(tl.maximum(1.0 - u, 1e-300)))
    return x.to(tl.float64) - tl.log(noise)


@triton.jit
def lead(tokens, x, runs, peak, low, high):
    """What no score of the tokens that run is above, float64; -inf without any. No x is above peak.

    Noise over weight decides a race, and noise -log(1 - u) is at least u, so at least what its upper 32 bits say.
    """
    # 60: a weight below e ** -60 can't win, but times bits of 0 it must give 0
    least = _upper(tokens, low, high).to(tl.float32) * tl.exp(tl.minimum(peak - x, 60.0))
    least = tl.min(tl.where(runs, least, float("inf")), 0)
    # 2 ** -32, and less by 1e-4: float32 is right to 1e-5
    return peak.to(tl.float64) - tl.log(least.to(tl.float64) * 2.328073533e-10)


@triton.jit
def race(row, tokens, x, runs, factor, low, high):
    """The best score of the tokens that run, float64, and the lowest token that has it; -inf and NOBODY without any.

    x: float32, row[tokens] * factor, finite where a token runs. Scored are only those whose bound, as in `lead`, is
    above the score of the one with the highest bound: one or two as a rule.
    """
    winner = tl.full([], float("-inf"), tl.float64)
    chosen = tl.full([], NOBODY, tl.int32)
    if tl.max(runs.to(tl.int32), 0) > 0:
        peak = tl.max(tl.where(runs, x, float("-inf")), 0)
        least = _upper(tokens, low, high).to(tl.float32) * tl.exp(tl.minimum(peak - x, 60.0))
        least = tl.where(runs, least, float("inf"))
        chosen = tl.min(tl.where(least == tl.min(least, 0), tokens, NOBODY), 0)
        winner = _score(tl.load(row + chosen).to(tl.float32) * factor, chosen, low, high)
        has = (tl.exp(peak.to(tl.float64) - winner) * 4294967296.0).to(tl.float32)
        rest = tl.where((least <= has * 1.0001) & (tokens != chosen), tokens, NOBODY)  # float32 is right to 1e-5
        token = tl.min(rest, 0)
        while token < NOBODY:
            score = _score(tl.load(row + token).to(tl.float32) * factor, token, low, high)
            better = (score > winner) | ((score == winner) & (token < chosen))
            chosen = tl.where(better, token, chosen)
            winner = tl.where(better, score, winner)
            rest = tl.where(rest > token, rest, NOBODY)
            token = tl.min(rest, 0)
    return winner, chosen
