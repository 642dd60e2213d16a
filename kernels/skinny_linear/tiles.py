"""Tile sizes of skinny_linear by shape; the numbers come from a search on the card named in each entry."""

from __future__ import annotations

Tiles = tuple[int, int, int, int, int]  # BM, BN, BK, warps, stages


def tiles(rows: int, size_out: int, size_in: int, element_size: int, gated: bool) -> Tiles:
    """The tiles for M rows and a weight of [size_out (twice that if gated), size_in]. Found on an H200, 2026-11-30."""
    if element_size == 4:
        return 16 if rows <= 16 else 32 if rows <= 32 else 64, 16, _block_k(size_in, 64), 4, 2
    if rows > 16:
        block_k = _block_k(size_in, 128)
        return 32 if rows <= 32 else 64, 32, block_k, 4, 4 if size_in >= 4 * block_k else 2
    if gated:
        return (16, 32, 128, 4, 3) if size_in % 128 == 0 else (16, 32, _block_k(size_in, 64), 4, 5)
    return (16, 16, 512, 2, 3) if size_in % 512 == 0 else (16, 32, _block_k(size_in, 64), 4, 5)


def _block_k(size_in: int, most: int) -> int:
    """The largest power of two up to `most` that divides size_in, if it is at least 64; else one that covers it."""
    fits = most
    while fits > 64 and size_in % fits:
        fits //= 2
    if size_in % fits == 0:
        return fits
    covering = 16
    while covering < size_in and covering < 64:
        covering *= 2
    return covering
