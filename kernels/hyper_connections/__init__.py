"""Several residual streams around a block: mixed into what it reads, with its norm, and spread again behind it.

Manifold-constrained hyper-connections (arXiv 2512.24880) as DeepSeek-V4 has them. The product that gives the mixing
weights is cut into spans of one size, added up in order, so that one token fills several multiprocessors and its bytes
don't depend on the others.

Dimensions: T tokens, M streams, H hidden, n = (2 + M) M mixing weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.hyper_connections.reference import collapse_reference, mix_reference, spread_reference

__all__ = ["Mixed", "collapse", "collapse_reference", "mix", "mix_reference", "spread", "spread_reference"]

SPAN = 2048  # columns of the product that a program sums


class Mixed(NamedTuple):
    """normed [T, H] of the streams' dtype: what the block reads. post [T, M], comb [T, M, M] float32: for `spread`."""

    normed: Tensor
    post: Tensor
    comb: Tensor


def mix(
    x_TMH: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_H: Tensor,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> Mixed:
    """The streams merged and normed for a block, and the weights by which its output goes back.

    x [T, M, H] contiguous; float32 fn [n, M H], base [n], scale [3] and norm_H [H]. comb is made doubly stochastic by
    `iterations` rounds of Sinkhorn's. Raises KernelUnsupported for sizes that don't fit.
    """
    tokens, streams, hidden = x_TMH.shape
    _check(x_TMH, fn, base, (2 + streams) * streams)
    mixed = Mixed(
        x_TMH.new_empty(tokens, hidden),
        x_TMH.new_empty(tokens, streams, dtype=torch.float32),
        x_TMH.new_empty(tokens, streams, streams, dtype=torch.float32),
    )
    if tokens:
        from flowinfer.kernels.hyper_connections.triton import launch_mix

        launch_mix(x_TMH, fn, base, scale, norm_H, iterations, eps, norm_eps, mixed)
    return mixed


def collapse(
    x_TMH: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_H: Tensor, *, eps: float, norm_eps: float
) -> Tensor:
    """[T, H]: the streams merged and normed before the head; fn [M, M H], base [M], scale [1], else as in mix."""
    tokens, streams, hidden = x_TMH.shape
    _check(x_TMH, fn, base, streams)
    out = x_TMH.new_empty(tokens, hidden)
    if tokens:
        from flowinfer.kernels.hyper_connections.triton import launch_mix

        launch_mix(x_TMH, fn, base, scale, norm_H, 0, eps, norm_eps, Mixed(out, out, out), head=True)
    return out


def spread(x_TMH: Tensor, delta: Tensor, mixed: Mixed) -> Tensor:
    """The streams behind a block, written over x: post (outer) delta + comb^T x.

    delta [T, H], or [T * parts, H] with the parts of a token one after the other, which are summed. Arithmetic is
    float32. Raises KernelUnsupported for sizes that don't fit.
    """
    tokens, _, hidden = x_TMH.shape
    if not (x_TMH.is_contiguous() and delta.is_contiguous()) or delta.shape[1] != hidden:
        raise KernelUnsupported(f"hyper_connections: {list(delta.shape)} don't fit streams of {list(x_TMH.shape)}.")
    if tokens:
        from flowinfer.kernels.hyper_connections.triton import launch_spread

        if delta.shape[0] % tokens:
            raise KernelUnsupported(f"hyper_connections: {delta.shape[0]} rows aren't parts of {tokens} tokens.")
        launch_spread(x_TMH, delta, mixed)
    return x_TMH


def _check(x_TMH: Tensor, fn: Tensor, base: Tensor, count: int) -> None:
    _, streams, hidden = x_TMH.shape
    if not (x_TMH.is_contiguous() and fn.is_contiguous()) or fn.shape != (count, streams * hidden):
        raise KernelUnsupported(f"hyper_connections: weights {list(fn.shape)} don't fit {list(x_TMH.shape)}.")
    if streams & (streams - 1) or base.shape != (count,):
        raise KernelUnsupported(f"hyper_connections takes a power of two of streams, got {streams}.")
