"""Who decodes next and who yields when blocks run out. Pure: arrays in, choices out."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def blocks_short(num_tokens: NDArray[np.int32], num_blocks: NDArray[np.int32], block_tokens: int) -> NDArray[np.int32]:
    """Blocks that each sequence lacks to hold num_tokens tokens, at least 0; int32 [S]."""
    needed = -(-num_tokens // block_tokens) - num_blocks
    short: NDArray[np.int32] = np.maximum(needed, 0).astype(np.int32)
    return short


def youngest(slots: Iterable[int], admitted: NDArray[np.int64]) -> int:
    """The slot that was admitted last: its work is the least to lose, and the oldest always gets on."""
    return max(slots, key=lambda slot: int(admitted[slot]))
