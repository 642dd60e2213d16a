"""Rejection sampling of drafts that come with a distribution: which hold, and the token behind them. No sort, no host.

Method: Leviathan et al. (2023), Chen et al. (2023). A draft d passes with probability min(1, p(d) / q(d)); where one
fails, the token is drawn from max(0, p - q); after the last, from p. Tokens here are never chosen so, for reasons that
stages/spec_verify gives: it is what drafts are measured against.

Dimensions: B sequences, K drafts of each, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.rejection.reference import reject_reference

__all__ = ["reject", "reject_reference"]


def reject(
    p_rows: Tensor, q_rows: Tensor, drafts: Tensor, uniforms: Tensor, num_drafts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Accepted drafts of each sequence, int64 [B], and the token that follows them, int64 [B].

    p_rows [B, K+1, V] and q_rows [B, K, V]: probabilities of the target and of the drafter, float32 or float64,
    contiguous. drafts int64 [B, K]. uniforms [B, K+1] on [0, 1), float32 or float64: one per draft for its test, the
    last for the token that follows. num_drafts int64 [B]: how many of the K are real, where sequences differ. Sums are
    float64. Raises KernelUnsupported for shapes or strides that don't fit.
    """
    from flowinfer.kernels.rejection.triton import launch

    batch, rows, vocab = p_rows.shape
    if q_rows.shape != (batch, rows - 1, vocab) or drafts.shape != (batch, rows - 1):
        raise KernelUnsupported(f"rejection: {list(p_rows.shape)} and {list(q_rows.shape)} don't fit.")
    if not (p_rows.is_contiguous() and q_rows.is_contiguous() and uniforms.is_contiguous() and drafts.is_contiguous()):
        raise KernelUnsupported("rejection needs contiguous rows.")
    accepted, tokens = torch.empty(2, batch, dtype=torch.int64, device=p_rows.device)
    if batch:
        launch(p_rows, q_rows, drafts, uniforms, num_drafts, accepted, tokens)
    return accepted, tokens
