"""Heads of a step made ready for attention on a CPU. Imports numba."""

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
from flowinfer.kernels.norm.cpu import norm_row
from flowinfer.kernels.rope import Heads

LOG2_E = 1.4426950408889634


def rope_write(
    qkv_TE: Tensor,
    kv: Tensor,
    layer: int,
    heads: Heads,
    positions_T: Tensor,
    blocks_T: Tensor,
    rope_PD: tuple[Tensor, Tensor],
    qk_norm_D: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """As kernels.rope.rope_write, but gives the queries alone, times LOG2_E * D ** -0.5, as [K, T, N / K, D].

    So a softmax over their scores takes powers of two, and the queries of one kv head are rows of one matrix, those of
    any run of tokens too. qk_norm_D float32.
    """
    n, k, d = heads
    tokens = qkv_TE.shape[0]
    queries = qkv_TE.new_empty(k, tokens, n // k, d)
    q_norm, k_norm = qk_norm_D or (0, 0)
    room, apart = scratch(6 * d)
    rope_write_rows(
        qkv_TE, kv, queries, positions_T, blocks_T, *rope_PD, q_norm, k_norm, room, apart,
        tokens, n, k, d, layer, kv.shape[1], kv.shape[4], wide(kv), bits(eps), work=2 * qkv_TE.numel(),
    )  # fmt: skip
    return queries


@loop
def _rotate(x, cos, sin, scale, half, out):
    for i in range(half):
        out[i] = (x[i] * cos[i] + x[i + half] * sin[i]) * scale
        out[i + half] = (x[i + half] * cos[i + half] + x[i] * sin[i + half]) * scale


ROPE_WRITE = (
    "qkv kv queries positions blocks cosines sines q_norm k_norm "
    "room apart tokens n k d layer layers block_tokens is_wide eps"
)


@kernel
def rope_write_rows(arguments):
    given = carray(arguments, 20)
    qkv, kv, queries, positions, blocks, cosines, sines, q_norm, k_norm = given[:9]
    room, apart, tokens, n, k, d, layer, layers, block_tokens, is_wide, eps = given[9:]
    me, threads = np.int64(thread_number()), np.int64(num_threads())
    size = d * (4 if is_wide else 2)
    position_of, block_of = carray(pointer(positions), tokens, np.int64), carray(pointer(blocks), tokens, np.int32)
    mine = room + me * apart
    x = carray(pointer(mine), d, np.float32)
    normed = carray(pointer(mine + 4 * d), d, np.float32)
    cos, sin = carray(pointer(mine + 8 * d), d, np.float32), carray(pointer(mine + 12 * d), d, np.float32)
    q_weight, k_weight = carray(pointer(q_norm), d, np.float32), carray(pointer(k_norm), d, np.float32)
    out = carray(pointer(mine + 16 * d), d, np.float32)
    scale = np.float32(LOG2_E) / np.sqrt(np.float32(d))
    group = n // k
    for t in range(tokens * me // threads, tokens * (me + 1) // threads):
        at = position_of[t]
        read_row(cosines + at * size, d, is_wide, cos)
        read_row(sines + at * size, d, is_wide, sin)
        row = qkv + t * (n + 2 * k) * size
        page = kv + ((block_of[t] * layers + layer) * 2 * k * block_tokens + at % block_tokens) * size
        for head in range(n + k):
            read_row(row + head * size, d, is_wide, x)
            is_query = head < n
            if q_norm:
                norm_row(x, q_weight if is_query else k_weight, real(eps), d, normed)
                for i in range(d):
                    x[i] = normed[i]
            if is_query:
                _rotate(x, cos, sin, scale, d // 2, out)
                of_query = ((head // group) * tokens + t) * group + head % group
                write_row(out, d, is_wide, queries + of_query * size)
            else:
                _rotate(x, cos, sin, np.float32(1), d // 2, out)
                write_row(out, d, is_wide, page + (head - n) * block_tokens * size)
        for head in range(k):
            read_row(row + (n + k + head) * size, d, is_wide, x)
            write_row(x, d, is_wide, page + (k + head) * block_tokens * size)
