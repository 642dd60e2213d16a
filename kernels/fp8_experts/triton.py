"""The expert layer over FP8 weights in Triton. Grids depend on T alone, so that all of it can be in a CUDA graph."""

from __future__ import annotations

import triton
import triton.language as tl

from flowinfer.kernels.e4m3 import INTERPRETED, wide
from flowinfer.kernels.experts.triton import _locate, _most_blocks
from flowinfer.kernels.fp8_experts.tiles import down_tiles, gated_tiles, grouped_tiles
from flowinfer.kernels.fp8_linear import GROUP
from flowinfer.kernels.fp8_linear.triton import _some


def launch_gated(x, gate_up, routing, out):
    """Arguments as checked by fp8_gather_gated."""
    num_experts, width, hidden = gate_up.codes.shape
    block_m, block_n, warps, stages = gated_tiles(out.shape[0] / num_experts)
    grid = _most_blocks(out.shape[0], num_experts, block_m), triton.cdiv(width // 2, block_n)
    _gated[grid](
        x, gate_up.codes, gate_up.scale, routing.pairs, routing.counts, out, out.shape[0], width // 2, hidden,
        num_experts, *gate_up.scale.shape[1:], TOP=routing.experts.shape[1], ROWS=gate_up.rows, SIZE=GROUP,
        BE=triton.next_power_of_2(num_experts), BM=block_m, BN=block_n,
        EVEN=hidden % GROUP == 0 and width // 2 % block_n == 0, FAST=not INTERPRETED,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def launch_down(h, down, routing, out):
    """Arguments as checked by fp8_weighted."""
    num_experts, hidden, width = down.codes.shape
    block_m, block_n, warps, stages = down_tiles(h.shape[0] / num_experts)
    grid = _most_blocks(h.shape[0], num_experts, block_m), triton.cdiv(hidden, block_n)
    _down[grid](
        h, down.codes, down.scale, routing.weights, routing.pairs, routing.counts, out, h.shape[0], hidden, width,
        num_experts, *down.scale.shape[1:], ROWS=down.rows, SIZE=GROUP,
        BE=triton.next_power_of_2(num_experts), BM=block_m, BN=block_n,
        EVEN=width % GROUP == 0 and hidden % block_n == 0, FAST=not INTERPRETED,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def launch_grouped(rows, stack, counts, row_of, out):
    """Arguments as checked by fp8_grouped."""
    num_experts, size_out, size_in = stack.codes.shape
    block_m, block_n, warps, stages, high = grouped_tiles()
    blocks = _most_blocks(out.shape[0], num_experts, block_m)
    _grouped[(blocks * triton.cdiv(size_out, block_n),)](
        rows.codes, rows.scale, row_of, stack.codes, stack.scale, counts, out, size_out, size_in, num_experts,
        *stack.scale.shape[1:], rows.scale.stride(1), blocks, ROWS=stack.rows, SIZE=GROUP,
        BE=triton.next_power_of_2(num_experts), BM=block_m, BN=block_n, WIDE=high, GATHERED=row_of is not None,
        EVEN=size_in % GROUP == 0 and size_out % block_n == 0, ALIGNED=stack.rows % block_n == 0,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


@triton.jit
def _gated(
    x, codes, scale, pairs, counts, out, num_pairs, N, H, num_experts, high, groups,
    TOP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    expert, first, rows = _locate(counts, tl.program_id(0), num_experts, BE, BM)
    if rows > first:
        m = first + tl.arange(0, BM)
        in_m = m < rows
        pair = tl.load(pairs + expert.to(tl.int64) * num_pairs + m, mask=in_m, other=0)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        k = tl.arange(0, SIZE)
        in_n = n < N
        x_at = x + (pair // TOP).to(tl.int64)[:, None] * H + k[None, :]
        w_at = codes + (expert.to(tl.int64) * 2 * N + n[None, :]) * H + k[:, None]
        s_at = scale + expert.to(tl.int64) * high * groups + n // ROWS * groups
        s_up_at = scale + expert.to(tl.int64) * high * groups + (N + n) // ROWS * groups
        second = N.to(tl.int64) * H
        gate = tl.zeros([BM, BN], tl.float32)
        up = tl.zeros([BM, BN], tl.float32)
        for group in range(groups):
            in_k = group * SIZE + k < H
            tokens = tl.load(x_at, mask=in_m[:, None] & in_k[None, :], other=0.0)
            inside = in_k[:, None] & in_n[None, :]
            w = wide(_some(w_at, inside, EVEN), FAST)
            gate += tl.dot(tokens, w) * _some(s_at + group, in_n, EVEN)[None, :]
            w = wide(_some(w_at + second, inside, EVEN), FAST)
            up += tl.dot(tokens, w) * _some(s_up_at + group, in_n, EVEN)[None, :]
            x_at += SIZE
            w_at += SIZE
        value = gate / (1.0 + tl.exp(-gate)) * up
        at = out + pair.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(at, value.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def _down(
    h, codes, scale, weights, pairs, counts, out, num_pairs, N, W, num_experts, high, groups,
    ROWS: tl.constexpr, SIZE: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    expert, first, rows = _locate(counts, tl.program_id(0), num_experts, BE, BM)
    if rows > first:
        m = first + tl.arange(0, BM)
        in_m = m < rows
        pair = tl.load(pairs + expert.to(tl.int64) * num_pairs + m, mask=in_m, other=0)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        k = tl.arange(0, SIZE)
        in_n = n < N
        h_at = h + pair.to(tl.int64)[:, None] * W + k[None, :]
        w_at = codes + (expert.to(tl.int64) * N + n[None, :]) * W + k[:, None]
        s_at = scale + expert.to(tl.int64) * high * groups + n // ROWS * groups
        acc = tl.zeros([BM, BN], tl.float32)
        for group in range(groups):
            in_k = group * SIZE + k < W
            rows_h = tl.load(h_at, mask=in_m[:, None] & in_k[None, :], other=0.0)
            w = wide(_some(w_at, in_k[:, None] & in_n[None, :], EVEN), FAST)
            acc += tl.dot(rows_h, w) * _some(s_at + group, in_n, EVEN)[None, :]
            h_at += SIZE
            w_at += SIZE
        acc *= tl.load(weights + pair, mask=in_m, other=0.0)[:, None]
        at = out + pair.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def _grouped(
    x, x_scale, row_of, codes, scale, counts, out, N, K, num_experts, high, groups, xs_g, blocks,
    ROWS: tl.constexpr, SIZE: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WIDE: tl.constexpr, GATHERED: tl.constexpr, EVEN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, BN)
    band = tl.program_id(0) // (WIDE * across)
    tall = min(blocks - band * WIDE, WIDE)
    within = tl.program_id(0) % (WIDE * across)
    expert, first, rows = _locate(counts, band * WIDE + within % tall, num_experts, BE, BM)
    if rows > first:
        e = tl.arange(0, BE)
        start = tl.sum(tl.load(counts + e, mask=e < expert, other=0), 0)
        m = first + tl.arange(0, BM)
        in_m = m < rows
        at = (start + m).to(tl.int64)
        row = tl.load(row_of + at, mask=in_m, other=0).to(tl.int64) if GATHERED else at
        column = within // tall
        n = column * BN + tl.arange(0, BN)
        k = tl.arange(0, SIZE)
        in_n = n < N
        x_at = x + row[:, None] * K + k[None, :]
        w_at = codes + (expert.to(tl.int64) * N + n[None, :]) * K + k[:, None]
        own = scale + expert.to(tl.int64) * high * groups
        acc = tl.zeros([BM, BN], tl.float32)
        for group in range(groups):
            in_k = group * SIZE + k < K
            if EVEN:
                a = tl.load(x_at, mask=in_m[:, None], other=0.0)
            else:
                a = tl.load(x_at, mask=in_m[:, None] & in_k[None, :], other=0.0)
            w = _some(w_at, in_k[:, None] & in_n[None, :], EVEN)
            s = tl.load(x_scale + row + group * xs_g, mask=in_m, other=0.0)
            if ALIGNED:
                s *= tl.load(own + column * BN // ROWS * groups + group)
                acc += tl.dot(a, w) * s[:, None]
            else:
                s_n = tl.load(own + n // ROWS * groups + group, mask=in_n, other=0.0)
                acc += tl.dot(a, w) * s[:, None] * s_n[None, :]
            x_at += SIZE
            w_at += SIZE
        tl.store(out + at[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])
