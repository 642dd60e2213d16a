"""y = x W^T + b in bfloat16 on a CPU, over a weight packed once for its dot products of pairs (AVX512_BF16).

For one to a few hundred rows it beats oneDNN's product, which it can stand in for: most of all at 2 to 64 rows, where
each of the weight's numbers is loaded once for several rows. A row's bytes don't depend on the rows beside it, nor on
the number of threads. Processors with AMX multiply many rows faster by oneDNN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels import compiled

__all__ = ["PANEL", "TileWeight", "missing", "tile_linear", "tile_linear_reference"]

PANEL = 64  # columns that are packed together


class TileWeight:
    """A weight [out, in] in panels: bfloat16 [out / 64, in / 2, 64, 2]; bias_O float32, zeros without one."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        """Raises KernelUnsupported for other dtypes and sizes, and where the processor or numba lacks."""
        if lacks := missing(weight_OI):
            raise KernelUnsupported(f"tile_linear of {list(weight_OI.shape)} needs {lacks}.", help="Use F.linear.")
        self.rows_out, self.columns = weight_OI.shape
        panels = weight_OI.view(-1, PANEL, self.columns // 2, 2).transpose(1, 2)
        self.panels = panels.contiguous()
        self.bias_O = torch.zeros(self.rows_out) if bias_O is None else bias_O.float()


def missing(weight_OI: Tensor) -> str:
    """What keeps this weight from being multiplied so, in words; empty where nothing does."""
    if weight_OI.device.type != "cpu" or weight_OI.dtype is not torch.bfloat16:
        return "bfloat16 on a CPU"
    if weight_OI.shape[0] % PANEL or weight_OI.shape[1] % 2:
        return f"{PANEL} rows out or a multiple, and an even number of columns"
    return compiled.missing() or compiled.missing_pairs()


def tile_linear(x_TI: Tensor, weight: TileWeight) -> Tensor:
    """[T, out] of x [T, in], bfloat16 and contiguous; sums are float32. Raises KernelUnsupported for other rows."""
    from flowinfer.kernels.tile_linear.cpu import linear

    if x_TI.dtype is not torch.bfloat16 or x_TI.shape[1:] != (weight.columns,) or not x_TI.is_contiguous():
        raise KernelUnsupported(
            f"tile_linear takes contiguous bfloat16 rows of {weight.columns} numbers, "
            f"got {list(x_TI.shape)} {x_TI.dtype}."
        )
    rows, size = x_TI.shape[0], weight.rows_out
    y_TO = x_TI.new_empty(rows, size)
    linear(x_TI, weight.panels, weight.bias_O, y_TO, rows, size, weight.columns, work=rows * size * weight.columns)
    return y_TO


def tile_linear_reference(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """As tile_linear of such a weight, in plain torch."""
    return F.linear(x_TI, weight_OI, bias_O)
