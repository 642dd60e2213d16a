"""y = x W^T for few rows, with what stands around it in a decoder fused in: the norm before, the gate or sum behind.

At up to 64 rows a product only streams its weight; separate kernels for norm, activation and sum would each cost the
2 to 3 us that a small kernel takes inside a CUDA graph.
"""

from __future__ import annotations

from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.skinny_linear.reference import skinny_linear_reference

__all__ = ["MOST_ROWS", "skinny_linear", "skinny_linear_reference"]

MOST_ROWS = 64


def skinny_linear(
    x_MI: Tensor,
    weight_OI: Tensor,
    *,
    norm_I: Tensor | None = None,
    eps: float = 0.0,
    bias_O: Tensor | None = None,
    residual_MO: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """W applied to rms_norm(x, norm_I) where norm_I is given, else to x; plus bias, plus residual_MO.

    x [M, I] and weight [O, I] contiguous, one floating dtype, M at most 64. gated: the first half of W's rows is the
    gate, and the result is silu(gate) * up, [M, O / 2]. Sums are float32. `out` receives the result where it is given;
    it may be residual_MO itself. Raises KernelUnsupported for other shapes or dtypes.
    """
    from flowinfer.kernels.skinny_linear.triton import launch

    rows, size_in = x_MI.shape
    if rows > MOST_ROWS:
        raise KernelUnsupported(f"skinny_linear takes up to {MOST_ROWS} rows, got {rows}.", help="Use F.linear.")
    if x_MI.dtype != weight_OI.dtype or weight_OI.shape[1] != size_in:
        raise KernelUnsupported(
            f"skinny_linear of {list(x_MI.shape)} {x_MI.dtype} and {list(weight_OI.shape)} {weight_OI.dtype}: "
            "inner sizes and dtypes must agree."
        )
    if not (x_MI.is_contiguous() and weight_OI.is_contiguous()):
        raise KernelUnsupported("skinny_linear needs contiguous rows.")
    if gated and (residual_MO is not None or bias_O is not None):
        raise KernelUnsupported("skinny_linear fuses a gate or a sum, not both.")
    size_out = weight_OI.shape[0] // (2 if gated else 1)
    if out is None:
        out = x_MI.new_empty(rows, size_out)
    launch(x_MI, weight_OI, norm_I, eps, bias_O, residual_MO, gated, out)
    return out
