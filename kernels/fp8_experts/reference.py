"""The meaning of a layer of experts in FP8, in plain torch, an expert at a time."""

from __future__ import annotations

from torch import Tensor

from flowinfer.kernels.fp8_linear import Fp8Weight, fp8_linear_reference, quantize_rows_reference
from flowinfer.kernels.fp8_linear.reference import widened


def fp8_experts_reference(
    x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up: Fp8Weight, down: Fp8Weight, residual_TH: Tensor, *,
    quantized: bool = False,
) -> Tensor:  # fmt: skip
    """residual_TH + the weighted sum of the chosen experts, over the numbers that the codes stand for.

    quantized: activations become FP8 before either product.
    """
    out = residual_TH.clone()
    for expert in range(gate_up.codes.shape[0]):
        rows, choice = (ids_TK == expert).nonzero(as_tuple=True)
        up = (gate_up.codes[expert], gate_up.scale[expert], gate_up.rows)
        h = fp8_linear_reference(x_TH[rows], *up, gated=True, quantized=quantized)
        if quantized:
            h = widened(*quantize_rows_reference(h), rows=1).to(h.dtype)
        y = fp8_linear_reference(h, down.codes[expert], down.scale[expert], down.rows)
        out.index_add_(0, rows, y * weights_TK[rows, choice].to(y.dtype).unsqueeze(1))
    return out
