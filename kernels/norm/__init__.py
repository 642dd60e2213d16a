"""RMSNorm of each row, with the sum that comes before it in a decoder."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flowinfer.errors import KernelUnsupported

__all__ = ["rms_norm", "rms_norm_reference"]


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, *, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x, normed): x + delta where that is given, written over x, and its RMSNorm (Zhang and Sennrich 2019).

    x [T, H], contiguous; delta [T, H], or [T * parts, H] with the parts of a row one after the other, which are summed.
    Sums and statistics are float32. Raises KernelUnsupported for strided rows or a delta that doesn't fit.
    """
    from flowinfer.kernels.norm.triton import launch

    rows, width = x_TH.shape
    if not x_TH.is_contiguous() or (delta is not None and not delta.is_contiguous()):
        raise KernelUnsupported("norm needs contiguous rows.")
    if delta is not None and (delta.shape[1] != width or rows == 0 or delta.shape[0] % rows):
        raise KernelUnsupported(f"norm: a delta of {list(delta.shape)} doesn't fit rows of {list(x_TH.shape)}.")
    normed = x_TH.new_empty(x_TH.shape)
    if rows:
        launch(x_TH, delta, weight_H, eps, normed)
    return x_TH, normed


def rms_norm_reference(
    x_TH: Tensor, weight_H: Tensor, eps: float, *, delta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As rms_norm, in plain torch, x left as it is."""
    if delta is not None:
        x_TH = x_TH + delta.view(x_TH.shape[0], -1, x_TH.shape[1]).sum(1)
    return x_TH, F.rms_norm(x_TH, (x_TH.shape[1],), weight_H, eps)
