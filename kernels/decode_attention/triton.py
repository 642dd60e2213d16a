"""decode_attention in Triton: a program for a row, a kv head and a part of its pages."""

from __future__ import annotations

import triton
import triton.language as tl

from flowinfer.kernels.decode_attention import num_splits
from flowinfer.kernels.e4m3 import INTERPRETED, numbers, stored

LAUNCH: tuple[int, int] | None = None  # warps and stages, to try others; None: as _launch_parameters says
_MERGED = 8192  # numbers of partial sums that a program holds at once: 64 registers a thread


def _launch_parameters(rows, heads):
    """Warps and stages. On an H200: two warps once programs fill the card, or four, which reach more pages sooner."""
    full = heads.head_dim >= 128 and rows * heads.num_kv_heads >= 512
    return (2, 3) if full else (4, 2)


def launch(qkv, kv, layer, heads, batch, rope, qk_norm, eps, scratch, window, sinks, out):
    """Arguments as checked by decode_attention."""
    n, k, d = heads
    rows, page = qkv.shape[0], kv.shape[4]
    splits = num_splits(rows, heads)
    q_norm, k_norm = qk_norm if qk_norm is not None else (None, None)
    block_s = triton.next_power_of_2(splits)
    warps, stages = LAUNCH or _launch_parameters(rows, heads)
    _decode_attention[(k, splits, rows)](
        qkv, kv, batch.slots, batch.lengths, batch.block_tables, batch.block_tables.stride(0), *rope, q_norm, k_norm,
        sinks, *scratch, out, layer * 2 * k * page * d, kv.stride(0), d**-0.5, eps, splits,
        N=n, K=k, D=d, PAGE=page, BG=max(16, triton.next_power_of_2(n // k)), BD=max(16, triton.next_power_of_2(d)),
        NORM=qk_norm is not None, SINKS=sinks is not None, WINDOW=window, SPLIT=splits > 1, FAST=not INTERPRETED,
        BS=block_s, BC=max(1, min(triton.next_power_of_2(n // k), _MERGED // (block_s * triton.next_power_of_2(d)))),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


@triton.jit
def _turned(row, head, at, other, in_head, in_d, norm, c, s, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Heads [.., D] of a row, normed and rotated, float32."""
    x = tl.load(row + head * D + at, mask=in_head & in_d, other=0.0)
    y = tl.load(row + head * D + other, mask=in_head & in_d, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    if NORM:
        root = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = (x * root * tl.load(norm + at, mask=in_d, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        y = (y * root * tl.load(norm + other, mask=in_d, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    return (x * c + y * s).to(dtype)


@triton.jit
def _decode_attention(
    qkv, kv, slots, lengths, tables, table_stride, cos, sin, q_norm, k_norm,
    sinks, sums, peaks, arrived, out, layer_offset, block_stride, scale, eps, splits,
    N: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr,
    NORM: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, BS: tl.constexpr,
    BC: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = N // K
    LOG2E: tl.constexpr = 1.4426950408889634
    h = tl.program_id(0)
    split = tl.program_id(1)
    b = tl.program_id(2)
    g = tl.arange(0, BG)[:, None]
    d = tl.arange(0, BD)[None, :]
    in_g = g < G
    in_d = d < D
    out_at = out + (b * N + h * G + g) * D + d
    slot = tl.load(slots + b)
    if slot < 0:
        if split == 0:
            tl.store(out_at, tl.zeros([BG, BD], out.dtype.element_ty), mask=in_g & in_d)
        return
    length = tl.load(lengths + slot)
    past = length - 1
    table = tables + slot.to(tl.int64) * table_stride
    low = 0
    if WINDOW:
        low = tl.maximum(length - WINDOW, 0)
    num_pages = tl.cdiv(past, PAGE)
    first_page = low // PAGE
    each = tl.cdiv(num_pages - first_page, splits)
    first = first_page + split * each
    end = tl.minimum(first + each, num_pages)

    row = qkv + b.to(tl.int64) * (N + 2 * K) * D
    other = (d + D // 2) % D
    c = tl.load(cos + past.to(tl.int64) * D + d, mask=in_d, other=0.0).to(tl.float32)
    s = tl.load(sin + past.to(tl.int64) * D + d, mask=in_d, other=0.0).to(tl.float32)
    q = _turned(row, h * G + g, d, other, in_g, in_d, q_norm, c, s, eps, D, NORM)

    t = tl.arange(0, PAGE)
    dk = tl.arange(0, BD)
    pages = kv + layer_offset + h * PAGE * D
    acc = tl.zeros([BG, BD], tl.float32)
    peak = tl.full([BG], float("-inf"), tl.float32)
    total = tl.zeros([BG], tl.float32)
    factor = scale * LOG2E
    for p in range(first, end):
        page = pages + tl.load(table + p).to(tl.int64) * block_stride
        seen = p * PAGE + t < past
        if WINDOW:
            seen = seen & (p * PAGE + t >= low)
        keys = tl.load(page + t[None, :] * D + dk[:, None], mask=seen[None, :] & (dk < D)[:, None], other=0.0)
        values = tl.load(page + K * PAGE * D + t[:, None] * D + d, mask=seen[:, None] & in_d, other=0.0)
        keys, values = numbers(keys, FAST), numbers(values, FAST)
        scores = tl.dot(q, keys, input_precision="ieee") * factor
        scores = tl.where(seen[None, :], scores, float("-inf"))
        high = tl.maximum(peak, tl.max(scores, 1))
        keep = tl.exp2(peak - high)
        weights = tl.exp2(scores - high[:, None])
        total = total * keep + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
        peak = high

    if split == splits - 1:  # the token of this step: never read back from its page
        one = tl.zeros([1, 1], tl.int32)
        key = _turned(row, one + N + h, d, other, one == 0, in_d, k_norm, c, s, eps, D, NORM)
        value = tl.load(row + (N + K + h) * D + d, mask=in_d, other=0.0)
        page = pages + tl.load(table + past // PAGE).to(tl.int64) * block_stride + (past % PAGE) * D
        tl.store(page + d, stored(key, page), mask=in_d)
        tl.store(page + K * PAGE * D + d, stored(value, page), mask=in_d)
        score = tl.sum(q.to(tl.float32) * key.to(tl.float32), 1) * factor
        high = tl.maximum(peak, score)
        if SINKS:
            sink = (
                tl.load(sinks + h * G + tl.arange(0, BG), mask=tl.arange(0, BG) < G, other=0.0).to(tl.float32) * LOG2E
            )
            high = tl.maximum(high, sink)
        keep = tl.exp2(peak - high)
        weight = tl.exp2(score - high)
        total = total * keep + weight
        if SINKS:
            total += tl.exp2(sink - high)
        acc = acc * keep[:, None] + weight[:, None] * value.to(tl.float32)
        peak = high

    if SPLIT:
        gs = tl.arange(0, BG)
        part = ((b * N + h * G + gs) * splits + split).to(tl.int64)
        tl.store(sums + part[:, None] * D + d, acc, mask=in_g & in_d)
        tl.store(peaks + part * 2, peak, mask=gs < G)
        tl.store(peaks + part * 2 + 1, total, mask=gs < G)
        tl.debug_barrier()  # all of the program's stores come before its arrival
        before = tl.atomic_add(arrived + b * K + h, 1, sem="acq_rel", scope="gpu")
        if before == splits - 1:
            tl.store(arrived + b * K + h, 0)
            mg = tl.arange(0, BC)[:, None]
            mi = tl.arange(0, BS)[None, :]
            for first_head in tl.static_range(0, G, BC):  # all loads at once: one by one, they took 10 us
                heads_in = first_head + mg < G
                there = heads_in & (mi < splits)
                base = ((b * N + h * G + first_head + mg) * splits + mi).to(tl.int64)
                tops = tl.load(peaks + base * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
                totals = tl.load(peaks + base * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
                parts = tl.load(
                    sums + base[:, :, None] * D + dk[None, None, :],
                    mask=there[:, :, None] & (dk < D)[None, None, :], other=0.0, cache_modifier=".cg",
                )  # fmt: skip
                top = tl.maximum(tl.max(tops, 1), -1e30)  # heads that pad a group have none
                share = tl.exp2(tops - top[:, None])
                whole_total = tl.maximum(tl.sum(share * totals, 1), 1e-30)
                whole = tl.sum(share[:, :, None] * parts, 1) / whole_total[:, None]
                merged_at = out + (b * N + h * G + first_head + mg) * D + d
                tl.store(merged_at, whole.to(out.dtype.element_ty), mask=heads_in & in_d)
    else:
        tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=in_g & in_d)
