"""Attention of a step that verifies drafts: each sequence's last token and the drafts behind it, its pages read once.

As decode_attention, with the query heads of all T rows of a sequence packed into one tile. Keys and values of the rows
themselves never come back from their pages: the program of the last split makes all T of them, writes them, and
attends to them under a causal mask. What is read from pages was written by earlier steps, so rows need no order.

Dimensions: B sequences, T rows of each, N query heads, K kv heads, D head size, S slots of the batch, P positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels import decode_attention
from flowinfer.kernels.decode_attention import DecodeBatch, Scratch
from flowinfer.kernels.rope import Heads, reads_kv
from flowinfer.kernels.verify_attention.reference import verify_attention_reference

__all__ = ["make_scratch", "num_splits", "verify_attention", "verify_attention_reference"]

MOST_ROWS = 16  # of a sequence: the product with the rows' own keys takes a tile of 16


def num_splits(sequences: int, rows: int, heads: Heads) -> int:
    """Parts that each sequence's KV is cut into; as many as a plain step has, whose time goes to the same pages."""
    return decode_attention.num_splits(sequences, heads)


def make_scratch(sequences: int, rows: int, heads: Heads, device: torch.device) -> Scratch:
    """Room for every batch of at most `sequences` sequences of `rows` rows; its arrivals are zeros."""
    n, k, d = heads
    most = max(b * num_splits(b, rows, heads) for b in range(1, sequences + 1)) * rows
    return Scratch(
        torch.empty(most * n * d, dtype=torch.float32, device=device),
        torch.empty(most * n * 2, dtype=torch.float32, device=device),
        torch.zeros(sequences * k, dtype=torch.int32, device=device),
    )


def verify_attention(
    qkv_RE: Tensor,
    kv: Tensor,
    layer: int,
    heads: Heads,
    batch: DecodeBatch,
    counts_B: Tensor,
    rope_PD: tuple[Tensor, Tensor],
    qk_norm_D: tuple[Tensor, Tensor] | None,
    eps: float,
    scratch: Scratch,
) -> Tensor:
    """[B T, N D]: attention of each row over its sequence up to itself; the rows' keys and values are written to kv.

    qkv [B T, (N + 2 K) D], before norm and rotation; rows of a sequence lie together and stand at positions
    length - 1, length, ..., where length is batch.lengths of its slot, the last token counted. counts_B int32: of each
    sequence's T rows, the first that are real (0: none); the others give anything finite and write nothing, as do
    those of slot -1. kv and the rest as in decode_attention. The page of every real row must be in the block table.
    Raises KernelUnsupported for strides, dtypes or numbers of rows that don't fit.
    """
    from flowinfer.kernels.verify_attention.triton import launch

    sequences = batch.slots.shape[0]
    rows = qkv_RE.shape[0] // sequences
    if not (qkv_RE.is_contiguous() and kv.is_contiguous()) or not reads_kv(qkv_RE, kv):
        raise KernelUnsupported("verify_attention needs contiguous rows and KV of one dtype.")
    if qkv_RE.shape[1] != (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim:
        raise KernelUnsupported(f"verify_attention: {heads} don't fit rows of {qkv_RE.shape[1]}.")
    if rows * sequences != qkv_RE.shape[0] or rows > MOST_ROWS:
        raise KernelUnsupported(f"verify_attention takes up to {MOST_ROWS} rows of each sequence, equally many.")
    out = qkv_RE.new_empty(qkv_RE.shape[0], heads.num_heads * heads.head_dim)
    launch(qkv_RE, kv, layer, heads, batch, counts_B, rope_PD, qk_norm_D, eps, scratch, rows, out)
    return out
