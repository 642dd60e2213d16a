"""Rotary position embedding (Su et al., 2021) with the half-split pairing of Hugging Face checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowinfer.engine.models.config import ModelConfig, RopeScaling


class Rope:
    """Cosines and sines of max_positions positions in the model's dtype: 256 bytes each at head_dim 64 in bf16."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        positions = torch.arange(config.max_positions, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(config))
        self.cos_PD = torch.cat((angles, angles), -1).cos().to(device, dtype)
        # The sign of the rotation is kept in the sines: rotating is then one roll, not a split and a negation.
        self.sin_PD = torch.cat((-angles, angles), -1).sin().to(device, dtype)

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, D] for one step, the same in all layers."""
        return self.cos_PD[positions_T].unsqueeze(1), self.sin_PD[positions_T].unsqueeze(1)


def rotate(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """x rotated to its positions, in three kernel calls."""
    swapped = x_THD.roll(x_THD.shape[-1] // 2, -1)
    return (x_THD * cos_T1D).addcmul_(swapped, sin_T1D)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """float32 [D / 2], scaled where the model says so."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    return _llama3(frequencies, config.rope_scaling) if config.rope_scaling else frequencies


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's long context: waves longer than the training context stretch by factor, with a ramp between."""
    waves_per_context = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((waves_per_context - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies
