"""y = x W^T + b, by the fastest way that the device, the dtype and the build have. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from flowinfer.kernels.tile_linear import TileWeight, missing, tile_linear


class Projection(Protocol):
    """Maps [T, in] to [T, out]."""

    def __call__(self, x_TI: Tensor, /) -> Tensor: ...


Make = Callable[[Tensor, Tensor | None], Projection]  # of a weight [out, in] and a bias [out]


class Linear:
    """Plain matrix product: any device and dtype."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.weight_OI = weight_OI
        self.bias_O = bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self.weight_OI, self.bias_O)


class PackedLinear:
    """oneDNN product over a weight laid out once for it: 1.7x faster than F.linear at 1 to 16 rows in bf16 and f32.

    Keeps only the packed copy, so a model's weights are in memory once.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), PACK_ROWS)
        self._bias_O = bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        y_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self._packed, self._bias_O, "none", [], "")
        return y_TO


class TileLinear:
    """bfloat16 product in tiles over a packed weight (see kernels.tile_linear): any number of rows on a CPU."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.weight = TileWeight(weight_OI, bias_O)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return tile_linear(x_TI.contiguous(), self.weight)


PACK_ROWS = 16  # rows that the packed layout is chosen for


def make_linear(weight_OI: Tensor, bias_O: Tensor | None = None) -> Projection:
    """The best Projection here; the caller drops its reference to weight_OI, so that one copy stays."""
    return (PackedLinear if can_pack(weight_OI) else Linear)(weight_OI, bias_O)


def make_tiles(weight_OI: Tensor, bias_O: Tensor | None = None) -> Projection:
    """A product in tiles where this weight has one, else as make_linear; for models that run by compiled loops."""
    return make_linear(weight_OI, bias_O) if missing(weight_OI) else TileLinear(weight_OI, bias_O)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN's packed product exists for this weight on this machine."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32
