"""Tile sizes of invariant_linear: by the weight's shape, never by the number of rows."""

from __future__ import annotations

Tiles = tuple[int, int, int, int, int]  # BM, BN, BK, warps, stages
MULTIPROCESSORS = 132  # of an H200

# 64 rows, so that a Hopper card runs the same matrix instruction (wgmma, 64 rows) for one row as for many.
_ROWS = 64


def tiles(size_out: int, size_in: int, element_size: int, *, wide: bool) -> Tiles:
    """The tiles of a weight [size_out, size_in]: narrow enough that all multiprocessors read a part of it."""
    if element_size == 4:
        return 16, 32, 32, 4, 2
    if wide:
        return 128, 128, 64, 8, 4
    columns = 128
    while columns > 16 and size_out // columns < MULTIPROCESSORS:
        columns //= 2
    return _ROWS, columns, 128 if size_in % 128 == 0 else 64, 4, 4 if columns <= 64 else 3
