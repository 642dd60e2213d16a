"""Products of many rows by the library's own kernel for block scales, where this torch and card have it."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flowinfer.kernels.fp8_linear import Fp8Rows, Fp8Weight

MANY_ROWS = 1024  # from which it is the faster one


def library_takes(rows: Fp8Rows, weight: Fp8Weight) -> bool:
    """Whether this product is the library's: many rows of one term, and scales as it wants them."""
    size_out, size_in = weight.codes.shape
    fits = weight.rows == 128 and size_out % 128 == 0 and size_in % 512 == 0
    many = rows.terms == 1 and rows.scale.shape[0] >= MANY_ROWS
    return fits and many and rows.scale.stride(1) % 4 == 0 and has_block_scales(rows.codes.device)


def library_product(rows: Fp8Rows, weight: Fp8Weight, bias_O: Tensor | None) -> Tensor:
    """As fp8_product, in bfloat16. Rows go along up to the multiple of four that their memory has; they aren't read."""
    (num, size_in), room = rows.codes.shape, rows.scale.stride(1)
    codes = rows.codes.as_strided((room, size_in), (size_in, 1))
    scale = rows.scale.as_strided((room, rows.scale.shape[1]), (1, room))
    y: Tensor = torch._scaled_mm(
        codes, weight.codes.t(), scale_a=scale, scale_b=weight.scale.t(), out_dtype=torch.bfloat16
    )[:num]
    return y if bias_O is None else y + bias_O


@lru_cache
def has_block_scales(device: torch.device) -> bool:
    """Whether torch multiplies with scales of 1 x 128 and 128 x 128 there: cuBLAS of CUDA 12.9 on Hopper does."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    codes = torch.zeros(512, 512, device=device).to(torch.float8_e4m3fn)
    scales = torch.ones(4, 512, device=device).t(), torch.ones(4, 4, device=device).t()
    try:
        torch._scaled_mm(codes, codes.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError):
        return False
    return True
