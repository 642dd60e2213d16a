"""hyper_connections in Triton: programs for a token and a span of the product, then one for what comes of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flowinfer.kernels.hyper_connections import SPAN

_COLUMNS = 256  # of the product that are held at once, for up to 32 mixing weights


def launch_mix(x, fn, base, scale, norm, iterations, eps, norm_eps, mixed, head=False):
    """Arguments as checked by mix and collapse."""
    tokens, streams, hidden = x.shape
    width = streams * hidden
    spans = triton.cdiv(width, SPAN)
    block_n = max(16, triton.next_power_of_2(fn.shape[0]))
    sizes = {"BN": block_n, "BK": _COLUMNS, "SPAN": SPAN}
    parts = None
    if spans > 1:
        parts = torch.empty(tokens, spans, 2 * block_n, dtype=torch.float32, device=x.device)
        _product[(tokens, spans)](x, fn, parts, fn.shape[0], width, **sizes, num_warps=4)
    block_h = triton.next_power_of_2(hidden)
    _mix[(tokens,)](
        x, fn, parts, base, scale, norm, mixed.normed, mixed.post, mixed.comb, fn.shape[0], hidden, spans,
        eps, norm_eps,
        M=streams, BH=block_h, HEAD=head, ROUNDS=iterations, ONE=spans == 1, **sizes,
        num_warps=4 if block_h * streams <= 8192 else 8 if block_h * streams <= 16_384 else 16,
    )  # fmt: skip


def launch_spread(x, delta, mixed):
    """Arguments as checked by spread."""
    tokens, streams, hidden = x.shape
    block = min(1024, triton.next_power_of_2(hidden))
    _spread[(tokens, triton.cdiv(hidden, block))](
        x, delta, mixed.post, mixed.comb, hidden, M=streams, PARTS=delta.shape[0] // tokens, BLOCK=block, num_warps=4
    )


@triton.jit
def _sums(
    x, fn, t, first, num, width, BN: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """Products [BN] of a token's numbers [first, first + SPAN) and their squares' sum."""
    n = tl.arange(0, BN)[:, None]
    k = tl.arange(0, BK)
    acc = tl.zeros([BN, BK], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    for start in range(first, tl.minimum(first + SPAN, width), BK):
        inside = start + k < width
        value = tl.load(x + t * width + start + k, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(fn + n * width + (start + k)[None, :], mask=(n < num) & inside[None, :], other=0.0)
        acc += weight * value[None, :]
        squares += value * value
    return tl.sum(acc, 1), tl.sum(squares, 0)


@triton.jit
def _product(
    x, fn, parts, num, width, BN: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    sums, squares = _sums(x, fn, t, span * SPAN, num, width, BN, BK, SPAN)
    at = parts + (t * tl.num_programs(1) + span) * (2 * BN)
    tl.store(at + tl.arange(0, BN), sums)
    tl.store(at + BN, squares)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _mix(
    x, fn, parts, base, scale, norm, normed, post, comb, num, hidden, spans, eps, norm_eps,
    M: tl.constexpr, BH: tl.constexpr, HEAD: tl.constexpr, ROUNDS: tl.constexpr, ONE: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BN)
    if ONE:
        sums, squares = _sums(x, fn, t, 0, num, M * hidden, BN, BK, SPAN)
    else:
        sums = tl.zeros([BN], tl.float32)
        squares = 0.0
        for span in range(spans):
            at = parts + (t * spans + span) * (2 * BN)
            sums += tl.load(at + n)
            squares += tl.load(at + BN)
    group = tl.where(n < M, 0, tl.where(n < 2 * M, 1, 2))
    factor = tl.load(scale + group, mask=n < num, other=0.0)
    weights = sums * tl.rsqrt(squares / (M * hidden) + norm_eps) * factor + tl.load(base + n, mask=n < num, other=0.0)

    m = tl.arange(0, M)
    gates = _sigmoid(weights)[None, :]
    pre = tl.sum(tl.where(n[None, :] == m[:, None], gates, 0.0), 1) + eps
    if not HEAD:
        tl.store(post + t * M + m, 2 * tl.sum(tl.where(n[None, :] == M + m[:, None], gates, 0.0), 1))
        place = 2 * M + m[:, None] * M + m[None, :]
        matrix = tl.sum(tl.where(n[None, None, :] == place[:, :, None], weights[None, None, :], 0.0), 2)
        matrix = tl.exp(matrix - tl.max(matrix, 1)[:, None])
        matrix = matrix / tl.sum(matrix, 1)[:, None] + eps
        matrix = matrix / (tl.sum(matrix, 0)[None, :] + eps)
        for _ in range(ROUNDS - 1):
            matrix = matrix / (tl.sum(matrix, 1)[:, None] + eps)
            matrix = matrix / (tl.sum(matrix, 0)[None, :] + eps)
        tl.store(comb + t * (M * M) + m[:, None] * M + m[None, :], matrix)

    h = tl.arange(0, BH)
    streams = tl.load(x + t * (M * hidden) + m[:, None] * hidden + h[None, :], mask=(h < hidden)[None, :], other=0.0)
    merged = tl.sum(streams.to(tl.float32) * pre[:, None], 0).to(x.dtype.element_ty).to(tl.float32)
    root = tl.rsqrt(tl.sum(merged * merged, 0) / hidden + norm_eps)
    merged = merged * root * tl.load(norm + h, mask=h < hidden, other=0.0)
    tl.store(normed + t * hidden + h, merged.to(normed.dtype.element_ty), mask=h < hidden)


@triton.jit
def _spread(
    x, delta, post, comb, hidden, M: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = tl.arange(0, M)
    inside = h < hidden
    out = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        out += tl.load(delta + (t * PARTS + part) * hidden + h, mask=inside, other=0.0).to(tl.float32)
    at = x + t * (M * hidden)
    new = tl.load(post + t * M + m)[:, None] * out[None, :]
    for j in tl.static_range(M):
        stream = tl.load(at + j * hidden + h, mask=inside, other=0.0).to(tl.float32)
        new += tl.load(comb + t * (M * M) + j * M + m)[:, None] * stream[None, :]
    tl.debug_barrier()  # all streams are read before any is written over
    tl.store(at + m[:, None] * hidden + h[None, :], new.to(x.dtype.element_ty), mask=inside[None, :])
