"""The meaning of norm_turn, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from flowinfer.kernels.token_rows import TokenRows, Turn, turned


def norm_turn_reference(
    x_TND: Tensor,
    *,
    eps: float | None = None,
    weight_D: Tensor | None = None,
    turn: Turn | None = None,
    into: tuple[Tensor, TokenRows] | None = None,
) -> Tensor:
    """As norm_turn, in the dtype of x."""
    if eps is not None:
        x_TND = x_TND * torch.rsqrt(x_TND.square().mean(-1, keepdim=True) + eps)
    if weight_D is not None:
        x_TND = x_TND * weight_D
    if turn is not None:
        x_TND = turned(x_TND, *(part.to(x_TND.dtype).unsqueeze(1) for part in turn))
    if into is None:
        return x_TND
    section, rows = into
    own = rows.slots >= 0
    at = rows.positions[own].long()
    blocks = rows.block_tables[rows.slots[own].long(), at // rows.block_tokens].long()
    section[blocks, at % rows.block_tokens] = x_TND[own, 0].to(section.dtype)
    return section
