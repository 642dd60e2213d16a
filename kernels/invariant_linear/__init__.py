"""y = x W^T + b by one order of sums for any number of rows: a row's bytes don't depend on the rows beside it.

One tile and instruction shape for decode, verify and prefill, no split of the inner dimension (Thinking Machines,
"Defeating nondeterminism in LLM inference", 2025). A library picks tiles and splits by the number of rows instead.
"""

from __future__ import annotations

from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.invariant_linear.reference import invariant_linear_reference

__all__ = ["WIDE_ROWS", "invariant_linear", "invariant_linear_reference"]

WIDE_ROWS = 512  # rows from which wide tiles pay


def invariant_linear(
    x_MI: Tensor, weight_OI: Tensor, *, bias_O: Tensor | None = None, gated: bool = False, wide: bool = False
) -> Tensor:
    """[M, O] of x [M, I] and weight [O, I], contiguous and of one floating dtype; sums are float32.

    gated: the first half of the weight's rows is the gate, and the result is silu(gate) * up, [M, O / 2].
    wide: tiles for many rows. Whether those give the same bytes depends on the card: `same_when_wide` finds out.
    Raises KernelUnsupported for other shapes or dtypes.
    """
    from flowinfer.kernels.invariant_linear.triton import launch

    if x_MI.dtype != weight_OI.dtype or weight_OI.shape[1] != x_MI.shape[1]:
        raise KernelUnsupported(
            f"invariant_linear of {list(x_MI.shape)} {x_MI.dtype} and {list(weight_OI.shape)} {weight_OI.dtype}: "
            "inner sizes and dtypes must agree."
        )
    if not (x_MI.is_contiguous() and weight_OI.is_contiguous()):
        raise KernelUnsupported("invariant_linear needs contiguous rows.")
    if gated and bias_O is not None:
        raise KernelUnsupported("invariant_linear gates products without a bias.", help="Use silu_mul behind it.")
    out = x_MI.new_empty(x_MI.shape[0], weight_OI.shape[0] // (2 if gated else 1))
    if out.numel():
        launch(x_MI, weight_OI, bias_O, wide, out, gated=gated)
    return out
