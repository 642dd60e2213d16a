"""Rows that each routed expert got, by layer and step, of prefill and decode apart. Decides nothing.

A model's expert layers add to `counts` as they run; the engine moves them here behind each step. On a GPU a decode
step in a graph has counts of its own, which stay there and come to the host several steps at a time: nobody waits.

Dimensions: L layers with experts, E experts, W steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Phase = Literal["prefill", "decode"]
Counts = NDArray[np.int32]
STEPS = 100  # kept; 6 MB at 60 layers of 256 experts


class LoadWindow:
    """The newest STEPS steps of one phase."""

    def __init__(self, layers: int, experts: int, steps: int = STEPS) -> None:
        self._ring: Counts = np.zeros((steps, layers, experts), np.int32)
        self._total = np.zeros((layers, experts), np.int64)  # of the ring
        self.num_steps = 0  # that were ever added
        self.num_rows = 0  # of all of them and all layers

    def add(self, counts_LE: Counts) -> None:
        """One step's rows by layer and expert, copied."""
        oldest = self._ring[self.num_steps % len(self._ring)]
        self._total += counts_LE - oldest
        oldest[:] = counts_LE
        self.num_steps += 1
        self.num_rows += int(counts_LE.sum())

    def add_all(self, counts_WLE: Counts) -> None:
        """As many steps, oldest first, copied; at most as many as are kept."""
        at = np.arange(self.num_steps, self.num_steps + len(counts_WLE)) % len(self._ring)
        self._total += counts_WLE.sum(0) - self._ring[at].sum(0)
        self._ring[at] = counts_WLE
        self.num_steps += len(counts_WLE)
        self.num_rows += int(counts_WLE.sum())

    def recent(self) -> Counts:
        """int32 [W, L, E], oldest first, W up to STEPS; a copy."""
        if self.num_steps <= len(self._ring):
            return self._ring[: self.num_steps].copy()
        return np.roll(self._ring, -(self.num_steps % len(self._ring)), 0)

    def peaks(self) -> NDArray[np.float64]:
        """float64 [L]: the busiest expert's rows over the mean expert's, of all kept steps; 0 where there are none."""
        ratios: NDArray[np.float64] = self._total.max(1) / np.maximum(self._total.mean(1), 1e-12)
        return ratios


class ExpertLoad:
    """counts int32 [L, E] on the model's device: what its layers have added since the last step ended."""

    def __init__(self, counts_LE: Tensor) -> None:
        self.counts_LE = counts_LE
        layers, experts = counts_LE.shape
        self.windows: dict[Phase, LoadWindow] = {p: LoadWindow(layers, experts) for p in ("prefill", "decode")}

    def end_step(self, phase: Phase) -> None:
        """Books the step that has just run eagerly. On a GPU the caller has waited for it."""
        import torch  # here: what reads the windows needs none

        with torch.inference_mode():
            self.windows[phase].add(self.counts_LE.cpu().numpy())
            self.counts_LE.zero_()
