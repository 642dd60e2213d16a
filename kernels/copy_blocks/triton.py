"""copy_blocks in Triton: a program for TILE words of a block."""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 4096  # words: 16 KiB, of which each of 256 threads has four loads of 16 bytes under way
WARPS = 8


def launch(target, source, ids, words, tile, warps):
    """Arguments as checked by copy_blocks; words: of a block, and from one to the next in target and source."""
    tile = tile or TILE
    _copy[(triton.cdiv(words[0], tile), len(ids))](target, source, ids, *words, BLOCK=tile, num_warps=warps or WARPS)


@triton.jit
def _copy(target, source, ids, words, to_step, of_step, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    block = tl.program_id(1)
    to = tl.load(ids + 2 * block).to(tl.int64) * to_step
    of = tl.load(ids + 2 * block + 1).to(tl.int64) * of_step
    inside = i < words
    tl.store(target + to + i, tl.load(source + of + i, mask=inside, other=0), mask=inside)
