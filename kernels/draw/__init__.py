"""A sampled token of each row of logits, and the batch's state moved on by it, without a word from the host.

No sort: the k-th best logit and the edge of the nucleus are found by bisection over the 32 bits of a float, a pass over
the row each. Noise and order of filters are those of kernels/sampling, whose reference is this op's too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.draw.reference import advance_drawn_reference

__all__ = ["SlotSettings", "advance_drawn", "advance_drawn_reference"]


class SlotSettings(NamedTuple):
    """How to choose, by slot. temperature 0: the best token. top_k 0, top_p 1, min_p 0: off. seeds: bits of uint64.

    temperature, top_p, min_p float32 [S]; top_k int32 [S]; seeds int64 [S].
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor

    @classmethod
    def make(cls, slots: int, device: torch.device) -> SlotSettings:
        """Greedy for all."""
        zeros, ones = torch.zeros(slots, device=device), torch.ones(slots, device=device)
        return cls(
            zeros, zeros.int(), ones, zeros.clone(), torch.zeros(slots, dtype=torch.int64, device=device)
        )  # fmt: skip


def advance_drawn(
    logits_BV: Tensor, slots_B: Tensor, last_S: Tensor, lengths_S: Tensor, chosen_B: Tensor, settings: SlotSettings
) -> None:
    """As greedy.advance_greedy, by each slot's settings. lengths_S is the position that the noise hangs on.

    A row with a NaN or nothing finite gives -1. Rows of slot -1 are padding and give -1 too.
    """
    from flowinfer.kernels.draw.triton import launch

    if not logits_BV.is_contiguous() or logits_BV.dtype not in (torch.float32, torch.bfloat16):
        raise KernelUnsupported(f"draw takes contiguous float32 or bfloat16 logits, not {logits_BV.dtype}.")
    launch(logits_BV, slots_B, last_S, lengths_S, chosen_B, settings)
