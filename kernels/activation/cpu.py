"""silu(gate) * up for a CPU. Imports numba."""

from __future__ import annotations

import numpy as np
from numba import carray
from torch import Tensor

from flowinfer.kernels.compiled import scratch, wide
from flowinfer.kernels.loops import exp, kernel, loop, num_threads, pointer, read_row, thread_number, write_row


def silu_mul(gate_up_TI: Tensor) -> Tensor:
    """As kernels.activation.silu_mul: [T, 2 I] to [T, I], contiguous."""
    rows, width = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
    out = gate_up_TI.new_empty(rows, width)
    room, apart = scratch(2 * width)
    silu_mul_rows(gate_up_TI, out, room, apart, rows, width, wide(gate_up_TI), work=2 * rows * width)
    return out


@loop
def _gate(gate, up, n):
    for i in range(n):
        gate[i] = gate[i] / (np.float32(1) + exp(-gate[i])) * up[i]


SILU_MUL = "gate_up out room apart rows n is_wide"


@kernel
def silu_mul_rows(arguments):
    gate_up, out, room, apart, rows, n, is_wide = carray(arguments, 7)
    me, threads = np.int64(thread_number()), np.int64(num_threads())
    size = n * (4 if is_wide else 2)
    gate = carray(pointer(room + me * apart), n, np.float32)
    up = carray(pointer(room + me * apart + 4 * n), n, np.float32)
    for t in range(rows * me // threads, rows * (me + 1) // threads):
        read_row(gate_up + 2 * t * size, n, is_wide, gate)
        read_row(gate_up + (2 * t + 1) * size, n, is_wide, up)
        _gate(gate, up, n)
        write_row(gate, n, is_wide, out + t * size)
