"""fp8_linear in Triton: rows become codes, and codes are multiplied by codes with either side on the left."""

from __future__ import annotations

import triton
import triton.language as tl

from flowinfer.kernels.fp8_linear.reference import FINER, FP8_MAX, GROUP, LEAST
from flowinfer.kernels.fp8_linear.tiles import product_tiles


def launch_quantize(x, codes, scale, gated, terms):
    """Arguments as checked by quantize_rows; scale [rows, groups] by its strides, codes [terms * rows, width]."""
    rows, width = x.shape[0], codes.shape[1]
    groups = triton.next_power_of_2(triton.cdiv(width, GROUP))
    _quantize[(rows,)](
        x, codes, scale, rows, width, scale.stride(1), GROUPS=groups, SIZE=GROUP, MAX=FP8_MAX, LEAST=LEAST,
        GATED=gated, TERMS=terms, FINER=FINER,
        num_warps=min(16, max(1, groups * GROUP // 512)),
    )  # fmt: skip


def launch_product(x, x_scale, terms, codes, scale, rows, bias, out, parts):
    """Arguments as checked by fp8_linear; x_scale [M, groups] by its strides, out [M, parts, N]."""
    num, size_in = x_scale.shape[0], x.shape[1]
    size_out = codes.shape[0]
    block_m, block_n, warps, stages, high, swap = product_tiles(num, terms, size_out, size_in)
    groups = scale.shape[1]
    blocks = triton.cdiv(num, block_m // terms) * triton.cdiv(size_out, block_n)
    _product[(blocks, parts)](
        x, x_scale, codes, scale, bias, out, num, size_out, size_in, groups, triton.cdiv(groups, parts),
        parts, x_scale.stride(0), x_scale.stride(1),
        ROWS=rows, SIZE=GROUP, BM=block_m, BN=block_n, WIDE=high, TERMS=terms, FINER=FINER, SWAP=swap,
        BIAS=bias is not None,
        EVEN=size_in % GROUP == 0 and size_out % block_n == 0, ALIGNED=rows % block_n == 0,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


@triton.jit
def _quantize(
    x, codes, scale, rows, width, scale_stride,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr, GATED: tl.constexpr,
    TERMS: tl.constexpr, FINER: tl.constexpr,
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
    value = value / s[:, None]
    code = value.to(tl.float8e4nv)
    tl.store(codes + row * width + i, code, mask=inside)
    if TERMS == 2:  # what the first left over
        rest = ((value - code.to(tl.float32)) * FINER).to(tl.float8e4nv)
        tl.store(codes + (rows + row) * width + i, rest, mask=inside)


@triton.jit
def _some(at, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["M", "per_part", "parts"])
def _product(
    x, x_scale, codes, scale, bias, out, M, N, K, groups, per_part, parts, xs_m, xs_g,
    ROWS: tl.constexpr, SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WIDE: tl.constexpr, TERMS: tl.constexpr, FINER: tl.constexpr, SWAP: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """WIDE: row blocks that go by together, so that their columns of the weight are in the L2 cache once."""
    block, part = tl.program_id(0), tl.program_id(1)
    across = tl.cdiv(N, BN)
    band = block // (WIDE * across)
    BR: tl.constexpr = BM // TERMS  # rows of a tile: their first terms, then their second ones
    high = min(tl.cdiv(M, BR) - band * WIDE, WIDE)
    inside_band = block % (WIDE * across)
    top = (band * WIDE + inside_band % high) * BR
    m = top + tl.arange(0, BM) % BR
    column = inside_band // high
    n = column * BN + tl.arange(0, BN)
    k = tl.arange(0, SIZE)
    in_m, in_n = m < M, n < N
    first = part * per_part
    at_x = m.to(tl.int64) + tl.arange(0, BM) // BR * M
    rows = at_x * K + first * SIZE
    columns = n.to(tl.int64) * K + first * SIZE
    xs_at = x_scale + m.to(tl.int64) * xs_m
    if SWAP:  # the weight on the left: its rows fill a matrix instruction, however few those of x are
        x_at = x + rows[None, :] + k[:, None]
        w_at = codes + columns[:, None] + k[None, :]
        turned = tl.zeros([BN, BM], tl.float32)
        for group in range(first, min(groups, first + per_part)):
            in_k = group * SIZE + k < K
            inside = in_m[None, :] if EVEN else in_k[:, None] & in_m[None, :]
            tile = tl.load(x_at, mask=inside, other=0.0)
            w = _some(w_at, in_n[:, None] & in_k[None, :], EVEN)
            s = tl.load(xs_at + group * xs_g, mask=in_m, other=0.0)
            if ALIGNED:
                s *= tl.load(scale + column * BN // ROWS * groups + group)
                turned += tl.dot(w, tile) * s[None, :]
            else:
                s_n = tl.load(scale + n // ROWS * groups + group, mask=in_n, other=0.0)
                turned += tl.dot(w, tile) * s[None, :] * s_n[:, None]
            x_at += SIZE
            w_at += SIZE
        acc = tl.trans(turned)
    else:
        x_at = x + rows[:, None] + k[None, :]
        w_at = codes + columns[None, :] + k[:, None]
        acc = tl.zeros([BM, BN], tl.float32)
        for group in range(first, min(groups, first + per_part)):
            in_k = group * SIZE + k < K
            inside = in_m[:, None] if EVEN else in_m[:, None] & in_k[None, :]
            tile = tl.load(x_at, mask=inside, other=0.0)
            w = _some(w_at, in_k[:, None] & in_n[None, :], EVEN)
            s = tl.load(xs_at + group * xs_g, mask=in_m, other=0.0)
            if ALIGNED:
                s *= tl.load(scale + column * BN // ROWS * groups + group)
                acc += tl.dot(tile, w) * s[:, None]
            else:
                s_n = tl.load(scale + n // ROWS * groups + group, mask=in_n, other=0.0)
                acc += tl.dot(tile, w) * s[:, None] * s_n[None, :]
            x_at += SIZE
            w_at += SIZE
    if TERMS == 2:
        shares = tl.where(tl.arange(0, 2) == 0, 1.0, 1.0 / FINER)
        whole = tl.sum(tl.reshape(acc, (2, BR, BN)) * shares[:, None, None], 0)
    else:
        whole = acc
    r = top + tl.arange(0, BR)
    if BIAS:
        whole += tl.where(part == 0, tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32), 0.0)[None, :]
    at = (r[:, None].to(tl.int64) * parts + part) * N + n[None, :]
    tl.store(out + at, whole.to(out.dtype.element_ty), mask=(r < M)[:, None] & in_n[None, :])
