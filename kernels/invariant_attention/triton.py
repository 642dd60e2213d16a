"""invariant_attention in Triton: a program for a tile of queries and a kv head and, in decode, a split of the keys.

No product is fused with a sum: a compiler might do so in one form of the kernel and not in the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flowinfer.kernels.invariant_attention import SPLIT_PAGES, TILE_ROWS


def launch(q, kv, layer, heads, tiling, parts, out):
    """Arguments as checked by invariant_attention."""
    n, k, d = heads
    page = kv.shape[4]
    sums, peaks, arrived, most = parts if parts is not None else (None, None, None, 1)
    _attend[(tiling.tiles.shape[0], k, most)](
        q, kv, tiling.tiles, tiling.starts, tiling.kv_lens, tiling.block_tables, tiling.block_tables.stride(0),
        sums, peaks, arrived, out, layer * 2 * k * page * d, kv.stride(0), q.stride(0), d**-0.5, most,
        N=n, K=k, D=d, PAGE=page, TOKENS=tiling.tokens, BM=TILE_ROWS, BD=max(16, triton.next_power_of_2(d)),
        SPLIT=SPLIT_PAGES, PARTS=parts is not None and most > 1,
        num_warps=4, num_stages=3 if q.element_size() == 2 else 1, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _fold(acc, peak, total, own, own_peak, own_total):
    """A split added to those before it."""
    high = tl.maximum(peak, own_peak)
    keep = tl.exp2(peak - high)
    share = tl.exp2(own_peak - high)
    return acc * keep[:, None] + own * share[:, None], high, total * keep + own_total * share


@triton.jit
def _split(
    queries, pages, table, first, end, at, last, factor, block_stride, t, dk, d,
    K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Online softmax over pages [first, end): sums, peaks and totals of the rows. last: position of the last row."""
    acc = tl.zeros([BM, BD], tl.float32)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    for p in range(first, end):
        page = pages + tl.load(table + p).to(tl.int64) * block_stride
        key = p * PAGE + t
        there = key <= last  # what lies behind may be anything, and 0 * NaN isn't 0
        v_at = page + K * PAGE * D + t[:, None] * D + d
        if BD == D:  # one mask a row leaves loads wide, and so ahead of their use
            keys = tl.load(page + t[None, :] * D + dk[:, None])
            values = tl.load(v_at, mask=there[:, None], other=0.0)
        else:
            keys = tl.load(page + t[None, :] * D + dk[:, None], mask=(dk < D)[:, None], other=0.0)
            values = tl.load(v_at, mask=there[:, None] & (d < D), other=0.0)
        scores = tl.dot(queries, keys, input_precision="ieee") * factor
        scores = tl.where(key[None, :] <= at[:, None], scores, float("-inf"))
        high = tl.maximum(tl.maximum(peak, tl.max(scores, 1)), -1e30)  # rows that see nothing of this split
        keep = tl.exp2(peak - high)
        weights = tl.exp2(scores - high[:, None])
        total = total * keep + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
        peak = high
    return acc, peak, total


@triton.jit
def _attend(
    q, kv, tiles, starts, kv_lens, tables, table_stride, sums, peaks, arrived, out,
    layer_offset, block_stride, q_stride, scale, most,
    N: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr,
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
    dk = tl.arange(0, BD)
    t = tl.arange(0, PAGE)
    inside = (token < count) & (m < TOKENS * G)
    at = length - count + tl.minimum(token, count - 1)
    rows = (start + token).to(tl.int64)
    mask = inside[:, None] & (d < D)
    last = length - count + tl.minimum(first_token + TOKENS, count) - 1
    num_pages = last // PAGE + 1
    splits = (num_pages + SPLIT - 1) // SPLIT
    table = tables + sequence.to(tl.int64) * table_stride
    pages = kv + layer_offset + h * PAGE * D
    out_at = out + rows[:, None] * (N * D) + head[:, None] * D + d
    split = tl.program_id(2)
    if split < splits:
        queries = tl.load(q + rows[:, None] * q_stride + head[:, None] * D + d, mask=mask, other=0.0)
        acc, peak, total = _split(
            queries, pages, table, split * SPLIT, tl.minimum(split * SPLIT + SPLIT, num_pages), at, last,
            scale * LOG2E, block_stride, t, dk, d, K, D, PAGE, BM, BD,
        )  # fmt: skip
        if PARTS:
            if splits == 1:
                tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
            else:
                base = (tile * K + h) * most.to(tl.int64)
                part = (base + split) * G + m
                mine = m < G
                tl.store(sums + part[:, None] * D + d, acc, mask=mine[:, None] & (d < D))
                tl.store(peaks + part * 2, peak, mask=mine)
                tl.store(peaks + part * 2 + 1, total, mask=mine)
                tl.debug_barrier()  # all of the program's stores come before its arrival
                before = tl.atomic_add(arrived + tile * K + h, 1, sem="acq_rel", scope="gpu")
                if before == splits - 1:
                    tl.store(arrived + tile * K + h, 0)
                    whole = tl.zeros([BM, BD], tl.float32)
                    top = tl.full([BM], float("-inf"), tl.float32)
                    sum_ = tl.zeros([BM], tl.float32)
                    for s in range(splits):
                        one = (base + s) * G + m
                        own = tl.load(
                            sums + one[:, None] * D + d, mask=mine[:, None] & (d < D), other=0.0, cache_modifier=".cg"
                        )
                        own_peak = tl.load(peaks + one * 2, mask=mine, other=0.0, cache_modifier=".cg")
                        own_total = tl.load(peaks + one * 2 + 1, mask=mine, other=1.0, cache_modifier=".cg")
                        whole, top, sum_ = _fold(whole, top, sum_, own, own_peak, own_total)
                    tl.store(out_at, (whole / sum_[:, None]).to(out.dtype.element_ty), mask=mask)
        else:
            for s in range(1, splits):
                own, own_peak, own_total = _split(
                    queries, pages, table, s * SPLIT, tl.minimum(s * SPLIT + SPLIT, num_pages), at, last,
                    scale * LOG2E, block_stride, t, dk, d, K, D, PAGE, BM, BD,
                )  # fmt: skip
                acc, peak, total = _fold(acc, peak, total, own, own_peak, own_total)
            tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
