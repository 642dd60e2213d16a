"""invariant_linear in Triton: a program for a tile of the result, over the whole inner dimension in order."""

from __future__ import annotations

import triton
import triton.language as tl

from flowinfer.kernels.invariant_linear.tiles import tiles

GROUP = 8  # row tiles that share weights in the L2 cache


def launch(x, weight, bias, wide, out, sizes=None, gated=False):
    """Arguments as checked by invariant_linear. sizes: tiles to try instead of the chosen ones."""
    rows, size_in = x.shape
    size_out = out.shape[1]
    block_m, block_n, block_k, warps, stages = sizes or tiles(weight.shape[0], size_in, x.element_size(), wide=wide)
    if gated:  # a tile of the gate and one of up
        block_n = max(16, block_n // 2)
    grid = triton.cdiv(rows, block_m) * triton.cdiv(size_out, block_n)
    _linear[(grid,)](
        x, weight, bias, out, rows, size_out, size_in,
        BM=block_m, BN=block_n, BK=block_k, GROUP=GROUP, BIAS=bias is not None, GATED=gated,
        EVEN=size_in % block_k == 0 and size_out % block_n == 0,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _linear(
    x, weight, bias, out, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    group = tile // (GROUP * tiles_n)
    first = group * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    inside = tile % (GROUP * tiles_n)
    first_m = (first + inside % height) * BM
    first_n = inside // height * BN
    m = tl.arange(0, BM)
    n = tl.arange(0, BN)
    k = tl.arange(0, BK)
    in_m = first_m + m < M
    in_n = first_n + n < N
    # Places within a tile fit 32 bits; 64 for each number would double the registers that hold them.
    x_at = x + first_m.to(tl.int64) * K + m[:, None] * K + k[None, :]
    w_at = weight + first_n.to(tl.int64) * K + n[None, :] * K + k[:, None]
    acc = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        if EVEN:
            rows = tl.load(x_at + start, mask=in_m[:, None], other=0.0)
            w = tl.load(w_at + start)
        else:
            in_k = start + k < K
            rows = tl.load(x_at + start, mask=in_m[:, None] & in_k[None, :], other=0.0)
            w = tl.load(w_at + start, mask=in_k[:, None] & in_n[None, :], other=0.0)
        acc = tl.dot(rows, w, acc, input_precision="ieee")
        if GATED:
            if EVEN:
                w_up = tl.load(w_at + start + N.to(tl.int64) * K)
            else:
                w_up = tl.load(w_at + start + N.to(tl.int64) * K, mask=in_k[:, None] & in_n[None, :], other=0.0)
            up = tl.dot(rows, w_up, up, input_precision="ieee")
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    if BIAS:
        acc += tl.load(bias + first_n + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    at = first_m.to(tl.int64) * N + first_n + m[:, None] * N + n[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])
