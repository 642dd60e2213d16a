"""Attention over paged keys and values on a CPU, by dot products of bfloat16 pairs (see tiles). Imports numba.

Of many queries, in two kernels: the first lays the pages of a prompt's context out for tiles, once for all its queries;
the second takes 12 query rows of a kv head at a time. Of a few queries, in one, which reads pages as they lie. Scores
of up to 512 keys, their powers and the weighted sum stay in a core's caches, and sums are faded as the largest score
grows (Dao, "FlashAttention-2", 2023). Sums are float32; weights of keys are rounded to bfloat16. Dimensions as in cpu.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from flowinfer.kernels.loops import (
    fill,
    kernel,
    largest,
    loop,
    narrowed_up,
    num_threads,
    pointer,
    rough_exp2,
    scale,
    thread_number,
    write_row,
)
from flowinfer.kernels.tiles import COLUMNS, add_rows, scores, tile

ROWS = 12  # of a tile
KEYS = 512  # whose scores a tile has at a time
PANEL = 64  # keys that are laid out together
_SCORE_BYTES = 4 * (KEYS + 16)  # of a row, so that rows don't share the lines of a cache
_WEIGHT_BYTES = 2 * (KEYS + 32)

_scores = tile(ROWS, 2, start="zero", half=False)
_add_weighted = tile(ROWS, 2, start="sum", half=False)

FEW = 4  # rows that pages are read for at a time
_one_64, _two_64, _three_64, _four_64 = (scores(rows, 2) for rows in range(1, FEW + 1))
_one_128, _two_128, _three_128, _four_128 = (scores(rows, 4) for rows in range(1, FEW + 1))
_add_one, _add_two, _add_three, _add_four = (add_rows(rows) for rows in range(1, FEW + 1))


def reads_pages(head_dim: int, block_tokens: int) -> bool:
    """Whether attend_pages has loops for such heads and pages."""
    return head_dim in (64, 128) and block_tokens % 16 == 0 and KEYS % block_tokens == 0


def packed_bytes(length: int, kv_heads: int, head_dim: int) -> int:
    """Of a context's keys and values laid out for tiles."""
    return 4 * kv_heads * head_dim * (-(-length // PANEL) * PANEL)


def thread_numbers(head_dim: int) -> int:
    """float32 numbers of scratch that attend_tiles needs a thread."""
    return ROWS * (_SCORE_BYTES + _WEIGHT_BYTES) // 4 + ROWS * (head_dim + 2)


@loop
def _pack_keys(row, at, d, out):
    """A key's pairs, each PANEL pairs apart."""
    pairs = carray(pointer(row), d // 2, np.uint32)
    to = carray(pointer(out), d // 2 * PANEL, np.uint32)
    for i in range(d // 2):
        to[i * PANEL + at] = pairs[i]


@loop
def _pack_values(first, second, d, out):
    """Two tokens' values side by side; second 0: behind the end."""
    to = carray(pointer(out), d, np.uint32)
    low = carray(pointer(first), d, np.uint16)
    if second:
        high = carray(pointer(second), d, np.uint16)
        for i in range(d):
            to[i] = np.uint32(low[i]) | np.uint32(high[i]) << np.uint32(16)
    else:
        for i in range(d):
            to[i] = np.uint32(low[i])


@loop
def _clear(address, bytes):
    fill(carray(pointer(address), bytes, np.uint8), 0, bytes, np.uint8(0))


PACK_PAGES = "kv packed chunks tables num_chunks k d layer layers block_tokens width"


@kernel
def pack_pages(arguments):
    """chunks int64 rows (first token, queries, context, row of the block table, place in `packed`)."""
    kv, packed, chunks, tables, num_chunks, k, d, layer, layers, block_tokens, width = carray(arguments, 11)
    me, threads = np.int64(thread_number()), np.int64(num_threads())
    rows = carray(pointer(chunks), (num_chunks, 5), np.int64)
    size = 2 * d
    for chunk in range(num_chunks):
        _, _, length, sequence, place = rows[chunk]
        blocks = carray(pointer(tables + 4 * sequence * width), width, np.int32)
        panels = (length + PANEL - 1) // PANEL
        for item in range(k * panels * me // threads, k * panels * (me + 1) // threads):
            head, panel = item // panels, item % panels
            keys = packed + place + head * panels * 2 * PANEL * size + panel * PANEL * size
            values = keys + panels * PANEL * size
            held = min(PANEL, length - panel * PANEL)
            if held < PANEL:
                _clear(keys, PANEL * size)
                _clear(values, PANEL * size)
            before = np.int64(0)
            for at in range(held):
                token = panel * PANEL + at
                row = ((blocks[token // block_tokens] * layers + layer) * 2 * k + head) * block_tokens
                key = kv + (row + token % block_tokens) * size
                value = key + k * block_tokens * size
                _pack_keys(key, at, d, keys)
                if at % 2:
                    _pack_values(before, value, d, values + (at - 1) * size)
                elif at == held - 1:
                    _pack_values(value, 0, d, values + at * size)
                before = value


@loop
def _powers(scores, n, shift, out):
    """out = 2 ** (scores - shift) in bfloat16; returns their sum."""
    total = np.float32(0)
    for i in range(n):
        power = rough_exp2(scores[i] - shift)
        out[i] = narrowed_up(power)
        total += power
    return total


@loop
def _weigh(scores, weights, total, d, seen, behind, peak, mass, r):
    """A row's weights of `behind` keys of which it sees `seen`, and what it has summed so far faded to them."""
    row = carray(pointer(scores), KEYS, np.float32)
    out = carray(pointer(weights), KEYS, np.uint16)
    if seen > 0:
        higher = max(peak[r], largest(row, seen))
        if higher > peak[r]:
            fade = rough_exp2(peak[r] - higher)
            mass[r] *= fade
            scale(carray(pointer(total), d, np.float32), d, fade)
            peak[r] = higher
        mass[r] += _powers(row, seen, peak[r], out)
    for i in range(max(seen, 0), behind):
        out[i] = np.uint16(0)


ATTEND_TILES = "queries packed out chunks room apart num_chunks tokens k group d"


@kernel
def attend_tiles(arguments):
    """chunks as in pack_pages; queries [K, T, G, D] and out [T, N D] bfloat16."""
    queries, packed, out, chunks, room, apart, num_chunks, tokens, k, group, d = carray(arguments, 11)
    me, threads = np.int64(thread_number()), np.int64(num_threads())
    rows = carray(pointer(chunks), (num_chunks, 5), np.int64)
    size = 2 * d
    points = room + me * apart
    weights = points + ROWS * _SCORE_BYTES
    total = weights + ROWS * _WEIGHT_BYTES
    sums = carray(pointer(total), ROWS * d, np.float32)
    peak = carray(pointer(total + 4 * ROWS * d), ROWS, np.float32)
    mass = carray(pointer(total + 4 * ROWS * (d + 1)), ROWS, np.float32)
    for chunk in range(num_chunks):
        start, count, length, _, place = rows[chunk]
        padded = (length + PANEL - 1) // PANEL * PANEL
        before, num_rows = length - count, count * group
        tiles = (num_rows + ROWS - 1) // ROWS
        for item in range(me, k * tiles, threads):
            head, first = item // tiles, min(item % tiles * ROWS, num_rows - ROWS)
            query = queries + ((head * tokens + start) * group + first) * size
            keys = packed + place + head * 2 * padded * size
            values = keys + padded * size
            fill(sums, 0, ROWS * d, np.float32(0))
            fill(peak, 0, ROWS, np.float32(-np.inf))
            fill(mass, 0, ROWS, np.float32(0))
            reach = before + (first + ROWS - 1) // group + 1
            for begin in range(0, reach, KEYS):
                held = min(KEYS, reach - begin)
                for at in range(0, held, 32):
                    panel = keys + (begin + at) // PANEL * PANEL * size + (begin + at) % PANEL * 4
                    _scores(query, size, panel, 4 * PANEL, d // 2, points + 4 * at, _SCORE_BYTES, 0)
                pairs = (held + 1) // 2
                for r in range(ROWS):
                    seen = min(held, before + (first + r) // group + 1 - begin)
                    _weigh(
                        points + r * _SCORE_BYTES, weights + r * _WEIGHT_BYTES, total + 4 * r * d, d,
                        seen, 2 * pairs, peak, mass, r,
                    )  # fmt: skip
                for at in range(0, d, 32):
                    columns = values + begin * size + 4 * at
                    _add_weighted(weights, _WEIGHT_BYTES, columns, 2 * size, pairs, total + 4 * at, 4 * d, 0)
            for r in range(ROWS):
                row = carray(pointer(total + 4 * r * d), d, np.float32)
                scale(row, d, np.float32(1) / mass[r])
                t = start + (first + r) // group
                write_row(row, d, 0, out + ((t * k + head) * group + (first + r) % group) * size)


@loop
def _score_64(rows, query, keys, groups, out, near):
    """Products of up to 4 rows with 16 keys a group, of heads of 64."""
    if rows == 1:
        _one_64(query, 128, keys, 128, groups, out, _SCORE_BYTES, near)
    elif rows == 2:
        _two_64(query, 128, keys, 128, groups, out, _SCORE_BYTES, near)
    elif rows == 3:
        _three_64(query, 128, keys, 128, groups, out, _SCORE_BYTES, near)
    elif rows == 4:
        _four_64(query, 128, keys, 128, groups, out, _SCORE_BYTES, near)


@loop
def _score_128(rows, query, keys, groups, out, near):
    """And of heads of 128."""
    if rows == 1:
        _one_128(query, 256, keys, 256, groups, out, _SCORE_BYTES, near)
    elif rows == 2:
        _two_128(query, 256, keys, 256, groups, out, _SCORE_BYTES, near)
    elif rows == 3:
        _three_128(query, 256, keys, 256, groups, out, _SCORE_BYTES, near)
    elif rows == 4:
        _four_128(query, 256, keys, 256, groups, out, _SCORE_BYTES, near)


@loop
def _score(rows, d, query, keys, groups, out, near):
    if d == 64:
        _score_64(rows, query, keys, groups, out, near)
    else:
        _score_128(rows, query, keys, groups, out, near)


@loop
def _add(rows, weights, values, apart, count, out, apart_out, near):
    """64 columns of the weighted sums of up to 4 rows."""
    if rows == 1:
        _add_one(weights, _WEIGHT_BYTES, values, apart, count, out, apart_out, near)
    elif rows == 2:
        _add_two(weights, _WEIGHT_BYTES, values, apart, count, out, apart_out, near)
    elif rows == 3:
        _add_three(weights, _WEIGHT_BYTES, values, apart, count, out, apart_out, near)
    elif rows == 4:
        _add_four(weights, _WEIGHT_BYTES, values, apart, count, out, apart_out, near)


ATTEND_PAGES = (
    "queries kv out few parts tables room apart tokens k group d layer layers block_tokens width num_few num_parts"
)


@kernel
def attend_pages(arguments):
    """As cpu.attend_few, of bfloat16; few as there. Keys behind what a sequence holds are read, and left out."""
    given = carray(arguments, 18)
    queries, kv, out, few, parts, tables, room, apart = given[:8]
    tokens, k, group, d, layer, layers, block_tokens, width, num_few, num_parts = given[8:]
    me, threads = np.int64(thread_number()), np.int64(num_threads())
    sequences, bounds = carray(pointer(few), (num_few, 4), np.int32), carray(pointer(parts), num_parts + 1, np.int64)
    size, page_bytes = 2 * d, 2 * d * block_tokens
    points = room + me * apart
    weights = points + FEW * _SCORE_BYTES
    total = weights + FEW * _WEIGHT_BYTES
    sums = carray(pointer(total), FEW * d, np.float32)
    peak = carray(pointer(total + 4 * FEW * d), FEW, np.float32)
    mass = carray(pointer(total + 4 * FEW * (d + 1)), FEW, np.float32)
    for own in range(me, num_parts, threads):
        for item in range(bounds[own], bounds[own + 1]):
            start, count, length, sequence = sequences[item // k]
            head = item % k
            blocks = carray(pointer(tables + 4 * sequence * width), width, np.int32)
            _, _, next_length, next_sequence = sequences[min(item + 1, bounds[own + 1] - 1) // k]
            next_blocks = carray(pointer(tables + 4 * next_sequence * width), width, np.int32)
            next_pages = (next_length + block_tokens - 1) // block_tokens if item + 1 < bounds[own + 1] else 0
            before, num_rows = length - count, count * group
            parts_of = (num_rows + FEW - 1) // FEW
            for part in range(parts_of):
                first, last = num_rows * part // parts_of, num_rows * (part + 1) // parts_of
                rows = last - first
                query = queries + ((head * tokens + start) * group + first) * size
                fill(sums, 0, rows * d, np.float32(0))
                fill(peak, 0, rows, np.float32(-np.inf))
                fill(mass, 0, rows, np.float32(0))
                reach = before + (last - 1) // group + 1
                for begin in range(0, reach, KEYS):
                    held = min(KEYS, reach - begin)
                    for at in range(0, held, block_tokens):
                        page = (begin + at) // block_tokens
                        keys = kv + ((blocks[page] * layers + layer) * 2 * k + head) * page_bytes
                        groups = (min(block_tokens, held - at) + 15) // 16
                        _score(rows, d, query, keys, groups, points + 4 * at, keys + k * page_bytes)
                    even = (held + 1) // 2 * 2
                    for r in range(rows):
                        seen = min(held, before + (first + r) // group + 1 - begin)
                        _weigh(
                            points + r * _SCORE_BYTES, weights + r * _WEIGHT_BYTES, total + 4 * r * d, d,
                            seen, even, peak, mass, r,
                        )  # fmt: skip
                    for at in range(0, held, block_tokens):
                        page = (begin + at) // block_tokens
                        values = kv + (((blocks[page] * layers + layer) * 2 + 1) * k + head) * page_bytes
                        here = min(block_tokens, held - at)
                        near = values  # the keys that are read next: of this item, or of the one behind it
                        if begin + KEYS + at < reach:
                            block = blocks[page + KEYS // block_tokens]
                            near = kv + ((block * layers + layer) * 2 * k + head) * page_bytes
                        elif begin + KEYS >= reach and at // block_tokens < next_pages:
                            block = next_blocks[at // block_tokens]
                            near = kv + ((block * layers + layer) * 2 * k + (item + 1) % k) * page_bytes
                        for column in range(0, d, COLUMNS):
                            to, place = total + 4 * column, values + 2 * column
                            _add(rows, weights + 2 * at, place, size, here, to, 4 * d, near + 2 * column)
                for r in range(rows):
                    row = carray(pointer(total + 4 * r * d), d, np.float32)
                    scale(row, d, np.float32(1) / mass[r])
                    t = start + (first + r) // group
                    write_row(row, d, 0, out + ((t * k + head) * group + (first + r) % group) * size)
