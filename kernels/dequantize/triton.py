"""dequantize in Triton: memory sets the pace, so a program's tile is what shares scales and its rows are contiguous."""

from __future__ import annotations

import triton
import triton.language as tl

MOST = 128  # rows and columns of a tile: a whole block of the usual size
FP4_ROWS, FP4_GROUPS = 4, 32  # of a tile: 4 rows of 512 packed bytes


def launch_fp8(weight, scales, exponents, block, out):
    """Arguments as checked by dequantize; weight and exponents as bytes."""
    rows, columns = out.shape
    tiles = [min(MOST, triton.next_power_of_2(size)) for size in block]
    grid = triton.cdiv(columns, block[1]), triton.cdiv(rows, block[0])
    _fp8[grid](
        weight, scales, out, rows, columns, block[0], block[1],
        EXPONENTS=exponents, ROWS=tiles[0], COLUMNS=tiles[1], num_warps=4 if tiles[0] * tiles[1] < 4096 else 8,
    )  # fmt: skip


def launch_fp4(packed, scales, exponents, out):
    """Arguments as checked by dequantize; packed and exponents as bytes."""
    rows, size = packed.shape
    groups = triton.cdiv(size, 16)
    grid = triton.cdiv(groups, FP4_GROUPS), triton.cdiv(rows, FP4_ROWS)
    _fp4[grid](packed, scales, out, rows, size, groups, EXPONENTS=exponents, ROWS=FP4_ROWS, GROUPS=FP4_GROUPS)


@triton.jit
def _as_float(scale, EXPONENTS: tl.constexpr):
    """UE8M0: two to the power of the byte less 127, the least of them below the normal numbers; 255 is no number."""
    if EXPONENTS:
        power = scale.to(tl.int32)
        bits = tl.where(power == 0, 0x00400000, tl.where(power == 255, 0x7FC00000, power << 23))
        value = bits.to(tl.float32, bitcast=True)
    else:
        value = scale.to(tl.float32)
    return value


@triton.jit
def _fp8(
    weight, scales, out, num_rows, num_columns, high, wide,
    EXPONENTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across, down = tl.program_id(0), tl.program_id(1)
    scale = _as_float(tl.load(scales + down * tl.num_programs(0) + across), EXPONENTS)
    last_row, last_column = tl.minimum((down + 1) * high, num_rows), tl.minimum((across + 1) * wide, num_columns)
    for row in range(down * high, last_row, ROWS):
        rows = row + tl.arange(0, ROWS)[:, None]
        for column in range(across * wide, last_column, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)[None, :]
            at = rows.to(tl.int64) * num_columns + columns
            inside = (rows < last_row) & (columns < last_column)
            byte = tl.load(weight + at, mask=inside, other=0).to(tl.int16)
            # The bits of E4M3 under those of float16, whose exponents are 8 less: 256 times as much is the number.
            half = (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.float16, bitcast=True)
            value = tl.where((byte & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
            tl.store(out + at, (value * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _fp4(
    packed, scales, out, num_rows, size, num_groups,
    EXPONENTS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    first_row, first_group = tl.program_id(1) * ROWS, tl.program_id(0) * GROUPS
    rows = (first_row + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    bytes_ = first_group * 16 + tl.arange(0, GROUPS * 16)[None, :]
    inside = (rows < num_rows) & (bytes_ < size)
    pair = tl.load(packed + rows * size + bytes_, mask=inside, other=0).to(tl.int16)
    groups = first_group + tl.arange(0, GROUPS)[None, :]
    scale = tl.load(scales + rows * num_groups + groups, mask=(rows < num_rows) & (groups < num_groups), other=0)
    # The bits of E2M1 under those of float16, whose exponents are 14 less.
    both = tl.join(_e2m1(pair & 15), _e2m1((pair >> 4) & 15))
    values = tl.reshape(both, (ROWS, GROUPS, 32)) * _as_float(scale, EXPONENTS)[:, :, None]
    columns = first_group * 32 + tl.arange(0, GROUPS * 32)[None, :]
    values = tl.reshape(values, (ROWS, GROUPS * 32)).to(out.dtype.element_ty)
    tl.store(out + rows * (2 * size) + columns, values, mask=(rows < num_rows) & (columns < 2 * size))


@triton.jit
def _e2m1(code):
    return (((code & 8) << 12) | ((code & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
