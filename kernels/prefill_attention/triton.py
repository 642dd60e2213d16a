"""prefill_attention in Triton: a program for a tile of queries and a kv head."""

from __future__ import annotations

import triton
import triton.language as tl

from flowinfer.kernels.e4m3 import INTERPRETED, numbers


def launch(q, kv, layer, heads, tiling, window, sinks, out):
    """Arguments as checked by prefill_attention."""
    n, k, d = heads
    page, group = kv.shape[4], n // k
    rows = max(16, triton.next_power_of_2(tiling.tokens * group))
    wide = rows > 64 and q.element_size() == 2
    _prefill_attention[(tiling.tiles.shape[0], k)](
        q, kv, tiling.tiles, tiling.starts, tiling.kv_lens, tiling.block_tables, tiling.block_tables.stride(0), sinks,
        out, layer * 2 * k * page * d, kv.stride(0), q.stride(0), d**-0.5,
        N=n, K=k, D=d, PAGE=page, TOKENS=tiling.tokens, BM=rows, BD=max(16, triton.next_power_of_2(d)),
        SINKS=sinks is not None, WINDOW=window, FAST=not INTERPRETED,
        num_warps=8 if wide else 4, num_stages=3 if q.element_size() == 2 else 1,
    )  # fmt: skip


@triton.jit
def _pages(
    acc, peak, total, q, kv_pages, table, first, end, at, factor, block_stride, t, dk, d,
    K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BD: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    for p in range(first, end):
        page = kv_pages + tl.load(table + p).to(tl.int64) * block_stride
        if BD == D:
            keys = tl.load(page + t[None, :] * D + dk[:, None])
        else:
            keys = tl.load(page + t[None, :] * D + dk[:, None], mask=(dk < D)[:, None], other=0.0)
        scores = tl.dot(q, numbers(keys, FAST), input_precision="ieee") * factor
        key = p * PAGE + t
        if MASK:
            seen = key[None, :] <= at[:, None]
            if WINDOW:
                seen = seen & (key[None, :] > at[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        high = tl.maximum(peak, tl.max(scores, 1))
        if WINDOW:  # rows that see nothing of this page
            high = tl.maximum(high, -1e30)
        keep = tl.exp2(peak - high)
        weights = tl.exp2(scores - high[:, None])
        total = total * keep + tl.sum(weights, 1)
        v_at = page + K * PAGE * D + t[:, None] * D + d
        if MASK:  # what lies behind the last token may be anything, and 0 * NaN isn't 0
            values = tl.load(v_at, mask=(key <= tl.max(at, 0))[:, None] & (d < D), other=0.0)
        elif BD == D:
            values = tl.load(v_at)
        else:
            values = tl.load(v_at, mask=d < D, other=0.0)
        values = numbers(values, FAST)
        acc = tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
        peak = high
    return acc, peak, total


@triton.jit
def _prefill_attention(
    q, kv, tiles, starts, kv_lens, tables, table_stride, sinks,
    out, layer_offset, block_stride, q_stride, scale,
    N: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = N // K
    LOG2E: tl.constexpr = 1.4426950408889634
    tile = tl.program_id(0)
    h = tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile)
    first_token = tl.load(tiles + 2 * tile + 1)
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    length = tl.load(kv_lens + sequence)
    m = tl.arange(0, BM)
    token = first_token + m // G
    head = h * G + m % G
    d = tl.arange(0, BD)[None, :]
    inside = (token < count) & (m < TOKENS * G)
    at = length - count + tl.minimum(token, count - 1)
    rows = (start + token).to(tl.int64)
    mask = inside[:, None] & (d < D)
    queries = tl.load(q + rows[:, None] * q_stride + head[:, None] * D + d, mask=mask, other=0.0)

    low = length - count + first_token
    high = length - count + tl.minimum(first_token + TOKENS, count)  # keys that the last row sees
    t = tl.arange(0, PAGE)
    dk = tl.arange(0, BD)
    table = tables + sequence.to(tl.int64) * table_stride
    pages = kv + layer_offset + h * PAGE * D
    acc = tl.zeros([BM, BD], tl.float32)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    factor = scale * LOG2E
    first = 0
    clear = (low + 1) // PAGE  # pages that every row sees whole
    if WINDOW:
        first = tl.maximum(low + 1 - WINDOW, 0) // PAGE
        clear = first
    acc, peak, total = _pages(
        acc, peak, total, queries, pages, table, first, clear, at, factor, block_stride, t, dk, d, K, D, PAGE, BD,
        False, 0, FAST,
    )  # fmt: skip
    acc, peak, total = _pages(
        acc, peak, total, queries, pages, table, clear, tl.cdiv(high, PAGE), at, factor, block_stride, t, dk, d, K, D,
        PAGE, BD, True, WINDOW, FAST,
    )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head, mask=m < TOKENS * G, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(peak, sink)
        keep = tl.exp2(peak - top)
        total = total * keep + tl.exp2(sink - top)
        acc = acc * keep[:, None]
    acc = acc / total[:, None]
    tl.store(out + rows[:, None] * (N * D) + head[:, None] * D + d, acc.to(out.dtype.element_ty), mask=mask)
