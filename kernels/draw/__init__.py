"""A sampled token of each row of logits, and the batch's state moved on by it, without a word from the host.

No sort, and each row is read by several programs. A filter's edge is narrowed down by the weight above 16 bounds at a
time, until few tokens lie beside it; these are listed, and one program finds it among them. Noise and order of filters
are those of kernels/sampling, whose reference is this op's too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.draw.reference import advance_drawn_reference

__all__ = ["DrawScratch", "SlotSettings", "advance_drawn", "advance_drawn_reference", "draw_scratch"]

CHUNK = 4096  # tokens of a program
BOUNDS = 16  # for which weights are summed in one pass
LISTED = 4096  # tokens beside a filter's edge that one program decides about; with more it takes passes over the row
MARKS = 6  # numbers that a row's search is made of


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


class DrawScratch(NamedTuple):
    """What programs leave for each other, by row; C chunks of the vocabulary.

    modes, settled, arrived (zeros between calls), found int32 [B]; marks float32 [B, MARKS]; by chunk [B, C]: tops
    float32, firsts int32, leads float64, weights float32 [B, C, BOUNDS], sums float64 [B, C, 2]; listed int32
    [B, LISTED].
    """

    modes: Tensor
    settled: Tensor
    marks: Tensor
    arrived: Tensor
    found: Tensor
    tops: Tensor
    firsts: Tensor
    leads: Tensor
    weights: Tensor
    sums: Tensor
    listed: Tensor


def draw_scratch(rows: int, vocab: int, device: torch.device) -> DrawScratch:
    """For up to `rows` rows: 20 KB each at a vocabulary of 152k."""
    chunks = -(-vocab // CHUNK)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=device)

    ints, floats, doubles = torch.int32, torch.float32, torch.float64
    return DrawScratch(
        modes=empty(ints),
        settled=empty(ints),
        marks=empty(floats, MARKS),
        arrived=torch.zeros(rows, dtype=ints, device=device),
        found=empty(ints),
        tops=empty(floats, chunks),
        firsts=empty(ints, chunks),
        leads=empty(doubles, chunks),
        weights=empty(floats, chunks, BOUNDS),
        sums=empty(doubles, chunks, 2),
        listed=empty(ints, LISTED),
    )


def advance_drawn(
    logits_BV: Tensor,
    slots_B: Tensor,
    last_S: Tensor,
    lengths_S: Tensor,
    chosen_B: Tensor,
    settings: SlotSettings,
    scratch: DrawScratch,
) -> None:
    """As greedy.advance_greedy, by each slot's settings. lengths_S is the position that the noise hangs on.

    A row with a NaN or nothing finite gives -1. Rows of slot -1 are padding and give -1 too. Raises KernelUnsupported
    for other logits than contiguous float32 or bfloat16, and for more rows or tokens than the scratch is for.
    """
    from flowinfer.kernels.draw.triton import launch

    if not logits_BV.is_contiguous() or logits_BV.dtype not in (torch.float32, torch.bfloat16):
        raise KernelUnsupported(f"draw takes contiguous float32 or bfloat16 logits, not {logits_BV.dtype}.")
    rows, vocab = logits_BV.shape
    if rows > len(scratch.modes) or -(-vocab // CHUNK) > scratch.tops.shape[1]:
        raise KernelUnsupported(f"draw has no scratch for {rows} rows of {vocab} tokens.")
    launch(logits_BV, slots_B, last_S, lengths_S, chosen_B, settings, scratch)
