"""y = x W^T + b on a CPU over weights of 8 bits, rows of x rounded to 8 bits too as they come (AVX512_VNNI).

A weight is a code times its row's scale. 32 numbers of x lie between their least and largest in 254 steps: products and
sums of such a group are whole numbers, exact, at twice the rate of bfloat16 and from half the bytes; what lies in the
middle of a group is multiplied by the sum of its weights. A row's bytes don't depend on the rows beside it, nor on the
number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels import compiled

__all__ = ["GROUP", "PANEL", "Int8Weight", "int8_linear", "int8_linear_reference", "missing"]

GROUP = 32  # numbers of a row that share a scale
PANEL = 32  # columns that are packed together


class Int8Weight:
    """codes int8 [out, in] of -127 to 127 in panels, [out / 32, in / 4, 32, 4]; scale_O and bias_O float32.

    sums int16 [out / 32, in / 32, 32]: of the codes that share a group.
    """

    def __init__(self, codes_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None = None) -> None:
        """Raises KernelUnsupported for sizes that have no tiles, and where the processor or numba lacks."""
        if lacks := missing(codes_OI):
            raise KernelUnsupported(f"int8_linear of {list(codes_OI.shape)} needs {lacks}.", help="Use F.linear.")
        self.rows_out, self.columns = codes_OI.shape
        self.panels = codes_OI.view(-1, PANEL, self.columns // 4, 4).transpose(1, 2).contiguous()
        sums_OG = codes_OI.unflatten(1, (-1, GROUP)).sum(-1, dtype=torch.int16)
        self.sums = sums_OG.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
        self.scale_O = scale_O.float()
        self.bias_O = torch.zeros(self.rows_out) if bias_O is None else bias_O.float()


def missing(codes_OI: Tensor) -> str:
    """What keeps this weight from being multiplied so, in words; empty where nothing does."""
    if codes_OI.device.type != "cpu":
        return "a CPU"
    if codes_OI.shape[0] % PANEL or codes_OI.shape[1] % GROUP:
        return f"multiples of {PANEL} rows out and of {GROUP} columns"
    return compiled.missing() or compiled.missing_feature("avx512vnni")


def int8_linear(x_TI: Tensor, weight: Int8Weight) -> Tensor:
    """[T, out] of x [T, in], bfloat16 and contiguous. Raises KernelUnsupported for other rows."""
    from flowinfer.kernels.int8_linear.cpu import linear_int8, quantize_rows

    if x_TI.dtype is not torch.bfloat16 or x_TI.shape[1:] != (weight.columns,) or not x_TI.is_contiguous():
        raise KernelUnsupported(
            f"int8_linear takes contiguous bfloat16 rows of {weight.columns} numbers, "
            f"got {list(x_TI.shape)} {x_TI.dtype}."
        )
    m, n, k = x_TI.shape[0], weight.rows_out, weight.columns
    codes, steps, middles = (
        x_TI.new_empty(m, k, dtype=torch.uint8),
        torch.empty(m, k // GROUP),
        torch.empty(m, k // GROUP),
    )
    y_TO = x_TI.new_empty(m, n)
    quantize_rows(x_TI, codes, steps, middles, m, k, work=2 * m * k)
    linear_int8(
        codes, steps, middles, weight.panels, weight.sums, weight.scale_O, weight.bias_O, y_TO, m, n, k, work=m * n * k
    )  # fmt: skip
    return y_TO


def int8_linear_reference(x_TI: Tensor, codes_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """As int8_linear of such a weight, in plain torch: float64 [T, out]."""
    groups = x_TI.float().unflatten(1, (-1, GROUP))
    least, most = groups.aminmax(dim=-1, keepdim=True)
    middle, width = (least + most) / 2, most - least
    scaled = (groups - middle) * torch.where(width > 0, 254 / width, 0)
    codes = torch.trunc(scaled + torch.copysign(torch.tensor(0.5), scaled))  # halves away from zero
    rounded = codes.double() * width.double() / 254 + middle.double()
    y_TO: Tensor = rounded.flatten(1) @ codes_OI.double().t() * scale_O.double()
    return y_TO if bias_O is None else y_TO + bias_O.double()
