"""Tile sizes of fp8_linear by shape; a step is a group of 128 columns."""

from __future__ import annotations

Tiles = tuple[int, int, int, int, int, bool]  # BM, BN, warps, stages, row blocks together, weights on the left side


def product_tiles(rows: int, terms: int, size_out: int, size_in: int) -> Tiles:
    """The tiles for M rows of so many terms and a weight of [size_out, size_in]."""
    codes = rows * terms
    if codes <= 128:
        return max(16, 1 << (codes - 1).bit_length()), 64, 4, 5, 1, True
    return 128, 128, 8, 3, 8, False


def product_parts(rows: int, terms: int, size_out: int, size_in: int) -> int:
    """Parts of the columns that programs of their own sum, where weights have too few rows to keep a card busy."""
    return 1
