"""rope_write in Triton: a program a token, all its heads at once."""

from __future__ import annotations

import triton
import triton.language as tl

from flowinfer.kernels.e4m3 import stored


def launch(qkv, kv, layer, heads, positions, blocks, rope, qk_norm, eps, out):
    """Arguments as checked by rope_write."""
    n, k, d = heads
    q_norm, k_norm = qk_norm if qk_norm is not None else (None, None)
    block_h, block_d = triton.next_power_of_2(n + 2 * k), triton.next_power_of_2(d)
    _rope[(qkv.shape[0],)](
        qkv, kv, positions, blocks, *rope, q_norm, k_norm, out, layer * 2 * k * kv.shape[4] * d, kv.stride(0), eps,
        N=n, K=k, D=d, PAGE=kv.shape[4], BH=block_h, BD=block_d, NORM=qk_norm is not None,
        num_warps=min(8, max(1, block_h * block_d // 1024)),
    )  # fmt: skip


@triton.jit
def _rope(
    qkv, kv, positions, blocks, cos, sin, q_norm, k_norm, out, layer_offset, block_stride, eps,
    N: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    block = tl.load(blocks + token).to(tl.int64)
    h = tl.arange(0, BH)[:, None]
    d = tl.arange(0, BD)[None, :]
    other = (d + D // 2) % D
    row = qkv + token * (N + 2 * K) * D
    inside = (h < N + 2 * K) & (d < D)
    x = tl.load(row + h * D + d, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(row + h * D + other, mask=inside, other=0.0).to(tl.float32)
    raw = x
    if NORM:
        root = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        is_q = h < N
        wx = tl.where(
            is_q, tl.load(q_norm + d, mask=d < D).to(tl.float32), tl.load(k_norm + d, mask=d < D).to(tl.float32)
        )
        wy = tl.where(is_q, tl.load(q_norm + other).to(tl.float32), tl.load(k_norm + other).to(tl.float32))
        x = (x * root * wx).to(out.dtype.element_ty).to(tl.float32)
        y = (y * root * wy).to(out.dtype.element_ty).to(tl.float32)
    c = tl.load(cos + position * D + d, mask=d < D, other=0.0).to(tl.float32)
    s = tl.load(sin + position * D + d, mask=d < D, other=0.0).to(tl.float32)
    turned = x * c + y * s
    tl.store(out + token * (N + K) * D + h * D + d, turned.to(out.dtype.element_ty), mask=(h < N + K) & (d < D))
    value = stored(tl.where(h < N + K, turned, raw).to(out.dtype.element_ty), kv)
    page = kv + block * block_stride + layer_offset + (h - N) * PAGE * D + (position % PAGE) * D
    tl.store(page + d, value, mask=(h >= N) & inside & (block + 0 * h >= 0))
