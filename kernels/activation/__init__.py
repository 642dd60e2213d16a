"""silu(gate) * up over the two halves of each row (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flowinfer.errors import KernelUnsupported

__all__ = ["silu_mul", "silu_mul_reference"]


def silu_mul(gate_up_TI: Tensor) -> Tensor:
    """[T, 2 I] to [T, I], contiguous, float32 inside. Raises KernelUnsupported for strided rows."""
    from flowinfer.kernels.activation.triton import launch

    if not gate_up_TI.is_contiguous() or gate_up_TI.shape[1] % 2:
        raise KernelUnsupported(f"activation needs contiguous rows of even length, got {list(gate_up_TI.shape)}.")
    out = gate_up_TI.new_empty(gate_up_TI.shape[0], gate_up_TI.shape[1] // 2)
    if out.numel():
        launch(gate_up_TI, out)
    return out


def silu_mul_reference(gate_up_TI: Tensor) -> Tensor:
    """As silu_mul, in plain torch."""
    gate, up = gate_up_TI.chunk(2, -1)
    return F.silu(gate) * up
