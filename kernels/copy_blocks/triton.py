"""copy_blocks in Triton: a program for TILE words of a block."""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 4096  # words: 16 KiB, of which each of 256 threads has four loads of 16 bytes under way
WARPS = 8


def launch(target, source, ids, words, tile, warps):
    """Arguments as checked by copy_blocks; words: of a block."""
    tile = tile or TILE
    _copy[(triton.cdiv(words, tile), len(ids))](target, source, ids, words, BLOCK=tile, num_warps=warps or WARPS)


@triton.jit
def _copy(target, source, ids, words, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    block = tl.program_id(1)
    to = tl.load(ids + 2 * block).to(tl.int64) * words
    of = tl.load(ids + 2 * block + 1).to(tl.int64) * words
    inside = i < words
    tl.store(target + to + i, tl.load(source + of + i, mask=inside, other=0), mask=inside)
