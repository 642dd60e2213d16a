"""Where a step's rows lie in the arena and what each token may see; made once a step, used by every layer.

Dimensions: T tokens, W window, G groups that close in this step, r their rate, E compressed entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowinfer.engine.models.deepseek_v4.config import V4Config
from flowinfer.engine.step import Replays, StepInput


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a section: block and row inside it, int64 of one shape."""

    blocks: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Closing:
    """Groups of one rate that this step completes, and the ring rows that it leaves behind.

    source int64 [G, slots] tokens of this step (0 where the ring has them), in_step bool [G, slots] which it has,
    ring those that it hasn't, exists bool [G, slots] (false before the first group), entries where the G results go,
    starts int64 [G] position of each group's first token.  kept int64: tokens whose rows stay, kept_rows: where.
    visible int64 [T]: entries that each token may see;  most: the largest of them.
    """

    source: Tensor
    in_step: Tensor
    ring: Rows
    exists: Tensor
    entries: Rows
    starts: Tensor
    kept: Tensor
    kept_rows: Rows
    visible: Tensor
    most: int


@dataclass(frozen=True, slots=True)
class Plan:
    """sequence_T, within_T int64: whose token, and which of its tokens in this step.  counts: tokens a sequence.

    window [T, W] rows of the window keys, in_window bool [T, W].  closing by layer kind, keyed (rate, slots).
    """

    positions: Tensor
    sequence_T: Tensor
    within_T: Tensor
    counts: np.ndarray
    tables: Tensor
    own: Rows
    window: Rows
    in_window: Tensor
    closing: dict[tuple[int, int], Closing]
    block_tokens: int

    def entries(self, sequences: Tensor, rate: int, numbers: Tensor) -> Rows:
        """Where compressed entries `numbers` of `sequences` (shapes that broadcast) lie."""
        each = self.block_tokens // rate
        return Rows(self.tables[sequences, numbers // each], numbers % each)


def make_plan(step: StepInput, config: V4Config) -> Plan:
    """The plan of one step."""
    device, size = step.positions.device, config.block_tokens
    counts = np.diff(step.query_starts).astype(np.int64)
    sequence = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(sequence)) - step.query_starts[:-1].astype(np.int64)[sequence]
    positions = step.kv_lens.astype(np.int64)[sequence] - counts[sequence] + within
    tables = step.block_tables.astype(np.int64)
    nothing = np.zeros(len(counts), np.int32)
    replays = step.replays or Replays(nothing, nothing)

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    def rows(sequences: np.ndarray, at: np.ndarray, ring: int = size) -> Rows:
        return Rows(tensor(tables[sequences, at // size]), tensor(at % size % ring))

    back = positions[:, None] - np.arange(config.window - 1, -1, -1)
    in_window = back >= replays.window_from.astype(np.int64)[sequence, None]
    # A key before the start (of a replay) is replaced by the token's own: unseen keys are multiplied by zero, but must
    # be numbers.
    window = rows(sequence[:, None], np.where(in_window, back, positions[:, None]))

    def closing(rate: int, slots: int, ring: int) -> Closing:
        starts = step.kv_lens - counts
        last = step.kv_lens // rate
        first = np.minimum(np.maximum(starts, replays.entries_from) // rate, last)
        num = last - first
        owner = np.repeat(np.arange(len(counts)), num)
        group = np.arange(len(owner)) - (np.cumsum(num) - num)[owner] + first[owner]
        at = (group[:, None] + 1) * rate - slots + np.arange(slots)
        exists, in_step = at >= 0, at >= starts[owner, None]
        place = np.maximum(at, 0)
        source = np.where(in_step, step.query_starts[:-1][owner, None] + at - starts[owner, None], 0)
        last_here = np.minimum(step.kv_lens.astype(np.int64)[sequence], (positions // size + 1) * size)
        kept = np.flatnonzero(positions + ring >= last_here)
        each = size // rate
        visible = (positions + 1) // rate
        return Closing(
            source=tensor(source.astype(np.int64)),
            in_step=tensor(in_step),
            ring=rows(owner[:, None], place, ring),
            exists=tensor(exists),
            entries=Rows(tensor(tables[owner, group // each]), tensor(group % each)),
            starts=tensor(group * rate),
            kept=tensor(kept),
            kept_rows=rows(sequence[kept], positions[kept], ring),
            visible=tensor(visible),
            most=int(visible.max()),
        )

    kinds = {
        (rate, rate * (2 if layer in config.sparse_layers else 1)): config.ring_rows(layer)
        for layer, rate in enumerate(config.rates)
        if rate
    }
    return Plan(
        positions=tensor(positions),
        sequence_T=tensor(sequence),
        within_T=tensor(within),
        counts=counts,
        tables=tensor(tables),
        own=rows(sequence, positions),
        window=window,
        in_window=tensor(in_window),
        closing={kind: closing(*kind, ring) for kind, ring in kinds.items()},
        block_tokens=size,
    )
