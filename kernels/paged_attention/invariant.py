"""The same attention by one order of arithmetic for every step: a query's bytes don't depend on what runs beside it.

Two products over whole blocks of keys: never fewer query rows than `least_rows`, and never more keys in a sum than
`split`; sums of several splits are added in order. What pads a context has weight zero, and adding zero is exact. Which
sizes are bit-equal on this machine, `engine.models.invariant` proves when a model is loaded.

Dimensions: B sequences, K kv heads, R query rows of a kv head (its queries times the heads that share it), L keys, D.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Sizes(NamedTuple):
    """least_rows: query rows of a product at least.  split: keys of a sum at most, whole blocks."""

    least_rows: int
    split: int


def attend_in_splits(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, sizes: Sizes) -> Tensor:
    """q [B, K, R, D], k and v [B, K, L, D], attn_mask [B, 1, R, L] added to the scores, or None; [B, K, R, D]."""
    rows = q.shape[2]
    q = q * q.shape[-1] ** -0.5
    if rows < sizes.least_rows:
        q = F.pad(q, (0, 0, 0, sizes.least_rows - rows))
    scores = torch.matmul(q, k.transpose(-1, -2))
    if attn_mask is not None:
        scores[:, :, :rows] += attn_mask
    shares = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
    return sum_in_splits(shares, v, sizes.split)[:, :, :rows]


def sum_in_splits(shares: Tensor, v: Tensor, split: int) -> Tensor:
    """shares [..., R, L] over v [..., L, D], a split at a time. A context of one split comes out as it would alone."""
    if v.shape[-2] <= split:
        return torch.matmul(shares, v)
    parts = zip(shares.split(split, -1), v.split(split, -2), strict=True)
    total = torch.zeros((), dtype=torch.float32)
    for share, values in parts:
        total = total + torch.matmul(share, values)
    return total.to(v.dtype)
