"""The meaning of decode_attention, in plain torch, a row at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flowinfer.kernels.rope import Heads, rope_write_reference

if TYPE_CHECKING:
    from flowinfer.kernels.decode_attention import DecodeBatch


def decode_attention_reference(
    qkv_BE: Tensor,
    kv: Tensor,
    layer: int,
    heads: Heads,
    batch: DecodeBatch,
    rope_PD: tuple[Tensor, Tensor],
    qk_norm_D: tuple[Tensor, Tensor] | None,
    eps: float,
    *,
    window: int = 0,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """As decode_attention."""
    n, k, d = heads
    out = torch.zeros(qkv_BE.shape[0], n * d, dtype=qkv_BE.dtype, device=qkv_BE.device)
    for row, slot in enumerate(batch.slots.tolist()):
        if slot < 0:
            continue
        length, size = int(batch.lengths[slot]), kv.shape[4]
        blocks = batch.block_tables[slot, : -(-length // size)].long()
        position = torch.tensor([length - 1], device=qkv_BE.device)
        qk = rope_write_reference(
            qkv_BE[row : row + 1], kv, layer, heads, position, blocks[-1:].int(), rope_PD, qk_norm_D, eps
        )
        first = max(0, length - window) if window else 0
        keys, values = (
            kv[blocks, layer, i].transpose(1, 2).flatten(0, 1)[first:length].repeat_interleave(n // k, 1).to(qk.dtype)
            for i in (0, 1)
        )
        scores = torch.einsum("nd,lnd->nl", qk[0, :n], keys) * d**-0.5
        if sinks_N is not None:
            scores = torch.cat((scores, sinks_N.to(scores.dtype).unsqueeze(1)), 1)
        weights = scores.softmax(-1)[:, : length - first]
        out[row] = torch.einsum("nl,lnd->nd", weights, values).flatten()
    return out
