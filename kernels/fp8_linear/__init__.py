"""y = x W^T over weights in FP8: E4M3 with a float32 scale a block of 128 x 128, as DeepSeek-V3 is stored.

Few rows only stream the weight, at half the bytes of bfloat16: it is widened on its way and the rows stay as they are.
Many rows are quantized too, a scale for 128 numbers of a row, and multiplied by the FP8 units; sums go to float32 every
128 columns, where scales change (DeepSeek-V3 report, section 3.3; DeepGEMM).

Dimensions: M rows, I columns in, O out, G groups of 128 columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.fp8_linear.reference import (
    FP8_MAX,
    GROUP,
    LEAST,
    fp8_linear_reference,
    quantize_rows_reference,
    widened,
)

__all__ = [
    "FEW_ROWS",
    "GROUP",
    "Fp8Rows",
    "Fp8Weight",
    "fp8_linear",
    "fp8_linear_reference",
    "fp8_product",
    "fp8_skinny",
    "quantize_rows",
    "quantize_rows_reference",
    "quantize_weight",
]

FEW_ROWS = 16  # rows up to which weights are widened and rows stay as they are: above, widening is the slower
ALIGNED = 4  # rows that the memory of codes is a multiple of, as the library wants them
CODE = torch.float8_e4m3fn


class Fp8Weight(NamedTuple):
    """codes E4M3 [O, I], contiguous; scale float32 [ceil(O / rows), G], contiguous; rows of codes share a scale."""

    codes: Tensor
    scale: Tensor
    rows: int = GROUP

    def wide(self, dtype: torch.dtype) -> Tensor:
        """[O, I]: the numbers that the codes stand for."""
        return widened(self.codes, self.scale, self.rows).to(dtype)


def quantize_weight(weight_OI: Tensor) -> Fp8Weight:
    """A weight of any floating dtype in FP8: the largest number of each block becomes 448, the rest is rounded."""
    size_out, size_in = weight_OI.shape
    high, wide = -(-size_out // GROUP), -(-size_in // GROUP)
    padded = weight_OI.new_zeros(high * GROUP, wide * GROUP, dtype=torch.float32)
    padded[:size_out, :size_in] = weight_OI
    blocks = padded.view(high, GROUP, wide, GROUP)
    scale = blocks.abs().amax((1, 3)).clamp_(min=LEAST).div_(FP8_MAX)
    codes = blocks.div_(scale[:, None, :, None]).view(high * GROUP, wide * GROUP)[:size_out, :size_in]
    return Fp8Weight(codes.to(CODE).contiguous(), scale)


class Fp8Rows(NamedTuple):
    """codes E4M3 [M, I], contiguous; scale float32 [M, G], of which a column is contiguous."""

    codes: Tensor
    scale: Tensor


def quantize_rows(x_MI: Tensor, *, gated: bool = False) -> Fp8Rows:
    """Rows in FP8: the largest of 128 numbers becomes 448, the rest is rounded.

    gated: of silu(gate) * up, where x [M, 2 I] holds both. Raises KernelUnsupported for strided rows.
    """
    from flowinfer.kernels.fp8_linear.triton import launch_quantize

    if not x_MI.is_contiguous() or (gated and x_MI.shape[1] % 2):
        raise KernelUnsupported(f"fp8_linear quantizes contiguous rows, got {list(x_MI.shape)} {x_MI.stride()}.")
    rows, width = x_MI.shape[0], x_MI.shape[1] // (2 if gated else 1)
    room = -(-rows // ALIGNED) * ALIGNED
    codes = torch.empty(room, width, dtype=CODE, device=x_MI.device)[:rows]
    scale = torch.empty(-(-width // GROUP), room, dtype=torch.float32, device=x_MI.device).t()[:rows]
    if rows:
        launch_quantize(x_MI, codes, scale, gated)
    return Fp8Rows(codes, scale)


def fp8_linear(x_MI: Tensor, weight: Fp8Weight, *, bias_O: Tensor | None = None, split: bool = False) -> Tensor:
    """x W^T + b in bfloat16, by fp8_skinny at up to FEW_ROWS rows, else over rows in FP8; split as in those."""
    if x_MI.shape[0] <= FEW_ROWS:
        return fp8_skinny(x_MI, weight, bias_O=bias_O, split=split)
    return fp8_product(quantize_rows(x_MI), weight, bias_O=bias_O, split=split)


def fp8_skinny(
    x_MI: Tensor, weight: Fp8Weight, *, bias_O: Tensor | None = None, gated: bool = False, split: bool = False
) -> Tensor:
    """x W^T + b, [M, O], of at most FEW_ROWS rows in bfloat16, which stay so; sums are float32.

    gated: the first half of W's rows is the gate, and the result is silu(gate) * up, [M, O / 2]. split: the result may
    come as float32 parts [M * parts, O] that are still to be summed, the parts of a row one after the other.
    Raises KernelUnsupported for other shapes and dtypes.
    """
    from flowinfer.kernels.fp8_linear.tiles import skinny_parts
    from flowinfer.kernels.fp8_linear.triton import launch_skinny

    rows, size_in = x_MI.shape
    _check(x_MI, weight, torch.bfloat16)
    if rows > FEW_ROWS:
        raise KernelUnsupported(f"fp8_skinny takes up to {FEW_ROWS} rows, got {rows}.", help="Use fp8_linear.")
    if gated and (split or bias_O is not None):
        raise KernelUnsupported("fp8_skinny fuses a gate, a bias or a split, not two.")
    size_out = weight.codes.shape[0] // (2 if gated else 1)
    parts = skinny_parts(rows, size_out, size_in) if split else 1
    out = _room(x_MI, rows, size_out, parts)
    if rows:
        launch_skinny(x_MI, *weight, bias_O, gated, out, parts)
    return out


def fp8_product(rows: Fp8Rows, weight: Fp8Weight, *, bias_O: Tensor | None = None, split: bool = False) -> Tensor:
    """x W^T + b, [M, O] in bfloat16, both sides in FP8; split as in fp8_skinny. Raises KernelUnsupported."""
    from flowinfer.kernels.fp8_linear.library import library_product, library_takes
    from flowinfer.kernels.fp8_linear.tiles import product_parts
    from flowinfer.kernels.fp8_linear.triton import launch_product

    num, size_in = rows.codes.shape
    _check(rows.codes, weight, CODE)
    if library_takes(rows, weight):
        return library_product(rows, weight, bias_O)
    size_out = weight.codes.shape[0]
    parts = product_parts(num, size_out, size_in) if split else 1
    out = _room(rows.codes, num, size_out, parts)
    if num:
        launch_product(*rows, *weight, bias_O, out, parts)
    return out


def _room(like: Tensor, rows: int, size_out: int, parts: int) -> Tensor:
    dtype = torch.bfloat16 if parts == 1 else torch.float32
    return torch.empty(rows * parts, size_out, dtype=dtype, device=like.device)


def _check(x_MI: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> None:
    size_out, size_in = weight.codes.shape
    if x_MI.dtype is not dtype or x_MI.shape[1] != size_in or weight.codes.dtype is not CODE:
        raise KernelUnsupported(
            f"fp8_linear of {list(x_MI.shape)} {x_MI.dtype} and {list(weight.codes.shape)} {weight.codes.dtype}: "
            f"needs {dtype} rows of {size_in} columns and a weight in {CODE}."
        )
    if list(weight.scale.shape) != [-(-size_out // weight.rows), -(-size_in // GROUP)]:
        raise KernelUnsupported(
            f"fp8_linear: scales of shape {list(weight.scale.shape)} don't fit a weight of {list(weight.codes.shape)}, "
            f"one a block of {weight.rows} x {GROUP}."
        )
    if not (x_MI.is_contiguous() and weight.codes.is_contiguous() and weight.scale.is_contiguous()):
        raise KernelUnsupported("fp8_linear needs contiguous rows.")
