"""The product of a packed weight in tiles of registers. Imports numba."""

from __future__ import annotations

import numpy as np
from numba import carray

from flowinfer.kernels.loops import kernel, loop, num_threads, thread_number
from flowinfer.kernels.tiles import tile

ROWS = 6  # of a tile with all 64 columns of a panel: 24 of 32 registers hold sums
_BLOCK = 400_000  # bytes of rows that stay in a core's second cache while the weight's panels go by
_AHEAD = 4096  # bytes of the weight between what is read and what is asked for from memory

_one, _two, _three, _four, _five, _six = (
    tile(rows, 4, start="bias", half=True, prefetch=3) for rows in range(1, ROWS + 1)
)
_more_of = (tile(rows, 4, start="bias", half=True, prefetch=2) for rows in range(3, ROWS + 1))
_three_more, _four_more, _five_more, _six_more = _more_of


@loop
def _few(rows, a, apart_a, b, steps, c, apart_c, bias, near, moving):
    """A panel's columns of up to 6 rows."""
    if rows == 6:
        _six(a, apart_a, b, 256, steps, c, apart_c, bias, near, moving)
    elif rows == 5:
        _five(a, apart_a, b, 256, steps, c, apart_c, bias, near, moving)
    elif rows == 4:
        _four(a, apart_a, b, 256, steps, c, apart_c, bias, near, moving)
    elif rows == 3:
        _three(a, apart_a, b, 256, steps, c, apart_c, bias, near, moving)
    elif rows == 2:
        _two(a, apart_a, b, 256, steps, c, apart_c, bias, near, moving)
    elif rows == 1:
        _one(a, apart_a, b, 256, steps, c, apart_c, bias, near, moving)


@loop
def _more(rows, a, apart_a, b, steps, c, apart_c, bias, near, moving):
    """As _few, of 3 to 6 rows and as one of several groups: the second cache has room for the next panel."""
    if rows == 6:
        _six_more(a, apart_a, b, 256, steps, c, apart_c, bias, near, moving)
    elif rows == 5:
        _five_more(a, apart_a, b, 256, steps, c, apart_c, bias, near, moving)
    elif rows == 4:
        _four_more(a, apart_a, b, 256, steps, c, apart_c, bias, near, moving)
    elif rows == 3:
        _three_more(a, apart_a, b, 256, steps, c, apart_c, bias, near, moving)


LINEAR = "x weight bias y m n k"


@kernel
def linear(arguments):
    """y [m, n] = x [m, k] W^T + bias, x and y bfloat16, bias float32; W in panels of 64 columns, [k / 2][64][2] each.

    The work of a block of rows is its tiles, panel by panel; a thread takes a run of them.
    """
    x, weight, bias, y, m, n, k = carray(arguments, 7)
    me, threads = np.int64(thread_number()), np.int64(num_threads())
    panels, panel = n // 64, 128 * k
    block = max(8, _BLOCK // (2 * k * ROWS)) * ROWS
    for begin in range(0, m, block):
        rows = min(block, m - begin)
        groups = (rows + ROWS - 1) // ROWS
        items = panels * groups
        for item in range(items * me // threads, items * (me + 1) // threads):
            p, group = item // groups, item % groups
            first, last = begin + rows * group // groups, begin + rows * (group + 1) // groups
            a, b, c = x + 2 * first * k, weight + p * panel, y + 2 * (first * n + 64 * p)
            if groups == 1:
                _few(rows, a, 2 * k, b, k // 2, c, 2 * n, bias + 256 * p, b + _AHEAD, 256)
            else:  # while rows go by a panel, the next one comes from memory, a part with each group of rows
                near = b + panel + panel // groups * group
                _more(last - first, a, 2 * k, b, k // 2, c, 2 * n, bias + 256 * p, near, 256 // groups)
