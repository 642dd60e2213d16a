"""One decode step's attention: heads rotated, K and V written, and each sequence's last token attends to all of it.

Split over KV with the query heads of a kv head packed into one tile, after Dao et al., "Flash-Decoding" (2023); the
last split to finish merges the others, so that a layer costs one launch. All sizes that change from step to step are
read on the device, so the launch can be captured in a CUDA graph.

Dimensions: B rows, N query heads, K kv heads, D head size, S slots of the batch, P positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.decode_attention.reference import decode_attention_reference
from flowinfer.kernels.rope import Heads, reads_kv

__all__ = ["DecodeBatch", "Scratch", "decode_attention", "decode_attention_reference", "num_splits"]

MOST_SPLITS = 16
PROGRAMS = 2 * 132  # two for each multiprocessor of an H200: more splits cost more to merge than they gain


class DecodeBatch(NamedTuple):
    """Where a step's rows lie. slots int32 [B]: row of the tables of each token; -1 marks padding.

    lengths int32 [S]: context of each slot, the token of this step included.  block_tables int32 [S, max_blocks].
    """

    slots: Tensor
    lengths: Tensor
    block_tables: Tensor


class Scratch(NamedTuple):
    """Partial results of the splits, for up to B rows; layers and steps of one stream share it.

    sums float32 [B, N, splits, D]; peaks float32 [B, N, splits, 2]; arrived int32 [B, K], zeros.
    """

    sums: Tensor
    peaks: Tensor
    arrived: Tensor

    @classmethod
    def make(cls, rows: int, heads: Heads, device: torch.device) -> Scratch:
        """Room for every batch of at most `rows` rows."""
        n, k, d = heads
        most = max(r * num_splits(r, heads) for r in range(1, rows + 1))
        return cls(
            torch.empty(most * n * d, dtype=torch.float32, device=device),
            torch.empty(most * n * 2, dtype=torch.float32, device=device),
            torch.zeros(rows * k, dtype=torch.int32, device=device),
        )


def num_splits(rows: int, heads: Heads) -> int:
    """Parts that each sequence's KV is cut into: few rows need many to fill the card, and small heads more."""
    programs = PROGRAMS if heads.head_dim >= 128 else 2 * PROGRAMS
    return max(1, min(MOST_SPLITS, programs // (rows * heads.num_kv_heads)))


def decode_attention(
    qkv_BE: Tensor,
    kv: Tensor,
    layer: int,
    heads: Heads,
    batch: DecodeBatch,
    rope_PD: tuple[Tensor, Tensor],
    qk_norm_D: tuple[Tensor, Tensor] | None,
    eps: float,
    scratch: Scratch,
    *,
    window: int = 0,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """[B, N D]: attention of each row over its context, K and V of the row included, which are written to kv.

    qkv [B, (N + 2 K) D], before norm and rotation; kv the arena [blocks, layers, 2, K, block_tokens, D]. window: only
    the last `window` tokens are seen (0: all). sinks_N: a logit a head that takes part in the softmax and adds
    nothing. Rows of padding give zeros and write nothing. Raises KernelUnsupported for strides or dtypes that differ.
    """
    from flowinfer.kernels.decode_attention.triton import launch

    if not (qkv_BE.is_contiguous() and kv.is_contiguous()) or not reads_kv(qkv_BE, kv):
        raise KernelUnsupported("decode_attention needs contiguous rows and KV of one dtype.")
    if qkv_BE.shape[1] != (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim:
        raise KernelUnsupported(f"decode_attention: {heads} don't fit rows of {qkv_BE.shape[1]}.")
    out = qkv_BE.new_empty(qkv_BE.shape[0], heads.num_heads * heads.head_dim)
    launch(qkv_BE, kv, layer, heads, batch, rope_PD, qk_norm_D, eps, scratch, window, sinks_N, out)
    return out
