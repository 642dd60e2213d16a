"""Heads normed and rotated in neighbouring pairs, into a tensor of their own or into rows of a paged section.

Dimensions: T tokens, N heads, D head size, R channels that are rotated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.norm_turn.reference import norm_turn_reference
from flowinfer.kernels.token_rows import TokenRows, Turn

__all__ = ["norm_turn", "norm_turn_reference"]


def norm_turn(
    x_TND: Tensor,
    *,
    eps: float | None = None,
    weight_D: Tensor | None = None,
    turn: Turn | None = None,
    into: tuple[Tensor, TokenRows] | None = None,
) -> Tensor:
    """x, each head over its root mean square where eps is given (then times weight_D), its last R channels turned.

    x [T, N, D], heads contiguous, tokens any stride apart; weight_D float32. into: a section [blocks, block_tokens, D]
    of a paged arena and the tokens' rows: one head a token goes to its place there, and padding nowhere; the section is
    returned. Arithmetic is float32. Raises KernelUnsupported for strides or sizes that don't fit.
    """
    from flowinfer.kernels.norm_turn.triton import launch

    tokens, heads, size = x_TND.shape
    if x_TND.stride(2) != 1 or (heads > 1 and x_TND.stride(1) != size) or (turn and size % 2):
        raise KernelUnsupported("norm_turn needs contiguous heads, of an even size where they are turned.")
    if into is not None and (heads != 1 or into[0].shape[1:] != (into[1].block_tokens, size)):
        raise KernelUnsupported(f"norm_turn: {list(x_TND.shape)} don't fit a section of {list(into[0].shape)}.")
    out = into[0] if into else torch.empty(tokens, heads, size, dtype=x_TND.dtype, device=x_TND.device)
    if tokens:
        launch(x_TND, eps, weight_D, turn, into[1] if into else None, out)
    return out
