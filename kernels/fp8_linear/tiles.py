"""Tile sizes of fp8_linear by shape; a step is one or two groups of 128 columns. Found on an H200, 2026-11-30."""

from __future__ import annotations

Skinny = tuple[int, int, int, int, int, bool]  # BM, BN, groups a step, warps, stages, whether weights are the left side
Product = tuple[int, int, int, int, int]  # BM, BN, warps, stages, row blocks that go together


def skinny_tiles(rows: int, size_out: int, size_in: int, gated: bool) -> Skinny:
    """The tiles for M rows and a weight of [size_out (twice that if gated), size_in]."""
    return (16, 32, 2, 4, 3, False) if size_in % 256 == 0 and not gated else (16, 32, 1, 4, 5, False)


def product_tiles(rows: int, size_out: int, size_in: int) -> Product:
    """The tiles for M rows and a weight of [size_out, size_in]."""
    return (64 if rows <= 64 else 128), 128, 8, 3, 8


def skinny_parts(rows: int, size_out: int, size_in: int) -> int:
    """Parts of the columns that programs of their own sum, where weights have too few rows to keep a card busy."""
    return 1


def product_parts(rows: int, size_out: int, size_in: int) -> int:
    """As skinny_parts, for rows in FP8."""
    return 1
