"""Drafts put to the test on the device: the rows of a step, and the batch's state moved on by those that held.

A draft holds iff it equals the target's own token at its position, which hangs on (seed, position, token) and the
logits alone. So tokens are chosen for each row as for a step of its own, by greedy or draw, and the first one behind
the drafts that held ends the step. That is rejection sampling of a point mass; see stages/spec_verify.

Dimensions: B sequences, T rows of each, R = B T, S slots, D drafts of a slot, P positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowinfer.errors import KernelUnsupported
from flowinfer.kernels.draw import SlotSettings
from flowinfer.kernels.verify.reference import advance_verified_reference, spread_rows_reference

__all__ = [
    "Drafted",
    "Rows",
    "Verdict",
    "advance_verified",
    "advance_verified_reference",
    "read_verdict",
    "spread_rows",
    "spread_rows_reference",
    "verdict_width",
]


class Drafted(NamedTuple):
    """What is drafted for each slot, int32. tokens [S, D]: the first num[s] are meant, most[s] of them are verified.

    limits [S]: length at which a sequence ends; no step makes it longer.
    """

    tokens: Tensor
    num: Tensor
    most: Tensor
    limits: Tensor

    @classmethod
    def make(cls, slots: int, drafts: int, device: torch.device) -> Drafted:
        """None for anybody, and no end."""
        zeros = torch.zeros(slots, dtype=torch.int32, device=device)
        limits = torch.full((slots,), 2**31 - 1, dtype=torch.int32, device=device)
        return cls(torch.zeros(slots, drafts, dtype=torch.int32, device=device), zeros, zeros.clone(), limits)


class Rows(NamedTuple):
    """The rows of a step. counts int32 [B]: real rows of each sequence, 0 where it has ended or there is none.

    int32 [R]: tokens, that each row runs; ids, its own number, -1 where it isn't real; lengths, the position of the
    token that it gives. settings: those of its slot, by row. So greedy and draw take rows for slots.
    """

    counts: Tensor
    tokens: Tensor
    ids: Tensor
    lengths: Tensor
    settings: SlotSettings

    @classmethod
    def make(cls, sequences: int, rows: int, device: torch.device) -> Rows:
        """Room for so many sequences of so many rows."""
        num = sequences * rows
        tokens, ids, lengths = torch.zeros(3, num, dtype=torch.int32, device=device)
        counts = torch.zeros(sequences, dtype=torch.int32, device=device)
        return cls(counts, tokens, ids, lengths, SlotSettings.make(num, device))


class Verdict(NamedTuple):
    """What a step did, int32. counts [B]: rows that ran.  chosen [B, T]: token of each, -1 where logits aren't finite.

    num_drafts [B]: drafts that there were, verified or not.  drafts [B, D].
    """

    counts: Tensor
    chosen: Tensor
    num_drafts: Tensor
    drafts: Tensor


def verdict_width(rows: int, drafts: int) -> int:
    """Numbers that advance_verified writes for a sequence."""
    return 2 + rows + drafts


def read_verdict(out_BW: Tensor, rows: int) -> Verdict:
    """The parts of what advance_verified wrote."""
    return Verdict(out_BW[:, 0], out_BW[:, 1 : 1 + rows], out_BW[:, 1 + rows], out_BW[:, 2 + rows :])


def spread_rows(
    slots_B: Tensor, last_S: Tensor, lengths_S: Tensor, drafted: Drafted, settings: SlotSettings, rows: Rows
) -> None:
    """Fills `rows` with each slot's last token and as many drafts as are meant, allowed, and fit before its end.

    T is rows.tokens' size over B. Slots of -1 are padding; a sequence at its end has no rows.
    """
    from flowinfer.kernels.verify.triton import launch_spread

    _check(slots_B, rows)
    launch_spread(slots_B, last_S, lengths_S, drafted, settings, rows)


def advance_verified(
    chosen_R: Tensor,
    slots_B: Tensor,
    rows: Rows,
    drafted: Drafted,
    last_S: Tensor,
    lengths_S: Tensor,
    out_BW: Tensor,
    history_SP: Tensor | None = None,
) -> None:
    """Moves each slot on by the drafts that held and the token behind them, and writes what happened (read_verdict).

    chosen_R int32: the target's own token of each row. last_S and lengths_S change, history_SP (all tokens by
    position, where given) takes the new ones, and drafted.num becomes 0: no draft is used twice.
    """
    from flowinfer.kernels.verify.triton import launch_advance

    _check(slots_B, rows)
    sequences = len(slots_B)
    width = verdict_width(len(chosen_R) // sequences, drafted.tokens.shape[1])
    if out_BW.shape != (sequences, width) or not out_BW.is_contiguous():
        raise KernelUnsupported(f"verify writes {sequences} x {width} numbers, not {list(out_BW.shape)}.")
    launch_advance(chosen_R, slots_B, rows, drafted, last_S, lengths_S, out_BW, history_SP)


def _check(slots_B: Tensor, rows: Rows) -> None:
    if len(rows.tokens) % len(slots_B) or len(rows.counts) != len(slots_B):
        raise KernelUnsupported(f"verify: {len(rows.tokens)} rows don't fit {len(slots_B)} sequences.")
