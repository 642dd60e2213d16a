"""The meaning of skinny_linear, in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def skinny_linear_reference(
    x_MI: Tensor,
    weight_OI: Tensor,
    *,
    norm_I: Tensor | None = None,
    eps: float = 0.0,
    bias_O: Tensor | None = None,
    residual_MO: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """As skinny_linear, in the dtype of its arguments."""
    if norm_I is not None:
        x_MI = F.rms_norm(x_MI, (x_MI.shape[1],), norm_I, eps)
    y = F.linear(x_MI, weight_OI, bias_O)
    if gated:
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up
    return y if residual_MO is None else y + residual_MO
