"""dequantize in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

FP4_COLUMNS = 32  # that share an FP4 scale
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize_reference(weight: Tensor, scale: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """float32 [rows, columns] of weight float8 [rows, columns] or packed int8 [rows, columns / 2] and its scales.

    block: rows and columns of a square of float8. Shapes and dtypes are those of dequantize.
    """
    packed = weight.dtype in (torch.int8, torch.uint8)
    values = _unpack(weight) if packed else weight.float()
    rows, columns = values.shape
    high, wide = (1, FP4_COLUMNS) if packed else block
    spread = scale.float().repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    return values * spread


def _unpack(packed: Tensor) -> Tensor:
    """float32 [rows, 2 * columns] of pairs of E2M1."""
    codes = packed.view(torch.uint8)
    pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    table = torch.tensor(_E2M1 + tuple(-value for value in _E2M1), device=packed.device)
    return table[pairs]
