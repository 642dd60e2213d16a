"""Causal attention over pages by one order of arithmetic for any step: prefill, verify and decode give equal bytes.

Keys are taken in splits of one size, whatever the step and the number of rows; each split is an online softmax of its
own, and splits are added up in order. A prefill program goes through them one after the other; in decode each has a
program, and the last of a row to finish adds them up by the same operations. Tiles have one shape for one token as for
many. (Thinking Machines, "Defeating nondeterminism in LLM inference", 2025: a fixed size of splits, not their number.)

Dimensions: T tokens, N query heads, K kv heads, D head size, B rows of a decode step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.invariant_attention.reference import invariant_attention_reference
from flowinfer.kernels.prefill_attention import Tiling
from flowinfer.kernels.rope import Heads

__all__ = ["SPLIT_PAGES", "TILE_ROWS", "Parts", "invariant_attention", "invariant_attention_reference"]

TILE_ROWS = 64  # query heads of a tile: what a Hopper card's matrix instruction takes, for one token as for many
SPLIT_PAGES = 16  # 1,024 keys: long enough that adding up is little, short enough that one sequence fills a card


class Parts(NamedTuple):
    """Where the splits of a decode step leave their results. sums float32 [B * N * splits * D], peaks [.. * 2].

    arrived int32 [B * K], zeros. most: splits of the longest context that the tables hold.
    """

    sums: Tensor
    peaks: Tensor
    arrived: Tensor
    most: int

    @classmethod
    def make(cls, rows: int, num_blocks: int, heads: Heads, device: torch.device) -> Parts:
        """Room for `rows` tokens of different sequences, of up to num_blocks blocks each."""
        n, k, d = heads
        most = max(1, -(-num_blocks // SPLIT_PAGES))
        count = rows * n * most
        sums = torch.empty(count * d, dtype=torch.float32, device=device)
        peaks = torch.empty(count * 2, dtype=torch.float32, device=device)
        return cls(sums, peaks, torch.zeros(rows * k, dtype=torch.int32, device=device), most)


def invariant_attention(
    q_TND: Tensor, kv: Tensor, layer: int, heads: Heads, tiling: Tiling, *, parts: Parts | None = None
) -> Tensor:
    """[T, N D]: attention of each query over its sequence up to itself; the step's keys and values are in the pages.

    q [T, >= N, D], rotated, its last two dimensions contiguous; kv the arena [blocks, layers, 2, K, block_tokens, D];
    tiling of plan_tiles with rows TILE_ROWS. parts: for steps of one token a sequence, whose splits then run side by
    side. Raises KernelUnsupported for dtypes or strides that don't fit.
    """
    from flowinfer.kernels.invariant_attention.triton import launch

    if q_TND.dtype != kv.dtype or not kv.is_contiguous() or q_TND.stride()[1:] != (heads.head_dim, 1):
        raise KernelUnsupported("invariant_attention needs queries and contiguous KV of one dtype.")
    if heads.num_heads // heads.num_kv_heads > TILE_ROWS:
        raise KernelUnsupported(f"invariant_attention: {heads} share more than {TILE_ROWS} queries a kv head.")
    out = q_TND.new_empty(q_TND.shape[0], heads.num_heads * heads.head_dim)
    if out.numel():
        launch(q_TND, kv, layer, heads, tiling, parts, out)
    return out
