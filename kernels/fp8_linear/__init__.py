"""y = x W^T over weights in FP8: E4M3 with a float32 scale a block of 128 x 128, as DeepSeek-V3 is stored.

Rows become FP8 too, a scale for 128 numbers of a row, and sums go to float32 every 128 columns, where scales change
(DeepSeek-V3 report, section 3.3; DeepGEMM). Few rows only stream the weight, so each of their numbers is two codes, the
second for what rounding to the first left: together they have the 8 bits of bfloat16, and the FP8 units have no more to
wait for. Widening the weight for products in bfloat16 instead took longer than it saved on an H200.

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
    "quantize_rows",
    "quantize_rows_reference",
    "quantize_weight",
    "terms_of",
]

FEW_ROWS = 64  # rows up to which a number is two codes
CODE = torch.float8_e4m3fn
ALIGNED = 4  # rows that the memory of one term is a multiple of, as the library wants them


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
    """codes E4M3 [terms * M, I], contiguous; scale float32 [M, G], of which a column is contiguous.

    Of two terms, the first M rows of codes are the numbers, the others what rounding left of them, FINER times.
    """

    codes: Tensor
    scale: Tensor
    terms: int = 1


def quantize_rows(x_MI: Tensor, *, gated: bool = False, terms: int = 1) -> Fp8Rows:
    """Rows in FP8: the largest of 128 numbers becomes 448, the rest is rounded.

    terms: of two, the second holds what rounding left, so that 8 bits of each number are there, as bfloat16 has them.
    gated: of silu(gate) * up, where x [M, 2 I] holds both. Raises KernelUnsupported for strided rows.
    """
    from flowinfer.kernels.fp8_linear.triton import launch_quantize

    if not x_MI.is_contiguous() or (gated and x_MI.shape[1] % 2):
        raise KernelUnsupported(f"fp8_linear quantizes contiguous rows, got {list(x_MI.shape)} {x_MI.stride()}.")
    rows, width = x_MI.shape[0], x_MI.shape[1] // (2 if gated else 1)
    room = terms * rows if terms > 1 else -(-rows // ALIGNED) * ALIGNED
    codes = torch.empty(room, width, dtype=CODE, device=x_MI.device)[: terms * rows]
    scale = torch.empty(-(-width // GROUP), room, dtype=torch.float32, device=x_MI.device).t()[:rows]
    if rows:
        launch_quantize(x_MI, codes, scale, gated, terms)
    return Fp8Rows(codes, scale, terms)


def terms_of(rows: int) -> int:
    """Terms of each number for so many rows: two for few, whose products take as long as reading the weight."""
    return 2 if rows <= FEW_ROWS else 1


def fp8_linear(x_MI: Tensor, weight: Fp8Weight, *, bias_O: Tensor | None = None, split: bool = False) -> Tensor:
    """x W^T + b in bfloat16 of rows in bfloat16, which become FP8 in two terms or one; split as in fp8_product."""
    if x_MI.dtype is not torch.bfloat16:
        raise KernelUnsupported(f"fp8_linear needs rows in bfloat16, got {x_MI.dtype}.")
    return fp8_product(quantize_rows(x_MI, terms=terms_of(x_MI.shape[0])), weight, bias_O=bias_O, split=split)


def fp8_product(rows: Fp8Rows, weight: Fp8Weight, *, bias_O: Tensor | None = None, split: bool = False) -> Tensor:
    """x W^T + b, [M, O] in bfloat16, both sides in FP8.

    split: the result may come as float32 parts [M * parts, O] that are still to be summed, the parts of a row one after
    the other. Raises KernelUnsupported for shapes and dtypes that don't fit.
    """
    from flowinfer.kernels.fp8_linear.library import library_product, library_takes
    from flowinfer.kernels.fp8_linear.tiles import product_parts
    from flowinfer.kernels.fp8_linear.triton import launch_product

    num, size_in = rows.scale.shape[0], rows.codes.shape[1]
    _check(rows.codes, weight)
    if library_takes(rows, weight):
        return library_product(rows, weight, bias_O)
    size_out = weight.codes.shape[0]
    parts = product_parts(num, rows.terms, size_out, size_in) if split else 1
    dtype = torch.bfloat16 if parts == 1 else torch.float32
    out = torch.empty(num * parts, size_out, dtype=dtype, device=rows.codes.device)
    if num:
        launch_product(*rows, *weight, bias_O, out, parts)
    return out


def _check(x_MI: Tensor, weight: Fp8Weight) -> None:
    size_out, size_in = weight.codes.shape
    if x_MI.dtype is not CODE or x_MI.shape[1] != size_in or weight.codes.dtype is not CODE:
        raise KernelUnsupported(
            f"fp8_linear of {list(x_MI.shape)} {x_MI.dtype} and {list(weight.codes.shape)} {weight.codes.dtype}: "
            f"needs rows of {size_in} columns, and both in {CODE}."
        )
    if list(weight.scale.shape) != [-(-size_out // weight.rows), -(-size_in // GROUP)]:
        raise KernelUnsupported(
            f"fp8_linear: scales of shape {list(weight.scale.shape)} don't fit a weight of {list(weight.codes.shape)}, "
            f"one a block of {weight.rows} x {GROUP}."
        )
    if not (x_MI.is_contiguous() and weight.codes.is_contiguous() and weight.scale.is_contiguous()):
        raise KernelUnsupported("fp8_linear needs contiguous rows.")
