"""Causal attention of a step's tokens over their pages: whole prompts, chunks of prompts, drafts, in one launch.

The step's own keys and values must be in the pages already (see rope). Tiles of queries pack the query heads of a kv
head, so that a few drafted tokens fill a tile too. Online softmax after Dao, "FlashAttention-2" (2023).

Dimensions: T tokens, N query heads, K kv heads, D head size, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.prefill_attention.reference import prefill_attention_reference
from flowinfer.kernels.rope import Heads, reads_kv

__all__ = ["Tiling", "plan_tiles", "prefill_attention", "prefill_attention_reference"]

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Which program does what, the same in all layers.

    tiles int32 [tiles, 2]: sequence, first of its query tokens. starts int32 [S + 1]; kv_lens int32 [S];
    block_tables int32 [S, blocks]. tokens: query tokens of a tile.
    """

    tiles: Tensor
    starts: Tensor
    kv_lens: Tensor
    block_tables: Tensor
    tokens: int


def plan_tiles(
    query_starts: Int32s,
    kv_lens: Int32s,
    block_tables: Int32s,
    *,
    heads: Heads,
    device: torch.device,
    dtype: torch.dtype,
    rows: int = 0,
) -> Tiling:
    """Cuts S sequences into tiles. Arguments as in StepInput; the longest contexts come first, to end together.

    dtype: of the queries. float32 has no tensor cores at full precision: large tiles would take minutes to compile.
    rows: of a tile; 0: by how many queries there are. invariant_attention takes one size for all steps.
    """
    counts = np.diff(query_starts)
    group = heads.num_heads // heads.num_kv_heads
    rows = rows or (128 if int(counts.max(initial=0)) * group > 32 and dtype.itemsize == 2 else 16)
    each = max(1, rows // group)
    num = -(-counts // each)
    sequence = np.repeat(np.arange(len(counts)), num)
    within = np.arange(len(sequence)) - np.repeat(np.cumsum(num) - num, num)
    order = np.argsort(-(kv_lens[sequence] - counts[sequence] + within * each), kind="stable")
    tiles = np.stack((sequence, within * each), 1)[order].astype(np.int32)
    arrays = (tiles, query_starts, kv_lens, block_tables)
    sent = [torch.from_numpy(np.ascontiguousarray(a, np.int32)).to(device, non_blocking=True) for a in arrays]
    return Tiling(sent[0], sent[1], sent[2], sent[3], tokens=each)


def prefill_attention(
    q_TND: Tensor,
    kv: Tensor,
    layer: int,
    heads: Heads,
    tiling: Tiling,
    *,
    window: int = 0,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """[T, N D]: attention of each query over its sequence up to itself.

    q [T, >= N, D], rotated, its last two dimensions contiguous; kv the arena [blocks, layers, 2, K, block_tokens, D].
    window and sinks_N as in decode_attention. Raises KernelUnsupported for dtypes or strides that don't fit.
    """
    from flowinfer.kernels.prefill_attention.triton import launch

    if not reads_kv(q_TND, kv) or not kv.is_contiguous() or q_TND.stride()[1:] != (heads.head_dim, 1):
        raise KernelUnsupported("prefill_attention needs queries and contiguous KV of one dtype.")
    out = q_TND.new_empty(q_TND.shape[0], heads.num_heads * heads.head_dim)
    if out.numel():
        launch(q_TND, kv, layer, heads, tiling, window, sinks_N, out)
    return out
