"""fp8_linear in Triton: weights widened on their way to the product, or both sides multiplied as they are."""

from __future__ import annotations

import triton
import triton.language as tl

from flowinfer.kernels.e4m3 import INTERPRETED, wide
from flowinfer.kernels.fp8_linear.reference import FP8_MAX, GROUP, LEAST
from flowinfer.kernels.fp8_linear.tiles import product_tiles, skinny_tiles


def launch_quantize(x, codes, scale, gated):
    """Arguments as checked by quantize_rows; scale [groups, rows] by its strides."""
    rows, width = codes.shape
    groups = triton.next_power_of_2(triton.cdiv(width, GROUP))
    _quantize[(rows,)](
        x, codes, scale, width, scale.stride(1), GROUPS=groups, SIZE=GROUP, MAX=FP8_MAX, LEAST=LEAST, GATED=gated,
        num_warps=min(16, max(1, groups * GROUP // 512)),
    )  # fmt: skip


def launch_skinny(x, codes, scale, rows, bias, gated, out, parts):
    """Arguments as checked by fp8_linear; out [M, parts, N]."""
    num, size_in = x.shape
    size_out = out.shape[-1]
    block_m, block_n, unroll, warps, stages, swap = skinny_tiles(num, size_out, size_in, gated)
    groups = scale.shape[1]
    _skinny[(triton.cdiv(size_out, block_n), parts)](
        x, codes, scale, bias, out, num, size_out, size_in, groups, triton.cdiv(groups, parts * unroll) * unroll, parts,
        ROWS=rows, SIZE=GROUP, BM=block_m, BN=block_n, UNROLL=unroll, BIAS=bias is not None, GATED=gated,
        SWAP=swap, EVEN=size_in % (GROUP * unroll) == 0 and size_out % block_n == 0, FAST=not INTERPRETED,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def launch_product(x, x_scale, codes, scale, rows, bias, out, parts):
    """Arguments as checked by fp8_linear; x_scale [M, groups] by its strides, out [M, parts, N]."""
    num, size_in = x.shape
    size_out = codes.shape[0]
    block_m, block_n, warps, stages, high = product_tiles(num, size_out, size_in)
    groups = scale.shape[1]
    blocks = triton.cdiv(num, block_m) * triton.cdiv(size_out, block_n)
    _product[(blocks, parts)](
        x, x_scale, codes, scale, bias, out, num, size_out, size_in, groups, triton.cdiv(groups, parts),
        parts, x_scale.stride(0), x_scale.stride(1),
        ROWS=rows, SIZE=GROUP, BM=block_m, BN=block_n, WIDE=high, BIAS=bias is not None,
        EVEN=size_in % GROUP == 0 and size_out % block_n == 0, ALIGNED=rows % block_n == 0,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


@triton.jit
def _quantize(
    x, codes, scale, width, scale_stride,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, GROUPS)
    i = g[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = i < width
    if GATED:
        gate = tl.load(x + row * 2 * width + i, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + i, mask=inside, other=0.0).to(tl.float32)
        value = (gate / (1.0 + tl.exp(-gate)) * up).to(x.dtype.element_ty).to(tl.float32)
    else:
        value = tl.load(x + row * width + i, mask=inside, other=0.0).to(tl.float32)
    s = tl.maximum(tl.max(tl.abs(value), 1), LEAST) / MAX
    tl.store(scale + g.to(tl.int64) * scale_stride + row, s, mask=g * SIZE < width)
    tl.store(codes + row * width + i, (value / s[:, None]).to(tl.float8e4nv), mask=inside)


@triton.jit
def _some(at, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["M", "per_part", "parts"])
def _skinny(
    x, codes, scale, bias, out, M, N, K, groups, per_part, parts,
    ROWS: tl.constexpr, SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    UNROLL: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, SIZE)
    part = tl.program_id(1)
    in_m, in_n = m < M, n < N
    if SWAP:  # weights are the left side: they go from registers to the matrix units, not through shared memory
        x_at = x + m[None, :] * K + k[:, None]
        w_at = codes + n[:, None].to(tl.int64) * K + k[None, :]
        acc = tl.zeros([BN, BM], tl.float32)
        up = tl.zeros([BN, BM], tl.float32)
    else:
        x_at = x + m[:, None] * K + k[None, :]
        w_at = codes + n[None, :].to(tl.int64) * K + k[:, None]
        acc = tl.zeros([BM, BN], tl.float32)
        up = tl.zeros([BM, BN], tl.float32)
    second = N.to(tl.int64) * K
    s_at = scale + n // ROWS * groups
    s_up_at = scale + (N + n) // ROWS * groups
    for first in range(part * per_part, min(groups, (part + 1) * per_part), UNROLL):
        for j in tl.static_range(UNROLL):
            group = first + j
            start = group * SIZE
            in_k = start + k < K
            s = _some(s_at + min(group, groups - 1), in_n, EVEN)  # behind the end w is zero
            if SWAP:
                rows = tl.load(x_at + start, mask=in_k[:, None] & in_m[None, :], other=0.0)
                inside = in_n[:, None] & in_k[None, :]
                acc += tl.dot(wide(_some(w_at + start, inside, EVEN), FAST), rows) * s[:, None]
            else:
                rows = tl.load(x_at + start, mask=in_m[:, None] & in_k[None, :], other=0.0)
                inside = in_k[:, None] & in_n[None, :]
                acc += tl.dot(rows, wide(_some(w_at + start, inside, EVEN), FAST)) * s[None, :]
            if GATED:
                s = _some(s_up_at + min(group, groups - 1), in_n, EVEN)
                w = wide(_some(w_at + second + start, inside, EVEN), FAST)
                if SWAP:
                    up += tl.dot(w, rows) * s[:, None]
                else:
                    up += tl.dot(rows, w) * s[None, :]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    if BIAS:
        b = tl.where(part == 0, tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32), 0.0)
        acc += b[:, None] if SWAP else b[None, :]
    if SWAP:
        at = (m[None, :] * parts + part) * N + n[:, None]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=in_m[None, :] & in_n[:, None])
    else:
        at = (m[:, None] * parts + part) * N + n[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit(do_not_specialize=["M", "per_part", "parts"])
def _product(
    x, x_scale, codes, scale, bias, out, M, N, K, groups, per_part, parts, xs_m, xs_g,
    ROWS: tl.constexpr, SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WIDE: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """WIDE: row blocks that go by together, so that their columns of the weight are in the L2 cache once."""
    block, part = tl.program_id(0), tl.program_id(1)
    across = tl.cdiv(N, BN)
    band = block // (WIDE * across)
    high = min(tl.cdiv(M, BM) - band * WIDE, WIDE)
    inside_band = block % (WIDE * across)
    m = (band * WIDE + inside_band % high) * BM + tl.arange(0, BM)
    column = inside_band // high
    n = column * BN + tl.arange(0, BN)
    k = tl.arange(0, SIZE)
    in_m, in_n = m < M, n < N
    first = part * per_part
    x_at = x + m[:, None].to(tl.int64) * K + k[None, :] + first * SIZE
    w_at = codes + n[None, :].to(tl.int64) * K + k[:, None] + first * SIZE
    xs_at = x_scale + m.to(tl.int64) * xs_m
    acc = tl.zeros([BM, BN], tl.float32)
    for group in range(first, min(groups, first + per_part)):
        if EVEN:
            rows = tl.load(x_at, mask=in_m[:, None], other=0.0)
            w = tl.load(w_at)
        else:
            in_k = group * SIZE + k < K
            rows = tl.load(x_at, mask=in_m[:, None] & in_k[None, :], other=0.0)
            w = tl.load(w_at, mask=in_k[:, None] & in_n[None, :], other=0.0)
        s = tl.load(xs_at + group * xs_g, mask=in_m, other=0.0)
        if ALIGNED:
            s *= tl.load(scale + column * BN // ROWS * groups + group)
            acc += tl.dot(rows, w) * s[:, None]
        else:
            s_n = tl.load(scale + n // ROWS * groups + group, mask=in_n, other=0.0)
            acc += tl.dot(rows, w) * s[:, None] * s_n[None, :]
        x_at += SIZE
        w_at += SIZE
    if BIAS:
        acc += tl.where(part == 0, tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32), 0.0)[None, :]
    at = (m[:, None].to(tl.int64) * parts + part) * N + n[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])
