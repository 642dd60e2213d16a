"""Decoder models by their Hugging Face names. Importing this package doesn't import torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowinfer.engine.models.decoder import Model
    from flowinfer.engine.models.deepseek_v4.model import V4Model


def load_model(
    path: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    batch_invariant: bool = False,
    weights: str = "checkpoint",
) -> Model | V4Model:
    """The model of a Hugging Face folder, ready to run.

    dtype is float32, bfloat16 or auto (the file's own); device is a torch device name; progress is called with layers
    done and layers in all. batch_invariant: a token's bytes don't depend on what runs beside it (see `invariant`).
    weights: as they are, or int8, int4, int8-only or int4-only on a CPU (see `quantized`).
    Raises ModelError naming the file, field or tensor at fault.
    """
    from flowinfer.engine.models.load import load

    return load(path, dtype=dtype, device=device, progress=progress, batch_invariant=batch_invariant, weights=weights)
