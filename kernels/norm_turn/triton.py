"""norm_turn in Triton: a program for a token and some of its heads."""

from __future__ import annotations

import triton
import triton.language as tl

_AT_ONCE = 4096  # numbers that a program holds


def launch(x, eps, weight, turn, rows, out):
    """Arguments as checked by norm_turn."""
    tokens, heads, size = x.shape
    block_d = triton.next_power_of_2(size)
    block_h = max(1, min(triton.next_power_of_2(heads), _AT_ONCE // block_d))
    cos, sin = turn if turn is not None else (None, None)
    slots, positions, tables = (rows.slots, rows.positions, rows.block_tables) if rows is not None else (None,) * 3
    _norm_turn[(tokens, triton.cdiv(heads, block_h))](
        x, weight, cos, sin, slots, positions, tables, out,
        x.stride(0), 0 if rows is None else tables.stride(0), out.stride(0), eps or 0.0,
        N=heads, D=size, BH=block_h, BD=block_d, NORM=eps is not None, WEIGHT=weight is not None,
        TURNED=0 if turn is None else 2 * cos.shape[1], PAGE=0 if rows is None else rows.block_tokens,
        num_warps=4 if block_h * block_d > 512 else 1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"])
def _norm_turn(
    x, weight, cos, sin, slots, positions, tables, out, x_stride, table_stride, out_stride, eps,
    N: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr,
    TURNED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)[:, None]
    d = tl.arange(0, BD)[None, :]
    mask = (h < N) & (d < D)
    value = tl.load(x + t * x_stride + h * D + d, mask=mask, other=0.0).to(tl.float32)
    root = tl.full([BH, 1], 1.0, tl.float32)
    if NORM:
        root = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value = value * root
    if WEIGHT:
        value = value * tl.load(weight + d, mask=d < D, other=0.0)
    if TURNED:
        pair = (d - (D - TURNED)) // 2
        here = (d >= D - TURNED) & (d < D)
        c = tl.load(cos + t * (TURNED // 2) + pair, mask=here, other=1.0)
        s = tl.load(sin + t * (TURNED // 2) + pair, mask=here, other=0.0)
        other = tl.load(x + t * x_stride + h * D + (d ^ 1), mask=(h < N) & here, other=0.0).to(tl.float32) * root
        if WEIGHT:
            other = other * tl.load(weight + (d ^ 1), mask=here, other=0.0)
        value = value * c + tl.where((d & 1) == 0, -other, other) * s
    if PAGE:
        slot = tl.load(slots + t)
        if slot >= 0:
            at = tl.load(positions + t)
            block = tl.load(tables + slot.to(tl.int64) * table_stride + at // PAGE).to(tl.int64)
            place = out + block * out_stride + (at % PAGE) * D + d + h * 0
            tl.store(place, value.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(out + (t * N + h) * D + d, value.to(out.dtype.element_ty), mask=mask)
