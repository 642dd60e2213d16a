"""Block-scaled weights to plain ones: FP8 with a scale a square of rows and columns, FP4 with one every 32 columns.

Formats as in the public checkpoints: float8_e4m3fn with float32 or UE8M0 scales; E2M1 in pairs, the even column in the
low four bits, with UE8M0 scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowinfer.engine.formats import BLOCK, Block
from flowinfer.kernels import arch
from flowinfer.kernels.dequantize.reference import dequantize_reference

FP8_MAX = 448.0


def dequantize(weight: Tensor, scale: Tensor, block: Block = BLOCK, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """[rows, columns] of weight float8 [rows, columns] or packed int8 [rows, columns / 2] and its scales.

    block: rows and columns of a square of float8. Shapes and dtypes are those that formats.weight_format accepts. On a
    card by one kernel, elsewhere by way of float32.
    """
    if arch.supported("dequantize", str(weight.device), str(dtype).removeprefix("torch.")):
        from flowinfer.kernels.dequantize import dequantize as by_kernel

        return by_kernel(weight.contiguous(), scale.contiguous(), block, dtype=dtype)
    return dequantize_reference(weight, scale, block).to(dtype)


def quantize_fp8(weight: Tensor, side: int = 128) -> tuple[Tensor, Tensor]:
    """weight as float8_e4m3fn, and float32 scales of its side x side squares, powers of two as UE8M0 holds them."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // side) * side, -(-columns // side) * side)
    padded[:rows, :columns] = weight.float()
    squares = padded.view(padded.shape[0] // side, side, -1, side)
    scale = torch.exp2((squares.abs().amax((1, 3)).clamp(min=1e-12) / FP8_MAX).log2().ceil())
    spread = scale.repeat_interleave(side, 0)[:rows].repeat_interleave(side, 1)[:, :columns]
    return (weight.float() / spread).to(torch.float8_e4m3fn), scale
