"""compress in Triton: a program a token. One that closes a group pools it; each keeps its row where it may be needed.

Earlier steps' rows are read before any is overwritten: where a sequence has several tokens, keeping is a second launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SLOTS = 8  # rows that a program pools at once


def launch(rows_TC, pool, entries, tail, rows, turn):
    """Arguments as checked by compress."""
    rate, channels = pool.bias.shape
    size = entries.shape[2]
    slots = rate * channels // size
    for close, keep in ((True, True),) if rows.single else ((True, False), (False, True)):
        _compress[(rows_TC.shape[0],)](
            rows_TC, pool.bias, pool.norm_D, turn.cos, turn.sin, entries, tail,
            rows.slots, rows.positions, rows.firsts, rows.ends, rows.entries_from, rows.block_tables,
            rows_TC.stride(0), entries.stride(0), tail.stride(0), rows.block_tables.stride(0), pool.eps,
            D=size, C=channels, BD=triton.next_power_of_2(size), RATE=rate, SLOTS=slots, BS=min(_SLOTS, slots),
            PAGE=rows.block_tokens, RING=tail.shape[1], TURNED=2 * turn.cos.shape[1],
            BC=triton.next_power_of_2(2 * channels), CLOSE=close, KEEP=keep, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"])
def _compress(
    rows, bias, norm, cos, sin, entries, tail, slots, positions, firsts, ends, entries_from, tables,
    row_stride, entry_stride, tail_stride, table_stride, eps,
    D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, RATE: tl.constexpr, SLOTS: tl.constexpr, BS: tl.constexpr,
    PAGE: tl.constexpr, RING: tl.constexpr, TURNED: tl.constexpr, BC: tl.constexpr,
    CLOSE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t)
    position = tl.load(positions + t)
    table = tables + tl.maximum(slot, 0).to(tl.int64) * table_stride
    if CLOSE:
        group = (position + 1) // RATE - 1
        closes = ((position + 1) % RATE == 0) & (group >= tl.load(entries_from + t) // RATE)
        if (slot >= 0) & closes:
            first = tl.load(firsts + t)
            d = tl.arange(0, BD)
            peak = tl.full([BD], float("-inf"), tl.float32)
            total = tl.zeros([BD], tl.float32)
            acc = tl.zeros([BD], tl.float32)
            for start in range(0, SLOTS, BS):
                i = start + tl.arange(0, BS)
                at = position + 1 - SLOTS + i
                half = (i // RATE) * D  # 0 where groups don't overlap
                here = (at >= first) & (at >= 0)
                ring = (at < first) & (at >= 0)
                row = rows + ((t - position + at) * row_stride + half)[:, None] + d[None, :]
                block = tl.load(table + at // PAGE, mask=ring, other=0).to(tl.int64)
                old = tail + (block * tail_stride + (at % PAGE % RING) * (2 * C) + half)[:, None] + d[None, :]
                in_d = (d < D)[None, :]
                new = here[:, None] & in_d
                kept = ring[:, None] & in_d
                value = tl.load(row, mask=new, other=0.0).to(tl.float32)
                value += tl.load(old, mask=kept, other=0.0).to(tl.float32)  # one of them
                gate = tl.load(row + C, mask=new, other=0.0).to(tl.float32)
                gate += tl.load(old + C, mask=kept, other=0.0).to(tl.float32)
                gate += tl.load(bias + ((i % RATE) * C + half)[:, None] + d[None, :], mask=in_d, other=0.0)
                gate = tl.where((at >= 0)[:, None], gate, float("-inf"))
                high = tl.maximum(tl.maximum(peak, tl.max(gate, 0)), -1e30)
                keep = tl.exp(peak - high)
                share = tl.exp(gate - high[None, :])
                total = total * keep + tl.sum(share, 0)
                acc = acc * keep + tl.sum(share * value, 0)
                peak = high
            entry = tl.where(d < D, acc / total, 0.0)
            entry = entry * tl.rsqrt(tl.sum(entry * entry, 0) / D + eps) * tl.load(norm + d, mask=d < D, other=0.0)
            even, odd = tl.split(tl.reshape(entry, [BD // 2, 2]))
            pair = tl.arange(0, BD // 2) - (D - TURNED) // 2
            turned = (pair >= 0) & (pair < TURNED // 2)
            c = tl.load(cos + t * (TURNED // 2) + pair, mask=turned, other=1.0)
            s = tl.load(sin + t * (TURNED // 2) + pair, mask=turned, other=0.0)
            entry = tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), [BD])
            each = PAGE // RATE
            block = tl.load(table + group // each).to(tl.int64)
            place = entries + block * entry_stride + (group % each) * D + d
            tl.store(place, entry.to(entries.dtype.element_ty), mask=d < D)
    if KEEP:
        last = tl.minimum(tl.load(ends + t), (position // PAGE + 1) * PAGE)
        if (slot >= 0) & (position + RING >= last):
            c2 = tl.arange(0, BC)
            block = tl.load(table + position // PAGE).to(tl.int64)
            value = tl.load(rows + t * row_stride + c2, mask=c2 < 2 * C, other=0.0)
            place = tail + block * tail_stride + (position % PAGE % RING) * (2 * C) + c2
            tl.store(place, value.to(tail.dtype.element_ty), mask=c2 < 2 * C)
