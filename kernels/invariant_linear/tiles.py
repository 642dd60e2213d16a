"""Tile sizes of invariant_linear: by the weight's shape, never by the number of rows.

On an H200, tiles of 64 and of 128 rows gave the same bytes in every product of Qwen3-8B and SmolLM2: sums run over the
inner dimension in order, whatever the tile (2026-11-30; `same_when_wide` tries it at load).
"""

from __future__ import annotations

Tiles = tuple[int, int, int, int, int]  # BM, BN, BK, warps, stages
ONE_WAVE = 132  # programs that an H200 runs at once, one a multiprocessor
ENOUGH = 90  # programs from which narrower tiles gain nothing

# 64 rows, so that a Hopper card runs the same matrix instruction (wgmma, 64 rows) for one row as for many.
_ROWS = 64


def tiles(size_out: int, size_in: int, element_size: int, *, wide: bool) -> Tiles:
    """The tiles of a weight [size_out, size_in]: narrow enough that most multiprocessors read a part of it."""
    if element_size == 4:
        return 16, 32, 32, 4, 2
    if wide:
        return 128, 128, 64, 8, 4
    columns = 128
    while columns > 16 and size_out // columns < ENOUGH:
        columns //= 2
    if columns == 128:
        return _ROWS, columns, 64, 4, 4
    alone = columns <= 32 and size_out // columns <= ONE_WAVE  # on its multiprocessor: it must read further ahead
    return _ROWS, columns, 128 if size_in % 128 == 0 else 64, 4, 6 if alone else 4
