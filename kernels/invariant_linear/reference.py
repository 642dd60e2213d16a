"""The meaning of invariant_linear, in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def invariant_linear_reference(
    x_MI: Tensor, weight_OI: Tensor, *, bias_O: Tensor | None = None, gated: bool = False
) -> Tensor:
    """As invariant_linear, in the dtype of its arguments; bytes may depend on M."""
    y = F.linear(x_MI, weight_OI, bias_O)
    if not gated:
        return y
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up
