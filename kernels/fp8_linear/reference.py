"""The meaning of fp8_linear, in plain torch on any device: also what a machine without FP8 units emulates it by."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 128  # columns that share a scale, of weights and of activations
FP8_MAX = 448.0
LEAST = 1e-10  # of the largest number of a group: a group of zeros has a scale too


def quantize_rows_reference(x_MI: Tensor) -> tuple[Tensor, Tensor]:
    """As quantize_rows; scales are float64 for float64 rows."""
    rows, width = x_MI.shape
    groups = -(-width // GROUP)
    padded = F.pad(x_MI if x_MI.dtype is torch.float64 else x_MI.float(), (0, groups * GROUP - width))
    grouped = padded.view(rows, groups, GROUP)
    scale = grouped.abs().amax(-1).clamp(min=LEAST) / FP8_MAX
    codes = (grouped / scale.unsqueeze(-1)).float().to(torch.float8_e4m3fn)
    return codes.view(rows, groups * GROUP)[:, :width].contiguous(), scale


def widened(codes: Tensor, scale: Tensor, rows: int, columns: int = GROUP) -> Tensor:
    """The numbers that codes stand for, in the scale's dtype; each scale is of `rows` x `columns` of them."""
    spread = scale.repeat_interleave(rows, 0)[: codes.shape[0]].repeat_interleave(columns, 1)[:, : codes.shape[1]]
    return codes.to(scale.dtype) * spread


def fp8_linear_reference(
    x_MI: Tensor, codes_OI: Tensor, scale: Tensor, rows: int, *, bias_O: Tensor | None = None, gated: bool = False,
    quantized: bool = False,
) -> Tensor:  # fmt: skip
    """x W^T + b in x's dtype over the weight that the codes stand for; gated as in skinny_linear.

    quantized: over activations in FP8 too.
    """
    weight = widened(codes_OI, scale.to(torch.float64 if x_MI.dtype is torch.float64 else torch.float32), rows)
    if quantized:
        x_MI = widened(*quantize_rows_reference(x_MI), rows=1).to(x_MI.dtype)
    y = F.linear(x_MI, weight.to(x_MI.dtype), bias_O)
    if gated:
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up
    return y
