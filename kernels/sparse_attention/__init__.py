"""Attention of each token over the last keys of its sequence and the compressed entries chosen for it, with sinks.

DeepSeek-V4 (arXiv 2606.19348): one kv head, whose rows are keys and values at once, so a tile is loaded once for both
products. Where tokens are few, keys are taken in splits of one size that run side by side, each an online softmax of
its own (Dao et al., "Flash-Decoding", 2023), and are added up in order. Tiles and splits hang on the model's sizes
alone: with `fixed`, prefill, verify and decode give a token equal bytes.

Dimensions: T tokens, N query heads, D head size, K entries chosen for a token, R channels that are rotated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.sparse_attention.reference import sparse_attention_reference
from flowinfer.kernels.token_rows import TokenRows, Turn

__all__ = ["Parts", "num_splits", "sparse_attention", "sparse_attention_reference", "tile_keys"]

SPLIT_TILES = 4  # 256 keys in bfloat16: 128 of the window and 512 entries are three splits
PROGRAMS = 2 * 132  # from which splits of a token gain nothing by running side by side


class Parts(NamedTuple):
    """Where splits leave their results: sums float32 [.. * D], peaks [.. * 2], a row a token, split and head."""

    sums: Tensor
    peaks: Tensor

    @classmethod
    def make(cls, tokens: int, heads: int, head_dim: int, splits: int, device: torch.device) -> Parts:
        """Room for up to `tokens` tokens of up to so many splits; layers and steps of one stream share it."""
        most = min(tokens * splits, PROGRAMS // -(-heads // head_rows(heads)) + splits) * heads
        return cls(*(torch.empty(most * size, dtype=torch.float32, device=device) for size in (head_dim, 2)))


def sparse_attention(
    q_TND: Tensor,
    window: Tensor,
    entries: Tensor | None,
    rows: TokenRows,
    *,
    reach: int,
    rate: int = 0,
    sinks_N: Tensor | None = None,
    chosen_TK: Tensor | None = None,
    turn: Turn | None = None,
    parts: Parts | None = None,
    fixed: bool = False,
) -> Tensor:
    """[T, N, D]: softmax(q k D^-0.5) v over window keys and entries together; keys of this step are written already.

    q [T, N, D], rotated, its last two dimensions contiguous; window [blocks, block_tokens, D] and entries [blocks,
    block_tokens / rate, D] sections of one arena, of q's dtype. A token at position p sees window keys after p - reach
    up to itself, not before rows.window_from; of entries all n = (p + 1) // rate that are complete or, with chosen
    int32 [T, K], those of the first min(n, K) numbers there. sinks_N float32: a logit a head that takes part in the
    softmax and adds nothing. turn: the result's last R channels are turned back by it. parts: lets splits run side by
    side where tokens are few. fixed: keys are summed in splits in any case, so that a token's bytes don't depend on
    the others; else in one go where splits don't run side by side. Sums are float32.
    Raises KernelUnsupported for dtypes, strides or sizes that don't fit.
    """
    from flowinfer.kernels.sparse_attention.triton import launch

    tokens, heads, size = q_TND.shape
    sections = [window] if entries is None else [window, entries]
    if any(part.dtype != q_TND.dtype or part.stride()[1:] != (size, 1) for part in sections):
        raise KernelUnsupported("sparse_attention needs queries and sections of one dtype and head size.")
    if q_TND.stride()[1:] != (size, 1) or (entries is not None and entries.stride(0) != window.stride(0)):
        raise KernelUnsupported("sparse_attention needs contiguous heads, and sections of one arena.")
    if window.shape[1] != rows.block_tokens or (entries is not None and entries.shape[1] * rate != rows.block_tokens):
        raise KernelUnsupported(
            f"sparse_attention: sections {[list(part.shape) for part in sections]} don't fit blocks of "
            f"{rows.block_tokens} tokens at {rate} tokens an entry."
        )
    out = torch.empty(tokens, heads, size, dtype=q_TND.dtype, device=q_TND.device)
    if tokens:
        launch(q_TND, window, entries, rows, reach, rate, sinks_N, chosen_TK, turn, parts, fixed, out)
    return out


def head_rows(heads: int) -> int:
    """Query heads of a tile: up to the 64 rows of a Hopper card's matrix instruction."""
    return min(64, max(16, 1 << (heads - 1).bit_length()))


def tile_keys(head_dim: int, element_size: int) -> int:
    """Keys of a tile: 64 KiB of them at most, since several tiles and the queries share a multiprocessor's memory."""
    keys = 64 if element_size == 2 else 32
    while keys > 16 and keys * max(16, 1 << (head_dim - 1).bit_length()) * element_size > 65_536:
        keys //= 2
    return keys


def num_splits(reach: int, entries: int, keys: int) -> int:
    """Splits of a token that sees `reach` window keys and so many entries, in tiles of `keys`."""
    return -(-(-(-reach // keys) + -(-entries // keys)) // SPLIT_TILES)
