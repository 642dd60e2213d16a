"""rope_write in Triton: a program a token, all its heads at once."""

from __future__ import annotations

import triton
import triton.language as tl


def launch(qkv, kv, layer, heads, positions, blocks, rope, qk_norm, eps, out):
    """Arguments as checked by rope_write."""
    n, k, d = heads
    q_norm, k_norm = qk_norm if qk_norm is not None else (None, None)
    block_h, block_half = triton.next_power_of_2(n + 2 * k), triton.next_power_of_2(d // 2)
    _rope[(qkv.shape[0],)](
        qkv, kv, positions, blocks, *rope, q_norm, k_norm, out, layer * 2 * k * kv.shape[4] * d, kv.stride(0), eps,
        N=n, K=k, D=d, PAGE=kv.shape[4], BH=block_h, BHALF=block_half, NORM=qk_norm is not None,
        num_warps=min(8, max(1, block_h * block_half // 512)),
    )  # fmt: skip


@triton.jit
def _rope(
    qkv, kv, positions, blocks, cos, sin, q_norm, k_norm, out, layer_offset, block_stride, eps,
    N: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BH: tl.constexpr, BHALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    block = tl.load(blocks + token).to(tl.int64)
    h = tl.arange(0, BH)[:, None]
    d = tl.arange(0, BHALF)[None, :]
    HALF: tl.constexpr = D // 2
    row = qkv + token * (N + 2 * K) * D + h * D + d
    inside = (h < N + 2 * K) & (d < HALF)
    in_d = d < HALF
    low = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(row + HALF, mask=inside, other=0.0).to(tl.float32)
    x, y = low, high
    if NORM:
        root = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
        q_low = tl.load(q_norm + d, mask=in_d, other=0.0).to(tl.float32)
        q_high = tl.load(q_norm + HALF + d, mask=in_d, other=0.0).to(tl.float32)
        k_low = tl.load(k_norm + d, mask=in_d, other=0.0).to(tl.float32)
        k_high = tl.load(k_norm + HALF + d, mask=in_d, other=0.0).to(tl.float32)
        x = (x * root * tl.where(h < N, q_low, k_low)).to(out.dtype.element_ty).to(tl.float32)
        y = (y * root * tl.where(h < N, q_high, k_high)).to(out.dtype.element_ty).to(tl.float32)
    at = position * D + d
    c_low = tl.load(cos + at, mask=in_d, other=0.0).to(tl.float32)
    c_high = tl.load(cos + at + HALF, mask=in_d, other=0.0).to(tl.float32)
    s_low = tl.load(sin + at, mask=in_d, other=0.0).to(tl.float32)
    s_high = tl.load(sin + at + HALF, mask=in_d, other=0.0).to(tl.float32)
    turned = h < N + K
    first = tl.where(turned, x * c_low + y * s_low, low).to(out.dtype.element_ty)
    second = tl.where(turned, y * c_high + x * s_high, high).to(out.dtype.element_ty)
    target = out + token * (N + K) * D + h * D + d
    tl.store(target, first, mask=turned & in_d)
    tl.store(target + HALF, second, mask=turned & in_d)
    page = kv + block * block_stride + layer_offset + (h - N) * PAGE * D + (position % PAGE) * D + d
    tl.store(page, first, mask=(h >= N) & inside)
    tl.store(page + HALF, second, mask=(h >= N) & inside)
