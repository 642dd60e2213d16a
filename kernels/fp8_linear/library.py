"""Products of rows in FP8 by the library's own kernel for block scales, where this torch and card have it.

On an H200 it took 16.7 us for 128 and 256 rows of Qwen3-8B's q, k and v, where ours took 24 and 29.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flowinfer.kernels.fp8_linear import Fp8Rows, Fp8Weight


def library_takes(rows: Fp8Rows, weight: Fp8Weight) -> bool:
    """Whether this product is the library's: sizes, and scales as it wants them."""
    size_out, size_in = weight.codes.shape
    fits = weight.rows == 128 and size_out % 128 == 0 and size_in % 512 == 0 and rows.scale.shape[0] > 0
    return fits and rows.scale.stride(1) % 4 == 0 and has_block_scales(rows.codes.device)


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
    """Whether torch multiplies with scales of 1 x 128 and 128 x 128 there, tried with few rows and with more.

    cuBLAS of CUDA 12.9 on Hopper does.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    codes = torch.ones(512, 512, device=device).to(torch.float8_e4m3fn)
    steps = torch.arange(1, 513, dtype=torch.float32, device=device)
    weight_scale = steps[:4, None] * steps[:4]
    try:
        return all(_is_right(codes, steps, weight_scale, rows) for rows in (20, 32, 512))
    except (RuntimeError, ValueError):
        return False


def _is_right(codes: Tensor, steps: Tensor, weight_scale: Tensor, rows: int) -> bool:
    """Of ones, row m scaled by m + 1, blocks of the weight by the products of their places."""
    scale = steps[:rows].repeat(4, 1).t()
    y = torch._scaled_mm(codes[:rows], codes.t(), scale_a=scale, scale_b=weight_scale.t(), out_dtype=torch.bfloat16)
    want = 128 * steps[:rows, None] * weight_scale.sum(1).repeat_interleave(128)
    return bool(torch.allclose(y.float(), want, rtol=1e-2))
