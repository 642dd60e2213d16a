"""Drafts by prompt look-up on the device: what followed the last n-gram of each history where it stood before.

Method: Saxena, "Prompt lookup decoding" (2023). The longest n-gram that ends the history decides, at its latest earlier
place. Every position is compared, with no index to keep: 40,000 tokens are 160 KB, and the parts of a history are
read side by side.

Dimensions: B sequences of a step, S slots, P positions, D drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.ngram.reference import look_up_reference

__all__ = ["look_up", "look_up_reference", "lookup_scratch"]

PARTS = 16  # programs a sequence
MOST_POSITIONS, MOST_LENGTH = 2**26, 16  # a match is one int32: its length, then its place


def lookup_scratch(sequences: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Best match of each part, int32, and arrivals, int32 (zeros)."""
    matches = torch.empty(sequences * PARTS, dtype=torch.int32, device=device)
    return matches, torch.zeros(sequences, dtype=torch.int32, device=device)


def look_up(
    slots_B: Tensor,
    history_SP: Tensor,
    lengths_S: Tensor,
    drafts_SD: Tensor,
    num_S: Tensor,
    scratch: tuple[Tensor, Tensor],
    *,
    ngram_min: int,
    ngram_max: int,
) -> None:
    """Writes D drafts of each slot and their number, D or 0; all int32. Slots of -1 are left alone.

    history holds lengths_S[s] tokens of slot s. Where a match lies so near the end that fewer than D tokens follow it,
    they repeat, as they'd do in a loop. Raises KernelUnsupported for longer n-grams or histories than MOST_...
    """
    from flowinfer.kernels.ngram.triton import launch

    if not 1 <= ngram_min <= ngram_max <= MOST_LENGTH or history_SP.shape[1] >= MOST_POSITIONS:
        raise KernelUnsupported(f"ngram looks up 1 to {MOST_LENGTH} tokens in fewer than {MOST_POSITIONS}.")
    launch(slots_B, history_SP, lengths_S, drafts_SD, num_S, scratch, ngram_min, ngram_max)
