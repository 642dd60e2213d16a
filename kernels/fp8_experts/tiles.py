"""Tile sizes of fp8_experts; BK is a group of columns, 128."""

from __future__ import annotations

Tiles = tuple[int, int, int, int]  # BM, BN, warps, stages


def gated_tiles(mean: float) -> Tiles:
    """For gate and up, by the rows that an expert gets on average."""
    return (16, 32, 4, 4) if mean <= 12 else (64, 64, 4, 3)


def down_tiles(mean: float) -> Tiles:
    """For the product behind them."""
    return (16, 64, 4, 4) if mean <= 12 else (64, 64, 4, 3)


def grouped_tiles() -> tuple[int, int, int, int, int]:
    """Of rows in FP8, with the row blocks that go together."""
    return 128, 128, 8, 3, 8
