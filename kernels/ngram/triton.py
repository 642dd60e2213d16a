"""look_up in Triton: a program a sequence and part of its history; the last of a sequence to finish drafts."""

from __future__ import annotations

import triton
import triton.language as tl

from flowinfer.kernels.ngram import MOST_POSITIONS, PARTS

BLOCK = 512


def launch(slots, history, lengths, drafts, nums, scratch, ngram_min, ngram_max):
    """Arguments as checked by look_up."""
    width = drafts.shape[1]
    _look_up[(PARTS, slots.shape[0])](
        slots, history, lengths, drafts, nums, *scratch, history.stride(0),
        LEAST=ngram_min, MOST=ngram_max, D=width, BD=triton.next_power_of_2(width), PARTS=PARTS, BLOCK=BLOCK,
        PLACES=MOST_POSITIONS, num_warps=4,
    )  # fmt: skip


@triton.jit
def _look_up(
    slots, history, lengths, drafts, nums, matches, arrived, stride,
    LEAST: tl.constexpr, MOST: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    b = tl.program_id(1)
    slot = tl.load(slots + b)
    if slot < 0:
        return
    text = history + slot.to(tl.int64) * stride
    length = tl.load(lengths + slot)
    last = length - 1
    blocks = tl.cdiv(tl.cdiv(last, BLOCK), PARTS)
    best = tl.full([BLOCK], 0, tl.int32)
    for block in range(part * blocks, (part + 1) * blocks):
        end = block * BLOCK + tl.arange(0, BLOCK)  # where an earlier n-gram would end
        same = end < last
        num = tl.zeros([BLOCK], tl.int32)
        for i in tl.static_range(MOST):
            token = tl.load(text + tl.maximum(last - i, 0))
            there = end >= i
            same = same & there & (tl.load(text + end - i, mask=same & there, other=-1) == token)
            num += same.to(tl.int32)
        best = tl.maximum(best, tl.where(num >= LEAST, num * PLACES + end + 1, 0))
    tl.store(matches + b * PARTS + part, tl.max(best, 0))
    tl.debug_barrier()
    before = tl.atomic_add(arrived + b, 1, sem="acq_rel", scope="gpu")
    if before == PARTS - 1:
        tl.store(arrived + b, 0)
        match = tl.max(tl.load(matches + b * PARTS + tl.arange(0, PARTS), cache_modifier=".cg"), 0)
        tl.store(nums + slot, tl.where(match > 0, D, 0))
        if match > 0:
            place = match % PLACES
            j = tl.arange(0, BD)
            token = tl.load(text + place + j % (length - place), mask=j < D, other=0)
            tl.store(drafts + slot.to(tl.int64) * D + j, token, mask=j < D)
