"""Where the tokens of a step stand, for kernels that take prefill, verify and decode alike: a program asks for its own.

Dimensions: T tokens, S sequences, R channels that are rotated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenRows(NamedTuple):
    """int32 tensors on the device; a sequence's tokens are consecutive rows.

    slots [T]: row of block_tables; -1 marks padding, for which kernels write nothing and return zeros.
    positions [T].  firsts [T]: position of the sequence's first token in this step.  ends [T]: its context length, this
    step included.  window_from, entries_from [T]: of a replay; window keys before the one aren't read, compressed
    entries of earlier tokens than the other aren't written (0: no replay).
    block_tables [S, max_blocks].  block_tokens: tokens of a block.
    single: whether no sequence has two tokens in this step.
    """

    slots: Tensor
    positions: Tensor
    firsts: Tensor
    ends: Tensor
    window_from: Tensor
    entries_from: Tensor
    block_tables: Tensor
    block_tokens: int
    single: bool = False

    @property
    def most_tokens(self) -> int:
        """Tokens that the tables have room for."""
        return int(self.block_tables.shape[1]) * self.block_tokens

    def part(self, part: slice) -> TokenRows:
        """Of some tokens."""
        slots, positions, firsts, ends, window_from, entries_from = (values[part] for values in self[:6])
        return TokenRows(
            slots, positions, firsts, ends, window_from, entries_from, self.block_tables, self.block_tokens, self.single
        )


class Turn(NamedTuple):
    """Rotations of each token, float32 [T, R / 2] each, for neighbouring pairs of the last R channels."""

    cos: Tensor
    sin: Tensor


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last channels rotated, for references; cos and sin broadcast against [..., R / 2]."""
    count = 2 * cos.shape[-1]
    even, odd = x[..., -count:].unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((x[..., :-count], pairs), -1)
