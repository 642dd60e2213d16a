"""The product of a weight of 8 bits in tiles of registers, and rows made ready for it. Imports numba."""

from __future__ import annotations

import numpy as np
from numba import carray

from flowinfer.kernels.loops import kernel, loop, num_threads, of_rank, pointer, rank, thread_number, widened
from flowinfer.kernels.tiles import tile_int8

ROWS = 6  # of a tile with all 32 columns of a panel: 12 registers of whole numbers and 12 of float32 sums
_GROUP = 32
_BLOCK = 400_000  # bytes of rows that stay in a core's second cache while the weight's panels go by
_AHEAD = 4096  # bytes of the weight between what is read and what is asked for from memory

_one, _two, _three, _four, _five, _six = (tile_int8(rows, prefetch=3) for rows in range(1, ROWS + 1))
_three_more, _four_more, _five_more, _six_more = (tile_int8(rows, prefetch=2) for rows in range(3, ROWS + 1))


@loop
def _few(rows, a, k, steps, middles, b, sums, weight_scale, bias, c, apart_c, near, moving):
    """A panel's columns of up to 6 rows."""
    if rows == 6:
        _six(a, k, steps, middles, b, sums, weight_scale, bias, c, apart_c, near, moving)
    elif rows == 5:
        _five(a, k, steps, middles, b, sums, weight_scale, bias, c, apart_c, near, moving)
    elif rows == 4:
        _four(a, k, steps, middles, b, sums, weight_scale, bias, c, apart_c, near, moving)
    elif rows == 3:
        _three(a, k, steps, middles, b, sums, weight_scale, bias, c, apart_c, near, moving)
    elif rows == 2:
        _two(a, k, steps, middles, b, sums, weight_scale, bias, c, apart_c, near, moving)
    elif rows == 1:
        _one(a, k, steps, middles, b, sums, weight_scale, bias, c, apart_c, near, moving)


@loop
def _more(rows, a, k, steps, middles, b, sums, weight_scale, bias, c, apart_c, near, moving):
    """As _few, of 3 to 6 rows and as one of several groups: the second cache has room for the next panel."""
    if rows == 6:
        _six_more(a, k, steps, middles, b, sums, weight_scale, bias, c, apart_c, near, moving)
    elif rows == 5:
        _five_more(a, k, steps, middles, b, sums, weight_scale, bias, c, apart_c, near, moving)
    elif rows == 4:
        _four_more(a, k, steps, middles, b, sums, weight_scale, bias, c, apart_c, near, moving)
    elif rows == 3:
        _three_more(a, k, steps, middles, b, sums, weight_scale, bias, c, apart_c, near, moving)


LINEAR_INT8 = "x steps middles weight sums weight_scale bias y m n k"


@kernel
def linear_int8(arguments):
    """y [m, n] bfloat16 of rows as quantize_rows gives them. Work is shared as in tile_linear."""
    x, steps, middles, weight, sums, weight_scale, bias, y, m, n, k = carray(arguments, 11)
    me, threads = np.int64(thread_number()), np.int64(num_threads())
    panels, panel, each = n // 32, 32 * k, k // _GROUP
    block = max(8, _BLOCK // (k * ROWS)) * ROWS
    for begin in range(0, m, block):
        rows = min(block, m - begin)
        groups = (rows + ROWS - 1) // ROWS
        items = panels * groups
        for item in range(items * me // threads, items * (me + 1) // threads):
            p, group = item // groups, item % groups
            first, last = begin + rows * group // groups, begin + rows * (group + 1) // groups
            a, b, c = x + first * k, weight + p * panel, y + 2 * (first * n + 32 * p)
            step, middle, total = steps + 4 * first * each, middles + 4 * first * each, sums + 64 * p * each
            scale, start = weight_scale + 128 * p, bias + 128 * p
            if groups == 1:
                _few(rows, a, k, step, middle, b, total, scale, start, c, 2 * n, b + _AHEAD, 128)
            else:
                near = b + panel + panel // groups * group
                _more(last - first, a, k, step, middle, b, total, scale, start, c, 2 * n, near, 128 // groups)


@loop
def _quantize(x, groups, codes, steps, middles):
    """A row's codes from 1 to 255: a number is code * step + the middle of its group less 128 steps."""
    for group in range(groups):
        at = group * _GROUP
        most, least = rank(np.float32(-np.inf)), rank(np.float32(np.inf))
        for i in range(_GROUP):
            each = rank(widened(x[at + i]))
            most = each if each > most else most
            least = each if each < least else least
        high, low = of_rank(most), of_rank(least)
        middle, width = (low + high) * np.float32(0.5), high - low
        factor = np.float32(254) / width if width > np.float32(0) else np.float32(0)
        for i in range(_GROUP):
            scaled = (widened(x[at + i]) - middle) * factor
            code = np.int32(scaled + (np.float32(0.5) if scaled > np.float32(0) else np.float32(-0.5)))
            codes[at + i] = np.uint8(code + 128)
        steps[group] = width * np.float32(1 / 254)
        middles[group] = middle - np.float32(128) * steps[group]


QUANTIZE_ROWS = "x codes steps middles m k"


@kernel
def quantize_rows(arguments):
    """x [m, k] bfloat16 as codes uint8 [m, k], and of each 32 of them steps and middles float32 [m, k / 32]."""
    x, codes, steps, middles, m, k = carray(arguments, 6)
    me, threads = np.int64(thread_number()), np.int64(num_threads())
    groups = k // _GROUP
    for row in range(m * me // threads, m * (me + 1) // threads):
        _quantize(
            carray(pointer(x + 2 * row * k), k, np.uint16), groups, carray(pointer(codes + row * k), k, np.uint8),
            carray(pointer(steps + 4 * row * groups), groups, np.float32),
            carray(pointer(middles + 4 * row * groups), groups, np.float32),
        )  # fmt: skip
