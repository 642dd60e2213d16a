"""RMSNorm of each row, with the sum that comes before it in a decoder."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flowinfer.errors import KernelUnsupported

__all__ = ["rms_norm", "rms_norm_reference"]


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, *, delta_TH: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x, normed): x + delta_TH where that is given, written over x, and its RMSNorm (Zhang and Sennrich 2019).

    x [T, H], contiguous; statistics are float32. Raises KernelUnsupported for strided rows.
    """
    from flowinfer.kernels.norm.triton import launch

    if not x_TH.is_contiguous() or (delta_TH is not None and not delta_TH.is_contiguous()):
        raise KernelUnsupported("norm needs contiguous rows.")
    normed = x_TH.new_empty(x_TH.shape)
    if x_TH.shape[0]:
        launch(x_TH, delta_TH, weight_H, eps, normed)
    return x_TH, normed


def rms_norm_reference(
    x_TH: Tensor, weight_H: Tensor, eps: float, *, delta_TH: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As rms_norm, in plain torch, x left as it is."""
    x_TH = x_TH if delta_TH is None else x_TH + delta_TH
    return x_TH, F.rms_norm(x_TH, (x_TH.shape[1],), weight_H, eps)
