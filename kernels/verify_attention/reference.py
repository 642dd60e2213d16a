"""The meaning of verify_attention, in plain torch: rows one after the other, as steps of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from flowinfer.kernels.decode_attention import DecodeBatch, decode_attention_reference
from flowinfer.kernels.rope import Heads


def verify_attention_reference(
    qkv_RE: Tensor,
    kv: Tensor,
    layer: int,
    heads: Heads,
    batch: DecodeBatch,
    counts_B: Tensor,
    rope_PD: tuple[Tensor, Tensor],
    qk_norm_D: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """As verify_attention; rows that aren't real give zeros."""
    sequences = len(batch.slots)
    rows = qkv_RE.view(sequences, -1, qkv_RE.shape[1])
    out = torch.zeros(*rows.shape[:2], heads.num_heads * heads.head_dim, dtype=qkv_RE.dtype, device=qkv_RE.device)
    for j in range(rows.shape[1]):
        step = DecodeBatch(torch.where(counts_B > j, batch.slots, -1), batch.lengths + j, batch.block_tables)
        out[:, j] = decode_attention_reference(rows[:, j], kv, layer, heads, step, rope_PD, qk_norm_D, eps)
    return out.flatten(0, 1)
