"""spread_rows and advance_verified in Triton: a program a sequence."""

from __future__ import annotations

import triton
import triton.language as tl


def launch_spread(slots, last, lengths, drafted, settings, rows):
    """Arguments as checked by spread_rows."""
    sequences = slots.shape[0]
    each = rows.tokens.shape[0] // sequences
    _spread[(sequences,)](
        slots, last, lengths, *drafted, *settings, rows.counts, rows.tokens, rows.ids, rows.lengths, *rows.settings,
        T=each, D=drafted.tokens.shape[1], BT=triton.next_power_of_2(each), num_warps=1,
    )  # fmt: skip


def launch_advance(chosen, slots, rows, drafted, last, lengths, out, history):
    """Arguments as checked by advance_verified."""
    sequences = slots.shape[0]
    each, drafts = chosen.shape[0] // sequences, drafted.tokens.shape[1]
    _advance[(sequences,)](
        chosen, slots, rows.counts, drafted.tokens, drafted.num, last, lengths, out, history,
        0 if history is None else history.stride(0), T=each, D=drafts, BT=triton.next_power_of_2(max(each, 2)),
        BD=triton.next_power_of_2(max(drafts, 2)), HISTORY=history is not None, num_warps=1,
    )  # fmt: skip


@triton.jit
def _spread(
    slots, last, lengths, drafts, nums, mosts, limits, temperatures, top_ks, top_ps, min_ps, seeds,
    counts, tokens, ids, row_lengths, row_temperatures, row_top_ks, row_top_ps, row_min_ps, row_seeds,
    T: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    j = tl.arange(0, BT)
    at = b * T + j
    inside = j < T
    slot = tl.load(slots + b)
    if slot < 0:
        tl.store(counts + b, 0)
        tl.store(tokens + at, tl.zeros([BT], tl.int32), mask=inside)
        tl.store(ids + at, tl.full([BT], -1, tl.int32), mask=inside)
        return
    length = tl.load(lengths + slot)
    limit = tl.load(limits + slot)
    meant = tl.minimum(tl.minimum(tl.load(nums + slot), tl.load(mosts + slot)), tl.minimum(limit - length, T) - 1)
    count = tl.where(length < limit, 1 + tl.maximum(meant, 0), 0)
    real = j < count
    first = tl.load(last + slot)
    draft = tl.load(drafts + slot.to(tl.int64) * D + j - 1, mask=real & (j > 0), other=0)
    tl.store(counts + b, count)
    tl.store(tokens + at, tl.where(real & (j > 0), draft, first), mask=inside)
    tl.store(ids + at, tl.where(real, at, -1), mask=inside)
    tl.store(row_lengths + at, length + j, mask=real)
    ones = tl.full([BT], 1, tl.int32)
    tl.store(row_temperatures + at, tl.load(temperatures + slot * ones), mask=real)
    tl.store(row_top_ks + at, tl.load(top_ks + slot * ones), mask=real)
    tl.store(row_top_ps + at, tl.load(top_ps + slot * ones), mask=real)
    tl.store(row_min_ps + at, tl.load(min_ps + slot * ones), mask=real)
    tl.store(row_seeds + at, tl.load(seeds + slot * ones), mask=real)


@triton.jit
def _advance(
    chosen, slots, counts, drafts, nums, last, lengths, out, history, history_stride,
    T: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = 2 + T + D
    b = tl.program_id(0)
    j = tl.arange(0, BT)
    i = tl.arange(0, BD)
    count = tl.load(counts + b)
    row = out + b.to(tl.int64) * W
    if count <= 0:
        tl.store(row + j, tl.zeros([BT], tl.int32), mask=j < T)
        tl.store(row + T + i, tl.zeros([BD], tl.int32), mask=i < D)
        tl.store(row + T + D, 0)
        tl.store(row + T + D + 1, 0)
        return
    slot = tl.load(slots + b)
    own = drafts + slot.to(tl.int64) * D
    token = tl.load(chosen + b * T + j, mask=j < count, other=0)
    draft = tl.load(own + j, mask=j < count - 1, other=-2)
    failed = tl.where((j < count - 1) & (token == draft), BT, j)
    held = tl.minimum(tl.min(failed, 0), count - 1)
    tl.store(row, count)
    tl.store(row + 1 + j, token, mask=j < T)
    tl.store(row + 1 + T, tl.load(nums + slot))
    tl.store(row + 2 + T + i, tl.load(own + i, mask=i < D, other=0), mask=i < D)
    length = tl.load(lengths + slot)
    behind = tl.sum(tl.where(j == held, token, 0), 0)
    tl.store(last + slot, tl.maximum(behind, 0))
    tl.store(lengths + slot, length + held + 1)
    if HISTORY:
        at = history + slot.to(tl.int64) * history_stride + length + j
        tl.store(at, tl.maximum(token, 0), mask=j <= held)
    tl.store(nums + slot, 0)
