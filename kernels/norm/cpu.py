"""RMSNorm for a CPU: a row stays in the first cache from sum to result. Imports numba."""

from __future__ import annotations

import numpy as np
from numba import carray
from torch import Tensor

from flowinfer.kernels.compiled import bits, scratch, wide
from flowinfer.kernels.loops import (
    kernel,
    loop,
    num_threads,
    pointer,
    read_row,
    real,
    thread_number,
    write_row,
)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, *, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As kernels.norm.rms_norm: x + delta, written over x, and its norm. weight float32, x and delta [T, H]."""
    rows, width = x_TH.shape
    normed = x_TH.new_empty(x_TH.shape)
    room, apart = scratch(2 * width)
    added = 0 if delta is None else delta
    rms_norm_rows(
        x_TH, added, weight_H, normed, room, apart, rows, width, wide(x_TH), bits(eps), work=2 * rows * width
    )  # fmt: skip
    return x_TH, normed


@loop
def _add(x, y, n):
    for i in range(n):
        x[i] += y[i]


@loop
def norm_row(x, weight, eps, n, out):
    """out = weight * x / rms(x), float32."""
    squares = np.float32(0)
    for i in range(n):
        squares += x[i] * x[i]
    scale = np.float32(1) / np.sqrt(squares / np.float32(n) + eps)
    for i in range(n):
        out[i] = x[i] * scale * weight[i]


RMS_NORM = "x delta weights out room apart rows n is_wide eps"


@kernel
def rms_norm_rows(arguments):
    """delta 0: nothing is added."""
    x, delta, weights, out, room, apart, rows, n, is_wide, eps = carray(arguments, 10)
    me, threads = np.int64(thread_number()), np.int64(num_threads())
    size = n * (4 if is_wide else 2)
    weight = carray(pointer(weights), n, np.float32)
    row = carray(pointer(room + me * apart), n, np.float32)
    other = carray(pointer(room + me * apart + 4 * n), n, np.float32)
    for t in range(rows * me // threads, rows * (me + 1) // threads):
        read_row(x + t * size, n, is_wide, row)
        if delta:
            read_row(delta + t * size, n, is_wide, other)
            _add(row, other, n)
            write_row(row, n, is_wide, x + t * size)
        norm_row(row, weight, real(eps), n, other)
        write_row(other, n, is_wide, out + t * size)
