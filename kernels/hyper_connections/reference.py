"""The meaning of hyper_connections, in plain torch, in the dtype of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor


def mix_reference(
    x_TMH: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_H: Tensor,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As mix."""
    streams = x_TMH.shape[1]
    weights = _product(x_TMH, fn, norm_eps)
    pre = torch.sigmoid(weights[:, :streams] * scale[0] + base[:streams]) + eps
    post = 2 * torch.sigmoid(weights[:, streams : 2 * streams] * scale[1] + base[streams : 2 * streams])
    comb = (weights[:, 2 * streams :] * scale[2] + base[2 * streams :]).unflatten(-1, (streams, streams))
    comb = comb.softmax(-1) + eps
    for turn in range(2 * iterations - 1):
        comb = comb / (comb.sum(-1 if turn % 2 else -2, keepdim=True) + eps)
    return _normed((pre.unsqueeze(-1) * x_TMH).sum(1), norm_H, norm_eps), post, comb


def collapse_reference(
    x_TMH: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_H: Tensor, *, eps: float, norm_eps: float
) -> Tensor:
    """As collapse."""
    pre = torch.sigmoid(_product(x_TMH, fn, norm_eps) * scale + base) + eps
    return _normed((pre.unsqueeze(-1) * x_TMH).sum(1), norm_H, norm_eps)


def spread_reference(x_TMH: Tensor, delta: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """As spread, x left as it is."""
    out = delta.view(x_TMH.shape[0], -1, x_TMH.shape[2]).sum(1)
    return post.unsqueeze(-1) * out.unsqueeze(1) + comb.transpose(1, 2) @ x_TMH


def _product(x_TMH: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    x = x_TMH.flatten(1)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps) @ fn.t()


def _normed(x_TH: Tensor, norm_H: Tensor, norm_eps: float) -> Tensor:
    return x_TH * torch.rsqrt(x_TH.square().mean(-1, keepdim=True) + norm_eps) * norm_H
