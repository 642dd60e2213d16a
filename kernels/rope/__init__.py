"""Heads of a step made ready for attention: per-head norm, rotation, and K and V written into their arena pages."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.errors import KernelUnsupported

__all__ = ["Heads", "reads_kv", "rope_write", "rope_write_reference", "to_kv"]

from typing import NamedTuple

E4M3_MAX = 448.0


class Heads(NamedTuple):
    """Query heads, kv heads and their size D."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def reads_kv(rows: Tensor, kv: Tensor) -> bool:
    """Whether kernels take KV of this dtype for such rows: of theirs, or E4M3 for rows of bfloat16."""
    return kv.dtype is rows.dtype or (kv.dtype is torch.float8_e4m3fn and rows.dtype is torch.bfloat16)


def to_kv(numbers: Tensor, kv: Tensor) -> Tensor:
    """Keys or values in KV's dtype; what E4M3 can't hold becomes its largest number."""
    if kv.dtype is torch.float8_e4m3fn:
        numbers = numbers.clamp(-E4M3_MAX, E4M3_MAX)
    return numbers.to(kv.dtype)


def rope_write(
    qkv_TE: Tensor,
    kv: Tensor,
    layer: int,
    heads: Heads,
    positions_T: Tensor,
    blocks_T: Tensor,
    rope_PD: tuple[Tensor, Tensor],
    qk_norm_D: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Rotated queries, then rotated keys, [T, N + K, D]; keys and values also go into the pages of `layer` in kv.

    qkv [T, (N + 2 K) D]; kv the arena [blocks, layers, 2, K, block_tokens, D]; blocks_T int32: arena block of each
    token, -1 where nothing is to be written; positions int64. rope_PD: cosines and signed sines by position, as
    engine.models.rope has them.
    """
    from flowinfer.kernels.rope.triton import launch

    if not (qkv_TE.is_contiguous() and kv.is_contiguous()) or not reads_kv(qkv_TE, kv):
        raise KernelUnsupported("rope needs contiguous rows and KV of one dtype.")
    out = qkv_TE.new_empty(qkv_TE.shape[0], heads.num_heads + heads.num_kv_heads, heads.head_dim)
    if out.numel():
        launch(qkv_TE, kv, layer, heads, positions_T, blocks_T, rope_PD, qk_norm_D, eps, out)
    return out


def rope_write_reference(
    qkv_TE: Tensor,
    kv: Tensor,
    layer: int,
    heads: Heads,
    positions_T: Tensor,
    blocks_T: Tensor,
    rope_PD: tuple[Tensor, Tensor],
    qk_norm_D: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """As rope_write, in plain torch."""
    n, k, d = heads
    x = qkv_TE.view(-1, n + 2 * k, d)
    qk, v = x[:, : n + k], x[:, n + k :]
    if qk_norm_D is not None:
        q = F.rms_norm(qk[:, :n], (d,), qk_norm_D[0], eps)
        qk = torch.cat((q, F.rms_norm(qk[:, n:], (d,), qk_norm_D[1], eps)), 1)
    cos, sin = (table[positions_T].unsqueeze(1) for table in rope_PD)
    out = qk * cos + qk.roll(d // 2, -1) * sin
    offsets = positions_T % kv.shape[4]
    kv[blocks_T.long(), layer, 0, :, offsets] = to_kv(out[:, n:], kv)
    kv[blocks_T.long(), layer, 1, :, offsets] = to_kv(v, kv)
    return out
