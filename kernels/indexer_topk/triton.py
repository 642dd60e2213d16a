"""indexer_topk in Triton: a program for a token's tile of scores, then one for a token's choice.

A score is one tile's product whatever runs beside it, so the choice doesn't depend on the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 128  # entries of a tile
AT_ONCE = 4096  # scores that a program of the choice holds
DIGIT = 8  # bits a pass


def launch_scores(q, weights, keys, rows, rate, top, scores):
    """Arguments as checked by indexer_topk; scores float32 [T, entries that the tables hold]."""
    tokens, heads, size = q.shape
    block_d = max(16, triton.next_power_of_2(size))
    tile = TILE if block_d * q.element_size() <= 256 else TILE // 2
    _scores[(triton.cdiv(scores.shape[1], tile), tokens)](
        q, weights, keys, rows.slots, rows.positions, rows.block_tables, scores,
        q.stride(0), weights.stride(0), keys.stride(0), rows.block_tables.stride(0), scores.stride(0), size**-0.5,
        H=heads, D=size, BH=max(16, triton.next_power_of_2(heads)), BD=block_d, BE=tile,
        EACH=keys.shape[1], RATE=rate, TOP=top, num_warps=4, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip


def launch_choose(scores, rows, rate, chosen):
    """Numbers of the best scores of each token; scores may be empty where no token can see more than it chooses."""
    tokens, top = chosen.shape
    block = min(AT_ONCE, max(1 << DIGIT, triton.next_power_of_2(max(1, scores.shape[1]))))
    _choose[(tokens,)](
        scores, rows.slots, rows.positions, chosen, scores.stride(0),
        RATE=rate, TOP=top, BT=triton.next_power_of_2(top), BLOCK=block, BITS=DIGIT,
        num_warps=4 if block <= 1024 else 8 if block <= 4096 else 16,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"])
def _scores(
    q, weights, keys, slots, positions, tables, scores,
    q_stride, weight_stride, block_stride, table_stride, score_stride, scale,
    H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    EACH: tl.constexpr, RATE: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + t)
    visible = (tl.load(positions + t) + 1) // RATE
    first = tl.program_id(0) * BE
    if (slot >= 0) & (visible > TOP) & (first < visible):
        h = tl.arange(0, BH)
        d = tl.arange(0, BD)
        entry = first + tl.arange(0, BE)
        there = entry < visible
        block = tl.load(tables + slot.to(tl.int64) * table_stride + entry // EACH, mask=there, other=0)
        at = block.to(tl.int64) * block_stride + (entry % EACH) * D
        in_d = d < D
        queries = tl.load(
            q + t * q_stride + h[:, None] * D + d[None, :], mask=(h < H)[:, None] & in_d[None, :], other=0.0
        )
        index = tl.load(keys + at[None, :] + d[:, None], mask=there[None, :] & in_d[:, None], other=0.0)
        products = tl.maximum(tl.dot(queries, index, input_precision="ieee"), 0.0) * scale
        weight = tl.load(weights + t * weight_stride + h, mask=h < H, other=0.0).to(tl.float32)
        total = tl.sum(products * weight[:, None], 0)
        tl.store(scores + t * score_stride + entry, tl.where(total == 0, 0.0, total), mask=there)  # -0 ties with 0


@triton.jit
def _ordered(score):
    """uint32 that are ordered as the floats are."""
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _choose(
    scores, slots, positions, chosen, score_stride,
    RATE: tl.constexpr, TOP: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    visible = (tl.load(positions + t) + 1) // RATE
    visible = tl.where(tl.load(slots + t) >= 0, visible, 0)
    out = chosen + t * TOP
    if visible <= TOP:  # always, where there are no scores
        k = tl.arange(0, BT)
        tl.store(out + k, tl.where(k < visible, k, -1), mask=k < TOP)
    else:
        BINS: tl.constexpr = 1 << BITS
        i = tl.arange(0, BLOCK)
        digits = tl.arange(0, BINS)
        row = scores + t * score_stride
        least = tl.zeros([1], tl.uint32)  # the bits of the last chosen score that are known by now
        left = TOP  # how many are still to be chosen among those that agree in these bits
        for step in tl.static_range(32 // BITS):
            low = 32 - BITS * (step + 1)  # of this digit
            counts = tl.zeros([BINS], tl.int32)
            for start in range(0, visible, BLOCK):
                there = start + i < visible
                key = _ordered(tl.load(row + start + i, mask=there, other=0.0))
                if step > 0:
                    there = there & ((key >> (low + BITS)) == (least >> (low + BITS)))
                counts += tl.histogram(((key >> low) & (BINS - 1)).to(tl.int32), BINS, mask=there)
            above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # that are larger in this digit
            here = (above < left) & (above + counts >= left)
            digit = tl.sum(tl.where(here, digits, 0), 0)
            left -= tl.sum(tl.where(here, above, 0), 0)
            least = least | (digit.to(tl.uint32) << low)
        written = 0
        equal = 0
        for start in range(0, visible, BLOCK):
            there = start + i < visible
            key = _ordered(tl.load(row + start + i, mask=there, other=0.0))
            same = (there & (key == least)).to(tl.int32)
            rank = equal + tl.cumsum(same, 0) - same
            take = there & ((key > least) | ((same > 0) & (rank < left)))
            one = take.to(tl.int32)
            place = written + tl.cumsum(one, 0) - one
            tl.store(out + place, start + i, mask=take)
            written += tl.sum(one, 0)
            equal += tl.sum(same, 0)
