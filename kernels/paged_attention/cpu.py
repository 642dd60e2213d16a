"""Causal attention over paged keys and values for a CPU, after rope.cpu has written them. Imports numba.

Two ways, by how many queries a sequence has in the step:

- a few (a token that is decoded, drafts): pages are read where they lie, each once for all query heads that share a
  kv head; scores, softmax and sums in float32, a page at a time, as Dao, "FlashAttention-2" (2023) does;
- many (a chunk of a prompt): in tiles of bfloat16 pairs where they pay (see cpu_tiles); elsewhere tiles of queries by
  the library's products over the gathered keys, with the softmax between them in place. Keys behind a tile are left
  out, and what is summed is divided at the end.

A row's result doesn't depend on what runs beside it in the first way. Dimensions: T tokens, N query heads, K kv heads,
G = N / K, D head size, S sequences, L keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from numba import carray
from torch import Tensor

from flowinfer.kernels.compiled import pairs_pay, scratch, wide
from flowinfer.kernels.loops import (
    exp2,
    fill,
    kernel,
    largest,
    loop,
    narrowed_up,
    num_threads,
    of_rank,
    part,
    pointer,
    prefetch,
    rank,
    read_row,
    rough_exp2,
    scale,
    thread_number,
    widened,
    write_row,
)
from flowinfer.kernels.paged_attention.cpu_tiles import (
    attend_pages,
    attend_tiles,
    pack_pages,
    packed_bytes,
    reads_pages,
    thread_numbers,
)
from flowinfer.kernels.rope import Heads

FEW_ROWS = 48  # query rows of a kv head up to which a sequence counts as one with few; one query may have more
TILE_ROWS = 768  # of a tile: its scores over 2,048 keys are 3 MB in bfloat16
_USUAL = 64  # tokens of a page
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A sequence with many queries: its tokens of the step, its context with them, its pages in layer 0.

    pages int64 [2 * K * blocks]: rows of block_tokens * D numbers, of all heads' keys and then of their values.
    """

    start: int
    count: int
    length: int
    pages: Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """The same for all layers. few: int32 rows of (first token, queries, context, row of the block table), or None.

    few_keys: keys and values that they read.  parts int64 [parts + 1]: bounds of work for one thread each, counted by
    (sequence, kv head).  most: query rows of a kv head that one of the few has at most.  chunks: the many, for the
    library's products.  tiled: those for tiles, int64 rows (first token, queries, context, row of the block table,
    place of its keys among `packed` bytes), or None.
    """

    few: Tensor | None
    few_keys: int
    parts: Tensor
    most: int
    tables: Tensor
    chunks: tuple[Chunk, ...]
    tiled: Tensor | None
    packed: int


def plan_pages(
    query_starts: Int32s,
    kv_lens: Int32s,
    block_tables: Int32s,
    heads: Heads,
    kv: Tensor,
    *,
    invariant: bool = False,
) -> Plan:
    """Arguments as in StepInput; kv the arena [blocks, layers, 2, K, block_tokens, D].

    invariant: all queries go the first way, some at a time, so that a row's bytes never depend on its chunk.
    """
    counts = np.diff(query_starts)
    most = max(1, FEW_ROWS // (heads.num_heads // heads.num_kv_heads))
    is_few = (counts > 0) & (invariant | (counts <= most))
    few = _in_parts(query_starts[:-1], counts, kv_lens, np.flatnonzero(is_few), most)
    many = np.flatnonzero(~is_few & (counts > 0))
    by_tiles = kv.dtype is torch.bfloat16 and heads.head_dim % 32 == 0 and pairs_pay()
    chunks = (
        () if by_tiles else tuple(_chunk(s, query_starts, counts, kv_lens, block_tables, kv) for s in many.tolist())
    )
    tiled, packed = _tiled(query_starts[many], counts[many], kv_lens[many], many, heads) if by_tiles else (None, 0)
    tables = torch.from_numpy(np.ascontiguousarray(block_tables, np.int32))
    parts = torch.from_numpy(_parts(few[:, 2], heads.num_kv_heads, torch.get_num_threads()))
    keys = 2 * heads.num_kv_heads * int(few[:, 2].sum())
    rows = max(FEW_ROWS, heads.num_heads // heads.num_kv_heads)
    return Plan(torch.from_numpy(few) if len(few) else None, keys, parts, rows, tables, chunks, tiled, packed)


def _chunk(s: int, query_starts: Int32s, counts: Int32s, kv_lens: Int32s, block_tables: Int32s, kv: Tensor) -> Chunk:
    pages = _pages(block_tables[s, : -(-int(kv_lens[s]) // kv.shape[4])], kv)
    return Chunk(int(query_starts[s]), int(counts[s]), int(kv_lens[s]), pages)


def _tiled(starts: Int32s, counts: Int32s, kv_lens: Int32s, members: Int64s, heads: Heads) -> tuple[Tensor | None, int]:
    """Plan.tiled and Plan.packed."""
    if not len(members):
        return None, 0
    sizes = [packed_bytes(int(length), heads.num_kv_heads, heads.head_dim) for length in kv_lens]
    ends = np.cumsum(sizes)
    rows = np.stack((starts, counts, kv_lens, members, ends - sizes), 1)
    return torch.from_numpy(rows.astype(np.int64)), int(ends[-1])


def _in_parts(starts: Int32s, counts: Int32s, kv_lens: Int32s, members: Int64s, most: int) -> Int32s:
    """Rows of Plan.few: the queries of each member, at most `most` a row."""
    pieces = -(-counts[members] // most)
    s = np.repeat(members, pieces)
    first = (np.arange(len(s)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
    taken = np.minimum(counts[s] - first, most)
    return np.stack((starts[s] + first, taken, kv_lens[s] - counts[s] + first + taken, s), 1).astype(np.int32)


def _pages(blocks: Int32s, kv: Tensor) -> Tensor:
    _, layers, _, k, _, _ = kv.shape
    first = blocks.astype(np.int64) * (layers * 2 * k)
    return torch.from_numpy((np.arange(2 * k)[:, None] + first).ravel())


def _parts(lengths: Int32s, num_kv_heads: int, threads: int) -> npt.NDArray[np.int64]:
    """Bounds between threads, so that each reads about as many keys."""
    read = np.cumsum(np.repeat(lengths.astype(np.int64), num_kv_heads))
    total = int(read[-1]) if len(read) else 0
    inner = np.searchsorted(read, [total * part // threads for part in range(1, threads)])
    return np.array([0, *inner, len(read)], np.int64)


def attend(queries: Tensor, kv: Tensor, layer: int, plan: Plan) -> Tensor:
    """[T, N D] of queries [K, T, G, D] as rope.cpu makes them; kv the arena [blocks, layers, 2, K, block_tokens, D]."""
    k, tokens, group, d = queries.shape
    out = queries.new_empty(tokens, k * group * d)
    layers, block_tokens, width = kv.shape[1], kv.shape[4], plan.tables.shape[1]
    if plan.few is not None:
        shape = tokens, k, group, d, layer, layers, block_tokens, width, len(plan.few)
        shared = queries, kv, out, plan.few, plan.parts, plan.tables
        if pages_in_pairs(kv):
            room, apart = scratch(thread_numbers(d))
            attend_pages(*shared, room, apart, *shape, len(plan.parts) - 1, work=plan.few_keys * d)
        else:
            room, apart = scratch(few_numbers(plan.most, block_tokens, d))
            attend_few(
                *shared, room, apart, *shape, wide(kv), plan.most, len(plan.parts) - 1, work=plan.few_keys * d
            )  # fmt: skip
    if plan.tiled is not None:
        packed, num = torch.empty(plan.packed, dtype=torch.uint8), len(plan.tiled)
        pack_pages(kv, packed, plan.tiled, plan.tables, num, k, d, layer, layers, block_tokens, width, work=plan.packed)
        room, apart = scratch(thread_numbers(d))
        attend_tiles(
            queries, packed, out, plan.tiled, room, apart, num, tokens, k, group, d, work=tokens * plan.packed
        )  # fmt: skip
    for chunk in plan.chunks:
        _attend_chunk(queries, kv, layer, chunk, out)
    return out


def ready(dtype: torch.dtype, head_dim: int) -> None:
    """Compiles what attention over pages of a usual size needs."""
    pairs = dtype is torch.bfloat16 and pairs_pay()
    in_tiles = pairs and head_dim % 32 == 0
    needed = [attend_pages if pairs and reads_pages(head_dim, _USUAL) else attend_few]
    needed += [pack_pages, attend_tiles] if in_tiles else [_softmax_rows, _write_divided]
    for each in needed:
        _ = each.address


def pages_in_pairs(kv: Tensor) -> bool:
    """Whether a few queries of this arena, [blocks, layers, 2, K, block_tokens, D], go by attend_pages."""
    return kv.dtype is torch.bfloat16 and pairs_pay() and reads_pages(kv.shape[5], kv.shape[4])


def few_numbers(most: int, block_tokens: int, head_dim: int) -> int:
    """float32 numbers of scratch that attend_few needs a thread."""
    return 2 * block_tokens * head_dim + most * (2 * head_dim + block_tokens + 2)


def _attend_chunk(queries: Tensor, kv: Tensor, layer: int, chunk: Chunk, out: Tensor) -> None:
    k, _, group, d = queries.shape
    pages = kv.view(-1, kv.shape[4] * d)[2 * k * layer :]
    keys, values = pages.index_select(0, chunk.pages).view(2, k, -1, d)
    each = max(1, TILE_ROWS // group)
    sums = torch.empty(k, chunk.count * group, dtype=torch.float32)
    parts = queries.new_empty(k, chunk.count * group, d)
    own = queries[:, chunk.start : chunk.start + chunk.count]
    before = chunk.length - chunk.count
    for head in range(k):
        rows = own[head].view(-1, d)
        for first in range(0, chunk.count, each):
            last = min(first + each, chunk.count)
            part, seen = slice(first * group, last * group), before + last
            scores = torch.mm(rows[part], keys[head, :seen].t())
            _exponents(scores, sums[head, part], before + first, group)
            torch.mm(scores, values[head, :seen], out=parts[head, part])
    _divide(parts, sums, out, chunk.start, chunk.count, k, group, d)


def _exponents(scores: Tensor, sums: Tensor, before: int, group: int) -> None:
    """Row r sees before + r // group + 1 keys: 2 ** (score - the row's largest) there, 0 behind. sums: of each row."""
    _softmax_rows(scores, sums, *scores.shape, before, group, wide(scores), work=scores.numel())


def _divide(parts: Tensor, sums: Tensor, out: Tensor, start: int, count: int, k: int, group: int, d: int) -> None:
    room, apart = scratch(d)
    _write_divided(parts, sums, out, room, apart, start, count, k, group, d, wide(out), work=2 * parts.numel())


# -------------------------------------------------------------------------------------------------------------- kernels


@loop
def _largest_half(x, n):
    most = rank(np.float32(-np.inf))
    for i in range(n):
        each = rank(widened(x[i]))
        most = each if each > most else most
    return of_rank(most)


@loop
def _powers(x, n, shift):
    """x = 2 ** (x - shift); returns their sum."""
    total = np.float32(0)
    for i in range(n):
        x[i] = exp2(x[i] - shift)
        total += x[i]
    return total


@loop
def _powers_half(x, n, shift):
    total = np.float32(0)
    for i in range(n):
        power = rough_exp2(widened(x[i]) - shift)
        x[i] = narrowed_up(power)
        total += power
    return total


@kernel
def _softmax_rows(arguments):
    scores, sums, rows, n, before, group, is_wide = carray(arguments, 7)
    me, threads = np.int64(thread_number()), np.int64(num_threads())
    total = carray(pointer(sums), rows, np.float32)
    for r in range(rows * me // threads, rows * (me + 1) // threads):
        seen = before + r // group + 1
        if is_wide:
            single = carray(pointer(scores + 4 * r * n), n, np.float32)
            total[r] = _powers(single, seen, largest(single, seen))
            fill(single, seen, n, np.float32(0))
        else:
            half = carray(pointer(scores + 2 * r * n), n, np.uint16)
            total[r] = _powers_half(half, seen, _largest_half(half, seen))
            fill(half, seen, n, np.uint16(0))


@kernel
def _write_divided(arguments):
    parts, sums, out, room, apart, start, count, k, group, d, is_wide = carray(arguments, 11)
    me, threads = np.int64(thread_number()), np.int64(num_threads())
    size = d * (4 if is_wide else 2)
    row = carray(pointer(room + me * apart), d, np.float32)
    total = carray(pointer(sums), k * count * group, np.float32)
    for t in range(count * me // threads, count * (me + 1) // threads):
        for head in range(k * group):
            r = (head // group * count + t) * group + head % group
            read_row(parts + r * size, d, is_wide, row)
            scale(row, d, np.float32(1) / total[r])
            write_row(row, d, is_wide, out + ((start + t) * k * group + head) * size)


@part
def _score(query, keys, count, d, out):
    for j in range(count):
        total = np.float32(0)
        for i in range(d):
            total += query[i] * keys[j, i]
        out[j] = total


@part
def _add_weighted(total, weights, values, count, d):
    """total += weights @ values, four rows at once: total is read and written a quarter as often."""
    for j in range(0, count - 3, 4):
        a, b, c, e = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for i in range(d):
            total[i] += a * values[j, i] + b * values[j + 1, i] + c * values[j + 2, i] + e * values[j + 3, i]
    for j in range(count - count % 4, count):
        weight = weights[j]
        for i in range(d):
            total[i] += weight * values[j, i]


@loop
def _scores(query, keys, count, d, out):
    """Products of one row with `count` others. Usual sizes are constants: such a product is a few instructions."""
    if d == 64:
        _score(query, keys, count, 64, out)
    elif d == 128:
        _score(query, keys, count, 128, out)
    else:
        _score(query, keys, count, d, out)


@loop
def _sum_weighted(total, weights, values, count, d):
    if d == 64:
        _add_weighted(total, weights, values, count, 64)
    elif d == 128:
        _add_weighted(total, weights, values, count, 128)
    else:
        _add_weighted(total, weights, values, count, d)


ATTEND_FEW = (
    "queries kv out few parts tables room apart "
    "tokens k group d layer layers block_tokens width num_few is_wide most num_parts"
)


@kernel
def attend_few(arguments):
    given = carray(arguments, 20)
    queries, kv, out, few, parts, tables, room, apart = given[:8]
    tokens, k, group, d, layer, layers, block_tokens, width, num_few, is_wide, most, num_parts = given[8:]
    me, threads = np.int64(thread_number()), np.int64(num_threads())
    size = d * (4 if is_wide else 2)
    sequences, bounds = carray(pointer(few), (num_few, 4), np.int32), carray(pointer(parts), num_parts + 1, np.int64)
    mine, page_bytes = room + me * apart, 4 * block_tokens * d
    keys = carray(pointer(mine), (block_tokens, d), np.float32)
    values = carray(pointer(mine + page_bytes), (block_tokens, d), np.float32)
    flat_keys = carray(pointer(mine), block_tokens * d, np.float32)
    flat_values = carray(pointer(mine + page_bytes), block_tokens * d, np.float32)
    mine += 2 * page_bytes
    query = carray(pointer(mine), (most, d), np.float32)
    flat_query = carray(pointer(mine), most * d, np.float32)
    total = carray(pointer(mine + 4 * most * d), (most, d), np.float32)
    flat_total = carray(pointer(mine + 4 * most * d), most * d, np.float32)
    weights = carray(pointer(mine + 8 * most * d), block_tokens, np.float32)
    peak = carray(pointer(mine + 8 * most * d + 4 * most * block_tokens), most, np.float32)
    mass = carray(pointer(mine + 8 * most * d + 4 * most * (block_tokens + 1)), most, np.float32)
    for own in range(me, num_parts, threads):
        for item in range(bounds[own], bounds[own + 1]):
            start, count, length, sequence = sequences[item // k]
            head = item % k
            blocks = carray(pointer(tables + 4 * sequence * width), width, np.int32)
            rows = count * group
            read_row(queries + (head * tokens + start) * group * size, rows * d, is_wide, flat_query)
            fill(flat_total, 0, rows * d, np.float32(0))
            fill(peak, 0, rows, np.float32(-np.inf))
            fill(mass, 0, rows, np.float32(0))
            for page in range((length + block_tokens - 1) // block_tokens):
                first = page * block_tokens
                held = min(block_tokens, length - first)
                place = kv + (((blocks[page] * layers + layer) * 2 * k) + head) * block_tokens * size
                if first + block_tokens < length:
                    ahead = kv + (((blocks[page + 1] * layers + layer) * 2 * k) + head) * block_tokens * size
                    left = min(block_tokens, length - first - block_tokens) * size
                    prefetch(ahead, left)
                    prefetch(ahead + k * block_tokens * size, left)
                read_row(place, held * d, is_wide, flat_keys)
                read_row(place + k * block_tokens * size, held * d, is_wide, flat_values)
                for r in range(rows):
                    seen = min(held, length - count + r // group + 1 - first)
                    if seen > 0:
                        _scores(query[r], keys, seen, d, weights)
                        higher = max(peak[r], largest(weights, seen))
                        if higher > peak[r]:
                            fade = exp2(peak[r] - higher)
                            mass[r] *= fade
                            scale(total[r], d, fade)
                            peak[r] = higher
                        mass[r] += _powers(weights, seen, peak[r])
                        _sum_weighted(total[r], weights, values, seen, d)
            for r in range(rows):
                scale(total[r], d, np.float32(1) / mass[r])
                place = out + ((start + r // group) * k * group + head * group + r % group) * size
                write_row(total[r], d, is_wide, place)
