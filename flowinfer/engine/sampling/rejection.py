"""Rejection sampling of drafts that come with a distribution (draft heads, draft models). N-gram drafts need it not."""

from __future__ import annotations

import torch
from torch import Tensor


def reject(
    p_rows: Tensor, q_rows: Tensor, drafts: Tensor, uniforms: Tensor, num_drafts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Accepted drafts of each sequence, int64 [B], and the token that follows them, int64 [B].

    p_rows [B, K+1, V]: probabilities of the target at each draft's position and after the last.  q_rows [B, K, V]:
    those that the drafts, int64 [B, K], were drawn from.  uniforms [B, K+1] on [0, 1): one per draft for its test, the
    last for the token that follows.  num_drafts int64 [B]: how many of the K are real, where sequences differ.

    Draft d passes with probability min(1, p(d) / q(d)); after the first that fails, the next token is drawn from
    max(0, p - q), normalized; after the last, from p. Then output is distributed as p, whatever q is (Leviathan et al.
    2023, Chen et al. 2023). With q a point mass at d this is: d with probability p(d), else p without d.
    """
    p, q = p_rows.double(), q_rows.double()
    batch, length = drafts.shape
    at_draft = drafts.unsqueeze(2)
    p_draft, q_draft = p[:, :length].gather(2, at_draft).squeeze(2), q.gather(2, at_draft).squeeze(2)
    # u < p/q without the division, so that q = 0 (a draft that q can't give) passes only where p says so
    passes = uniforms[:, :length].double() * q_draft < p_draft
    if num_drafts is not None:
        passes &= torch.arange(length, device=drafts.device) < num_drafts.unsqueeze(1)
    accepted = passes.long().cumprod(1).sum(1)
    rows = torch.arange(batch, device=drafts.device)
    target = p[rows, accepted]
    limit = torch.full_like(accepted, length) if num_drafts is None else num_drafts
    if length:
        drafted = q[rows, accepted.clamp(max=length - 1)]
        residual = (target - drafted).clamp(min=0)
        failed = (accepted < limit) & (residual.sum(1) > 0)
        target = torch.where(failed.unsqueeze(1), residual, target)
    return accepted, _draw(target, uniforms[:, length].double())


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse of the cumulative distribution, in float64; never a token of weight 0."""
    cumulative = weights.cumsum(1)
    total = cumulative[:, -1:]
    index = torch.searchsorted(cumulative, uniforms.unsqueeze(1) * total, right=True).squeeze(1)
    last = (weights > 0).long().mul(torch.arange(weights.shape[1], device=weights.device)).amax(1)
    return torch.minimum(index, last)
