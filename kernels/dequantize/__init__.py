"""Block-scaled weights to plain ones on the card that multiplies with them: over the bus they go as they are stored.

FP8 is E4M3 with a scale a block of rows and columns; FP4 is E2M1 in pairs with a scale every 32 columns (OCP
Microscaling Formats, 2023). Bits are taken apart by integers, so cards without such units read them too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.dequantize.reference import FP4_COLUMNS, dequantize_reference

__all__ = ["dequantize", "dequantize_reference"]

_SCALES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


def dequantize(
    weight_OI: Tensor,
    scale: Tensor,
    block: tuple[int, int] = (128, 128),
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """[O, I] of dtype bfloat16 or float32: numbers times their scales, rounded once.

    weight float8_e4m3fn [O, I] with scale [ceil(O / rows), ceil(I / columns)] of `block`; or int8 or uint8 [O, I / 2],
    two E2M1 numbers a byte with the even column in the low four bits, with scale [O, ceil(I / 32)]. scale float32,
    bfloat16 or float8_e8m0fnu. All contiguous; out: where the result goes. Raises KernelUnsupported for what it can't.
    """
    from flowinfer.kernels.dequantize.triton import launch_fp4, launch_fp8

    packed = weight_OI.dtype in (torch.int8, torch.uint8)
    if weight_OI.dim() != 2 or not (packed or weight_OI.dtype is torch.float8_e4m3fn):
        raise KernelUnsupported(f"dequantize takes matrices of E4M3 or packed E2M1, not {_kind(weight_OI)}.")
    rows, columns = weight_OI.shape
    high, wide = (1, FP4_COLUMNS // 2) if packed else block
    if scale.dtype not in _SCALES or tuple(scale.shape) != (-(-rows // high), -(-columns // wide)):
        raise KernelUnsupported(f"dequantize: scales {_kind(scale)} don't belong to {_kind(weight_OI)}.")
    if out is None:
        out = torch.empty(rows, columns * (2 if packed else 1), dtype=dtype, device=weight_OI.device)
    if out.dtype not in (torch.bfloat16, torch.float32) or out.shape != (rows, columns * (2 if packed else 1)):
        raise KernelUnsupported(f"dequantize gives bfloat16 or float32 of its own shape, not {_kind(out)}.")
    if not (weight_OI.is_contiguous() and scale.is_contiguous() and out.is_contiguous()):
        raise KernelUnsupported("dequantize takes contiguous matrices.")
    if not out.numel():
        return out
    exponents = scale.dtype is torch.float8_e8m0fnu
    scales = scale.view(torch.uint8) if exponents else scale
    if packed:
        launch_fp4(weight_OI.view(torch.uint8), scales, exponents, out)
    else:
        launch_fp8(weight_OI.view(torch.uint8), scales, exponents, block, out)
    return out


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
