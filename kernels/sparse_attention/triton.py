"""sparse_attention in Triton: a program for a token and a tile of heads and, where tokens are few, a split of the keys.

No product is fused with a sum: a compiler might do so in one form of the kernel and not in the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flowinfer.kernels.sparse_attention import PROGRAMS, SPLIT_TILES, head_rows, num_splits, tile_keys

LAUNCH: tuple[int, int] | None = None  # warps and stages, to try others
PLACED_FROM = 256  # head sizes from which places of keys are looked up before: 265 to 194 us for 512 tokens of a prompt
_PLACES = 512  # places that a program looks up
_PLACE_BYTES = 256 << 20  # that they take at most


def launch(q, window, entries, rows, reach, rate, sinks, chosen, turn, parts, fixed, out):
    """Arguments as checked by sparse_attention."""
    tokens, heads, size = q.shape
    block_h, keys = head_rows(heads), tile_keys(size, q.element_size())
    if size >= 256 and q.element_size() == 4:
        block_h = 16  # 64 heads of float32 would take half of a multiprocessor's memory
    head_tiles = triton.cdiv(heads, block_h)
    most = 0
    if entries is not None:
        most = rows.most_tokens // rate if chosen is None else chosen.shape[1]
    splits = num_splits(reach, most, keys)
    apart = (
        parts is not None and splits > 1 and tokens * head_tiles * splits <= PROGRAMS + head_tiles * splits
        and parts.peaks.numel() >= 2 * tokens * heads * splits
    )  # fmt: skip
    sums, peaks = parts if apart else (None, None)
    cos, sin = turn if turn is not None else (None, None)
    sizes = {
        "N": heads, "D": size, "BD": max(16, triton.next_power_of_2(size)), "SPLIT": SPLIT_TILES, "BK": keys,
        "WINDOW_TILES": -(-reach // keys), "RATE": rate, "CHOSEN": chosen is not None, "ENTRIES": entries is not None,
        "TURNED": 0 if turn is None else 2 * cos.shape[1],
    }  # fmt: skip
    width = (sizes["WINDOW_TILES"] + triton.cdiv(most, keys)) * keys
    places = None
    if size >= PLACED_FROM and tokens * width * 4 <= _PLACE_BYTES:
        places = torch.empty(tokens, width, dtype=torch.int32, device=q.device)
    counts = (rows.slots, rows.positions, chosen, 0 if chosen is None else chosen.shape[1])
    if places is not None:
        _look_up[(tokens, triton.cdiv(width, _PLACES))](
            *counts, rows.window_from, rows.block_tables, places, rows.block_tables.stride(0),
            0 if chosen is None else chosen.stride(0), width,
            REACH=reach, PAGE=rows.block_tokens, BLOCK=_PLACES,
            **{name: sizes[name] for name in ("WINDOW_TILES", "BK", "RATE", "CHOSEN", "ENTRIES")}, num_warps=4,
        )  # fmt: skip
    warps, stages = LAUNCH or ((4, 2) if size < 256 else (8, 3) if q.element_size() == 2 else (8, 1))
    _attend[(tokens, head_tiles, splits if apart else 1)](
        q, window, *counts, rows.window_from, rows.block_tables, places, sinks, cos, sin, sums, peaks, out,
        q.stride(0), window.stride(0), rows.block_tables.stride(0), 0 if chosen is None else chosen.stride(0),
        _between(window, entries), width, size**-0.5, splits,
        PLACED=places is not None, REACH=reach, PAGE=rows.block_tokens, BH=block_h, SINKS=sinks is not None,
        PARTS=apart, FIXED=fixed, **sizes,
        num_warps=warps, num_stages=stages, enable_fp_fusion=False,
    )  # fmt: skip
    if apart:
        _merge[(tokens, heads)](
            *counts, cos, sin, sums, peaks, out, 0 if chosen is None else chosen.stride(0), splits, **sizes,
            num_warps=4 if size >= 256 else 1, enable_fp_fusion=False,
        )  # fmt: skip


def _between(window, entries):
    """Elements from the first of one section to that of the other, in the same arena."""
    return 0 if entries is None else (entries.data_ptr() - window.data_ptr()) // window.element_size()


@triton.jit
def _num_tiles(
    slots, positions, chosen, most, chosen_stride, t,
    WINDOW_TILES: tl.constexpr, BK: tl.constexpr, RATE: tl.constexpr, CHOSEN: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Tiles of keys that a token sees, and how many entries; no tiles for padding."""
    count = 0
    if ENTRIES:
        count = (tl.load(positions + t) + 1) // RATE
        if CHOSEN:
            count = tl.minimum(count, most)
    tiles = WINDOW_TILES + (count + BK - 1) // BK
    return tl.where(tl.load(slots + t) >= 0, tiles, 0), count


@triton.jit
def _fold(acc, peak, total, own, own_peak, own_total):
    """A split added to those before it."""
    high = tl.maximum(peak, own_peak)
    keep = tl.exp2(peak - high)
    share = tl.exp2(own_peak - high)
    return acc * keep[:, None] + own * share[:, None], high, total * keep + own_total * share


@triton.jit
def _finish(
    acc, total, cos, sin, out_at, t, mask,
    R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Divides [R, BD] by the totals, turns its last channels back and stores it."""
    acc = acc / total[:, None]
    if TURNED:
        even, odd = tl.split(tl.reshape(acc, [R, BD // 2, 2]))
        pair = tl.arange(0, BD // 2) - (D - TURNED) // 2
        turned = (pair >= 0) & (pair < TURNED // 2)
        c = tl.load(cos + t * (TURNED // 2) + pair, mask=turned, other=1.0)[None, :]
        s = tl.load(sin + t * (TURNED // 2) + pair, mask=turned, other=0.0)[None, :]
        acc = tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), [R, BD])
    tl.store(out_at, acc.to(out_at.dtype.element_ty), mask=mask)


@triton.jit
def _place(
    position, low, count, table, chosen, first, k,
    WINDOW_TILES: tl.constexpr, BK: tl.constexpr, REACH: tl.constexpr, PAGE: tl.constexpr, RATE: tl.constexpr,
    CHOSEN: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Of keys first + k: which are seen, their blocks, their rows in the section; those of the window come first."""
    at = position - (REACH - 1) + first + k
    seen = (at >= low) & (at <= position)
    page = at // PAGE
    row = at % PAGE
    if ENTRIES:
        entry = first + k - WINDOW_TILES * BK
        in_window = entry < 0
        there = (entry >= 0) & (entry < count)
        number = entry
        if CHOSEN:
            number = tl.load(chosen + entry, mask=there, other=0)
        EACH: tl.constexpr = PAGE // RATE
        seen = tl.where(in_window, seen, there)
        page = tl.where(in_window, page, number // EACH)
        row = tl.where(in_window, row, number % EACH)
    return seen, tl.load(table + page, mask=seen, other=0), row


@triton.jit(do_not_specialize=["most", "table_stride", "chosen_stride", "width"])
def _look_up(
    slots, positions, chosen, most, window_from, tables, places, table_stride, chosen_stride, width,
    REACH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, WINDOW_TILES: tl.constexpr, BK: tl.constexpr,
    RATE: tl.constexpr, CHOSEN: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Places of a token's keys: block * PAGE + row, -1 where none is seen."""
    t = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    tiles, count = _num_tiles(slots, positions, chosen, most, chosen_stride, t, WINDOW_TILES, BK, RATE, CHOSEN, ENTRIES)
    if first < tiles * BK:
        k = tl.arange(0, BLOCK)
        table = tables + tl.load(slots + t).to(tl.int64) * table_stride
        own = chosen + t * chosen_stride if CHOSEN else chosen
        seen, block, row = _place(
            tl.load(positions + t), tl.maximum(tl.load(window_from + t), 0), count, table, own, first, k,
            WINDOW_TILES, BK, REACH, PAGE, RATE, CHOSEN, ENTRIES,
        )  # fmt: skip
        tl.store(places + t * width + first + k, tl.where(seen, block * PAGE + row, -1), mask=first + k < width)


@triton.jit
def _split(
    queries, window, table, chosen, places, first, end, position, low, count, factor, block_stride, between,
    peak, total,
    D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, WINDOW_TILES: tl.constexpr,
    REACH: tl.constexpr, PAGE: tl.constexpr, RATE: tl.constexpr, CHOSEN: tl.constexpr, ENTRIES: tl.constexpr,
    PLACED: tl.constexpr,
):  # fmt: skip
    """Online softmax over tiles [first, end), first those of the window: sums, peaks and totals of the heads."""
    k = tl.arange(0, BK)
    d = tl.arange(0, BD)[None, :]
    acc = tl.zeros([BH, BD], tl.float32)
    for tile in range(first, end):
        if PLACED:
            place = tl.load(places + tile * BK + k)
            seen = place >= 0
            block = tl.maximum(place, 0) // PAGE
            row = tl.maximum(place, 0) % PAGE
        else:
            seen, block, row = _place(
                position, low, count, table, chosen, tile * BK, k, WINDOW_TILES, BK, REACH, PAGE, RATE, CHOSEN, ENTRIES
            )  # fmt: skip
        offset = tl.where(tile < WINDOW_TILES, 0, between)
        keys_at = window + (block.to(tl.int64) * block_stride + offset + row * D)[:, None] + d
        keys = tl.load(keys_at, mask=seen[:, None] & (d < D), other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * factor
        scores = tl.where(seen[None, :], scores, float("-inf"))
        high = tl.maximum(tl.maximum(peak, tl.max(scores, 1)), -1e30)  # a tile before the start has none
        keep = tl.exp2(peak - high)
        weights = tl.exp2(scores - high[:, None])
        total = total * keep + tl.sum(weights, 1)
        acc = tl.dot(weights.to(keys.dtype), keys, acc * keep[:, None], input_precision="ieee")
        peak = high
    return acc, peak, total


@triton.jit(do_not_specialize=["most", "table_stride", "chosen_stride", "splits", "width"])
def _attend(
    q, window, slots, positions, chosen, most, window_from, tables, places, sinks, cos, sin, sums, peaks, out,
    q_stride, block_stride, table_stride, chosen_stride, between, width, scale, splits,
    N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SPLIT: tl.constexpr, WINDOW_TILES: tl.constexpr,
    BK: tl.constexpr, RATE: tl.constexpr, CHOSEN: tl.constexpr, ENTRIES: tl.constexpr, TURNED: tl.constexpr,
    REACH: tl.constexpr, PAGE: tl.constexpr, BH: tl.constexpr, SINKS: tl.constexpr, PARTS: tl.constexpr,
    FIXED: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    LOG2E: tl.constexpr = 1.4426950408889634
    t = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d = tl.arange(0, BD)[None, :]
    mask = (h < N)[:, None] & (d < D)
    out_at = out + (t * N + h)[:, None] * D + d
    tiles, count = _num_tiles(slots, positions, chosen, most, chosen_stride, t, WINDOW_TILES, BK, RATE, CHOSEN, ENTRIES)
    mine = (tiles + SPLIT - 1) // SPLIT
    if tiles == 0:
        if split == 0:
            tl.store(out_at, tl.zeros([BH, BD], out.dtype.element_ty), mask=mask)
    elif split < mine:
        position = tl.load(positions + t)
        low = tl.maximum(tl.load(window_from + t), 0)
        table = tables + tl.load(slots + t).to(tl.int64) * table_stride
        own = chosen + t * chosen_stride if CHOSEN else chosen
        mine_at = places + t * width if PLACED else places
        queries = tl.load(q + t * q_stride + h[:, None] * D + d, mask=mask, other=0.0)
        peak = tl.full([BH], float("-inf"), tl.float32)
        total = tl.zeros([BH], tl.float32)
        if SINKS:
            sink = tl.load(sinks + h, mask=h < N, other=0.0).to(tl.float32) * LOG2E
            peak = tl.where(split == 0, sink, peak)
            total = tl.where(split == 0, 1.0, total)
        end = tiles
        if PARTS or FIXED:
            end = tl.minimum(split * SPLIT + SPLIT, tiles)
        acc, peak, total = _split(
            queries, window, table, own, mine_at, split * SPLIT, end, position, low, count, scale * LOG2E,
            block_stride, between, peak, total,
            D, BD, BH, BK, WINDOW_TILES, REACH, PAGE, RATE, CHOSEN, ENTRIES, PLACED,
        )  # fmt: skip
        if PARTS:
            part = (t * splits + split) * N + h
            tl.store(sums + part[:, None] * D + d, acc, mask=mask)
            tl.store(peaks + part * 2, peak, mask=h < N)
            tl.store(peaks + part * 2 + 1, total, mask=h < N)
        elif FIXED:  # a second sum beside the first: in full registers it costs time
            for s in range(1, mine):
                next_acc, next_peak, next_total = _split(
                    queries, window, table, own, mine_at, s * SPLIT, tl.minimum(s * SPLIT + SPLIT, tiles),
                    position, low, count, scale * LOG2E, block_stride, between,
                    tl.full([BH], float("-inf"), tl.float32), tl.zeros([BH], tl.float32),
                    D, BD, BH, BK, WINDOW_TILES, REACH, PAGE, RATE, CHOSEN, ENTRIES, PLACED,
                )  # fmt: skip
                acc, peak, total = _fold(acc, peak, total, next_acc, next_peak, next_total)
        if not PARTS:
            _finish(acc, total, cos, sin, out_at, t, mask, BH, D, BD, TURNED)


@triton.jit(do_not_specialize=["most", "chosen_stride", "splits"])
def _merge(
    slots, positions, chosen, most, cos, sin, sums, peaks, out, chosen_stride, splits,
    N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SPLIT: tl.constexpr, WINDOW_TILES: tl.constexpr,
    BK: tl.constexpr, RATE: tl.constexpr, CHOSEN: tl.constexpr, ENTRIES: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) + tl.arange(0, 1)
    d = tl.arange(0, BD)[None, :]
    mask = d < D
    tiles, _ = _num_tiles(slots, positions, chosen, most, chosen_stride, t, WINDOW_TILES, BK, RATE, CHOSEN, ENTRIES)
    if tiles > 0:
        mine = (tiles + SPLIT - 1) // SPLIT
        part = t * splits * N + h
        acc = tl.load(sums + part[:, None] * D + d, mask=mask, other=0.0)
        peak = tl.load(peaks + part * 2)
        total = tl.load(peaks + part * 2 + 1)
        for s in range(1, mine):
            part = (t * splits + s) * N + h
            own = tl.load(sums + part[:, None] * D + d, mask=mask, other=0.0)
            acc, peak, total = _fold(
                acc, peak, total, own, tl.load(peaks + part * 2), tl.load(peaks + part * 2 + 1)
            )  # fmt: skip
        _finish(acc, total, cos, sin, out + (t * N + h)[:, None] * D + d, t, mask, 1, D, BD, TURNED)
