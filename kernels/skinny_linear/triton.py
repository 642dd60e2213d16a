"""skinny_linear in Triton: a program streams a few rows of W past all rows of x, which stay in the L2 cache."""

from __future__ import annotations

import triton
import triton.language as tl

from flowinfer.kernels.skinny_linear.tiles import tiles


def launch(x, weight, norm, eps, bias, residual, gated, out):
    """Arguments as checked by skinny_linear."""
    rows, size_in = x.shape
    size_out = out.shape[1]
    block_m, block_n, block_k, warps, stages = tiles(rows, size_out, size_in, x.element_size(), gated)
    _skinny[(triton.cdiv(size_out, block_n),)](
        x, weight, norm, bias, residual, out, rows, size_out, size_in, eps,
        BM=block_m, BN=block_n, BK=block_k,
        NORM=norm is not None, BIAS=bias is not None, SUM=residual is not None, GATED=gated,
        EVEN=size_in % block_k == 0 and size_out % block_n == 0,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


@triton.jit
def _skinny(
    x, weight, norm, bias, residual, out, M, N, K, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, SUM: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    in_m = m < M
    acc = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    squares = tl.zeros([BM], tl.float32)
    x_at = x + m[:, None] * K + k[None, :]
    w_at = weight + n[None, :].to(tl.int64) * K + k[:, None]
    for start in range(0, K, BK):
        if EVEN:
            rows = tl.load(x_at + start, mask=in_m[:, None], other=0.0)
            w = tl.load(w_at + start)
        else:
            in_k = start + k < K
            inside = in_k[:, None] & (n < N)[None, :]
            rows = tl.load(x_at + start, mask=in_m[:, None] & in_k[None, :], other=0.0)
            w = tl.load(w_at + start, mask=inside, other=0.0)
        if NORM:
            wide = rows.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            scale = tl.load(norm + start + k, mask=start + k < K, other=0.0).to(tl.float32)
            rows = (wide * scale[None, :]).to(w.dtype)
        acc = tl.dot(rows, w, acc, input_precision="ieee")
        if GATED:
            if EVEN:
                w = tl.load(w_at + start + N.to(tl.int64) * K)
            else:
                w = tl.load(w_at + start + N.to(tl.int64) * K, mask=inside, other=0.0)
            up = tl.dot(rows, w, up, input_precision="ieee")
    if NORM:
        root = tl.rsqrt(squares / K + eps)[:, None]
        acc *= root
        up *= root
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = m[:, None] * N + n[None, :]
    inside = in_m[:, None] & (n < N)[None, :]
    if SUM:
        acc += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)
