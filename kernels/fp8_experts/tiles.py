"""Tile sizes of fp8_experts; BK is a group of columns, 128."""

from __future__ import annotations

Tiles = tuple[int, int, int, int]  # BM, BN, warps, stages


def gated_tiles(mean: float) -> Tiles:
    """For gate and up, by the rows that an expert gets on average. Found on an H200, 128 experts of 2048 x 768."""
    if mean < 1:
        return 16, 32, 4, 4
    return (16, 64, 4, 4 if mean <= 4 else 3) if mean <= 16 else (32, 64, 4, 3)


def down_tiles(mean: float) -> Tiles:
    """For the product behind them, found there too."""
    return (16, 32, 4, 4) if mean < 1 else (16, 128, 4, 3) if mean <= 32 else (32, 128, 4, 3)


def grouped_tiles() -> tuple[int, int, int, int, int]:
    """Of rows in FP8, with the row blocks that go together."""
    return 128, 128, 8, 3, 8
