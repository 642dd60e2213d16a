"""The best token of each row of logits, and the batch's state moved on by it, without a word from the host."""

from __future__ import annotations

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.greedy.reference import advance_greedy_reference

__all__ = ["advance_greedy", "advance_greedy_reference", "greedy_scratch"]

CHUNK = 4096


def greedy_scratch(rows: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Partial results for up to `rows` rows: best values float32, their tokens int32, arrivals int32 (zeros)."""
    chunks = -(-vocab // CHUNK)
    return (
        torch.empty(rows * chunks, dtype=torch.float32, device=device),
        torch.empty(rows * chunks, dtype=torch.int32, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
    )


def advance_greedy(
    logits_BV: Tensor,
    slots_B: Tensor,
    last_S: Tensor,
    lengths_S: Tensor,
    chosen_B: Tensor,
    scratch: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Writes each row's best token into chosen_B and, for its slot, into last_S; adds one to lengths_S.

    logits float32 or bfloat16 [B, V], contiguous; the rest int32. Of equal logits the lowest token wins. A row with a
    NaN or nothing finite gives -1 (and 0 as its slot's last token). Rows of slot -1 are padding: chosen only.
    """
    from flowinfer.kernels.greedy.triton import launch

    if not logits_BV.is_contiguous() or logits_BV.dtype not in (torch.float32, torch.bfloat16):
        raise KernelUnsupported(f"greedy takes contiguous float32 or bfloat16 logits, not {logits_BV.dtype}.")
    launch(logits_BV, slots_B, last_S, lengths_S, chosen_B, scratch)
