"""verify_attention in Triton: a program for a sequence, a kv head and a part of its pages."""

from __future__ import annotations

import triton
import triton.language as tl

from flowinfer.kernels.e4m3 import INTERPRETED, numbers, stored
from flowinfer.kernels.verify_attention import num_splits

LAUNCH: tuple[int, int, int] | None = None  # to try others; None: as _launch_parameters says


def _launch_parameters(block_q, splits, kv):
    """Warps, stages, and numbers of partial sums that a program merges at once.

    Six rows of 32 / 8 heads of 128 on an H200: 10.8 us for one sequence instead of 13.7 with (4, 2, 8192), as more
    warps merge its 16 splits sooner; 20.6 instead of 21.5 for eight, of which 8 warps would make 28.
    """
    if block_q >= 64 or kv.element_size() > 2:  # not measured; three stages of float32 may not fit
        return (8 if block_q >= 64 else 4), 2, 8192
    return (8, 3, 16384) if splits >= 16 else (4, 3, 16384)


def launch(qkv, kv, layer, heads, batch, counts, rope, qk_norm, eps, scratch, rows, out):
    """Arguments as checked by verify_attention."""
    n, k, d = heads
    sequences, page = batch.slots.shape[0], kv.shape[4]
    splits = num_splits(sequences, rows, heads)
    q_norm, k_norm = qk_norm if qk_norm is not None else (None, None)
    block_d, block_s = max(16, triton.next_power_of_2(d)), triton.next_power_of_2(splits)
    block_q = max(16, triton.next_power_of_2(rows * (n // k)))
    warps, stages, merged = LAUNCH or _launch_parameters(block_q, splits, kv)
    _verify_attention[(k, splits, sequences)](
        qkv, kv, batch.slots, batch.lengths, counts, batch.block_tables, batch.block_tables.stride(0), *rope,
        q_norm, k_norm, *scratch, out, layer * 2 * k * page * d, kv.stride(0), d**-0.5, eps, splits,
        T=rows, N=n, K=k, D=d, PAGE=page, BQ=block_q, BT=16, BD=block_d, NORM=qk_norm is not None, SPLIT=splits > 1,
        BS=block_s, BC=max(1, min(block_q, merged // (block_s * block_d))), FAST=not INTERPRETED,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


@triton.jit
def _turned(heads, d, other, there, norm, c, s, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Rows [.., D] at the pointers `heads` [.., 1], normed and rotated, in their own dtype."""
    x = tl.load(heads + d, mask=there, other=0.0)
    y = tl.load(heads + other, mask=there, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    if NORM:
        root = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        in_d = d < D
        x = (x * root * tl.load(norm + d, mask=in_d, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        y = (y * root * tl.load(norm + other, mask=in_d, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    return (x * c + y * s).to(dtype)


@triton.jit
def _verify_attention(
    qkv, kv, slots, lengths, counts, tables, table_stride, cos, sin, q_norm, k_norm,
    sums, peaks, arrived, out, layer_offset, block_stride, scale, eps, splits,
    T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BQ: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr, SPLIT: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = N // K
    LOG2E: tl.constexpr = 1.4426950408889634
    h = tl.program_id(0)
    split = tl.program_id(1)
    b = tl.program_id(2)
    q_at = tl.arange(0, BQ)  # query heads of row 0, then of row 1, ...
    d = tl.arange(0, BD)[None, :]
    in_d = d < D
    token = q_at // G
    in_q = q_at < T * G
    out_at = out + (((b * T + token) * N + h * G + q_at % G)[:, None]).to(tl.int64) * D + d
    slot = tl.load(slots + b)
    count = tl.load(counts + b)
    if (slot < 0) | (count <= 0):
        if split == 0:
            tl.store(out_at, tl.zeros([BQ, BD], out.dtype.element_ty), mask=in_q[:, None] & in_d)
        return
    past = tl.load(lengths + slot) - 1
    table = tables + slot.to(tl.int64) * table_stride
    num_pages = tl.cdiv(past, PAGE)
    each = tl.cdiv(num_pages, splits)
    first = split * each
    end = tl.minimum(first + each, num_pages)

    E: tl.constexpr = (N + 2 * K) * D
    rows = qkv + (b * T).to(tl.int64) * E
    other = (d + D // 2) % D
    real_q = in_q & (token < count)
    there_q = real_q[:, None] & in_d
    turn_q = (past + token)[:, None].to(tl.int64) * D + d
    c = tl.load(cos + turn_q, mask=there_q, other=0.0).to(tl.float32)
    s = tl.load(sin + turn_q, mask=there_q, other=0.0).to(tl.float32)
    q_heads = rows + (token * E + (h * G + q_at % G) * D)[:, None]
    q = _turned(q_heads, d, other, there_q, q_norm, c, s, eps, D, NORM)

    t = tl.arange(0, PAGE)
    dk = tl.arange(0, BD)
    pages = kv + layer_offset + h * PAGE * D
    acc = tl.zeros([BQ, BD], tl.float32)
    peak = tl.full([BQ], float("-inf"), tl.float32)
    total = tl.zeros([BQ], tl.float32)
    factor = scale * LOG2E
    for p in range(first, end):
        page = pages + tl.load(table + p).to(tl.int64) * block_stride
        seen = p * PAGE + t < past
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

    if split == splits - 1:  # the rows' own keys and values
        j = tl.arange(0, BT)
        real = j < count
        there = real[:, None] & in_d
        at = past + j
        turn = at[:, None].to(tl.int64) * D + d
        own_c = tl.load(cos + turn, mask=there, other=0.0).to(tl.float32)
        own_s = tl.load(sin + turn, mask=there, other=0.0).to(tl.float32)
        keys = _turned(rows + (j * E + (N + h) * D)[:, None], d, other, there, k_norm, own_c, own_s, eps, D, NORM)
        values = tl.load(rows + (j * E + (N + K + h) * D)[:, None] + d, mask=there, other=0.0)
        block = tl.load(table + at // PAGE, mask=real, other=0).to(tl.int64)
        page = pages + (block * block_stride + (at % PAGE) * D)[:, None]
        tl.store(page + d, stored(keys, page), mask=there)
        tl.store(page + K * PAGE * D + d, stored(values, page), mask=there)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * factor
        scores = tl.where((j[None, :] <= token[:, None]) & real[None, :], scores, float("-inf"))
        high = tl.maximum(peak, tl.max(scores, 1))
        keep = tl.exp2(peak - high)
        weights = tl.exp2(scores - high[:, None])
        total = total * keep + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
        peak = high

    if SPLIT:
        part = (((b * T + token) * N + h * G + q_at % G) * splits + split).to(tl.int64)
        tl.store(sums + part[:, None] * D + d, acc, mask=in_q[:, None] & in_d)
        tl.store(peaks + part * 2, peak, mask=in_q)
        tl.store(peaks + part * 2 + 1, total, mask=in_q)
        tl.debug_barrier()  # all of the program's stores come before its arrival
        before = tl.atomic_add(arrived + b * K + h, 1, sem="acq_rel", scope="gpu")
        if before == splits - 1:
            tl.store(arrived + b * K + h, 0)
            mi = tl.arange(0, BS)[None, :]
            for first_head in tl.static_range(0, BQ, BC):  # loads of a tile together: one by one, they'd wait in turn
                mq = first_head + tl.arange(0, BC)
                row = ((b * T + mq // G) * N + h * G + mq % G)[:, None]
                heads_in = (mq < T * G)[:, None]
                there_m = heads_in & (mi < splits)
                base = (row * splits + mi).to(tl.int64)
                tops = tl.load(peaks + base * 2, mask=there_m, other=float("-inf"), cache_modifier=".cg")
                totals = tl.load(peaks + base * 2 + 1, mask=there_m, other=0.0, cache_modifier=".cg")
                parts = tl.load(
                    sums + base[:, :, None] * D + dk[None, None, :],
                    mask=there_m[:, :, None] & (dk < D)[None, None, :], other=0.0, cache_modifier=".cg",
                )  # fmt: skip
                top = tl.maximum(tl.max(tops, 1), -1e30)  # heads that pad a tile have none
                share = tl.exp2(tops - top[:, None])
                whole_total = tl.maximum(tl.sum(share * totals, 1), 1e-30)
                whole = tl.sum(share[:, :, None] * parts, 1) / whole_total[:, None]
                tl.store(out + row.to(tl.int64) * D + d, whole.to(out.dtype.element_ty), mask=heads_in & in_d)
    else:
        tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=in_q[:, None] & in_d)
