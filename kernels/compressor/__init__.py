"""Compressed entries: a step's rows of value and gate pooled where a group is complete, the others kept for later.

DeepSeek-V4 (arXiv 2606.19348): an entry is the average of its group's values by a softmax of their gates, a channel
each, normed and rotated as its group's first token. Where groups overlap a token has two halves of channels: the first
serves the next group, the second its own. Rows of groups that may still be open lie in a ring inside the block.

Dimensions: T tokens, D channels of an entry, C channels of a token (2 D where groups overlap, else D), R rotated.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.compressor.reference import compress_reference
from flowinfer.kernels.token_rows import TokenRows, Turn

__all__ = ["Pool", "compress", "compress_reference"]


class Pool(NamedTuple):
    """Weights, float32: bias [rate, C] of the gates, norm [D]."""

    bias: Tensor
    norm_D: Tensor
    eps: float


def compress(rows_TC: Tensor, pool: Pool, entries: Tensor, tail: Tensor, rows: TokenRows, turn: Turn) -> None:
    """Writes the entries that this step completes into `entries`, and rows that later steps need into `tail`.

    rows_TC [T, 2 C], value then gate, tokens any stride apart; entries [blocks, block_tokens / rate, D] and tail
    [blocks, ring, 2 C], sections of one paged arena; turn: of the first token of the group that each token would close.
    Entries of groups before rows.entries_from are left as they are. Raises KernelUnsupported for sizes that don't fit.
    """
    from flowinfer.kernels.compressor.triton import launch

    rate, channels = pool.bias.shape
    size = entries.shape[2]
    if rows_TC.shape[1] != 2 * channels or tail.shape[2] != 2 * channels or channels not in (size, 2 * size):
        raise KernelUnsupported(
            f"compressor: rows of {rows_TC.shape[1]}, a ring of {list(tail.shape)} and entries of {size} don't fit a "
            f"bias of {list(pool.bias.shape)}."
        )
    if rate & (rate - 1) or size % 2:
        raise KernelUnsupported(f"compressor: {rate} tokens an entry of {size}: a power of two and even are supported.")
    if entries.shape[1] * rate != rows.block_tokens or rows_TC.stride(1) != 1:
        raise KernelUnsupported(f"compressor: {entries.shape[1]} entries a block at {rate} tokens an entry don't fit.")
    if len(rows_TC):
        launch(rows_TC, pool, entries, tail, rows, turn)
