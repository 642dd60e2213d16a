"""Which drafts hold and when a sequence ends. Pure: arrays over the batch in, arrays out.

Legend: n sequences of a step, W rows of the longest, D drafts at most; `slots` int32 [n] name their rows in the batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowinfer.message import Ids, Sampling

RUNS, STOP, LENGTH = 0, 1, 2
Flags = NDArray[np.bool_]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


def pad_rows(tokens: I64 | Ids, starts: Ids) -> Ids:
    """Flat tokens of the rows as int32 [n, W]; a short sequence repeats its last row."""
    columns = np.arange(np.diff(starts).max())
    padded: Ids = tokens[np.minimum(starts[:-1, None] + columns, starts[1:, None] - 1)].astype(np.int32)
    return padded


def count_matches(target_nW: Ids, drafts_nD: Ids, num_drafts: Ids) -> Ids:
    """Leading drafts that equal the target's own token at their position, int32 [n].

    A draft that comes as a point mass is accepted iff it equals the target's own sample. That is rejection sampling for
    a point mass: the draft d holds with probability p(d), and where it doesn't, the target's sample, which then is
    distributed as p without d, takes its place. As that sample hangs on (seed, position) alone, the output is the same
    token for token as without speculation.
    """
    width = min(target_nW.shape[1], drafts_nD.shape[1])
    same = target_nW[:, :width] == drafts_nD[:, :width]
    same &= np.arange(width) < num_drafts[:, None]
    matches: Ids = np.logical_and.accumulate(same, axis=1).sum(1, dtype=np.int32)
    return matches


class StopRules:
    """Ends of sequences: end-of-text and stop ids, max_tokens, and the longest sequence that the batch holds.

    min_tokens needs no rule here: until it's reached the sampler gives ends no probability. Stop strings are
    detokenize's.
    """

    def __init__(self, max_slots: int, max_tokens: int, eos_token_ids: tuple[int, ...]) -> None:
        self._context = max_tokens
        self._eos = np.array(eos_token_ids, np.int32)
        self._ends = np.full((max_slots, max(1, len(eos_token_ids))), -1, np.int32)  # padded with -1, which no token is
        self.limit = np.zeros(max_slots, np.int32)  # length of the sequence at which it ends

    def join(self, slot: int, sampling: Sampling, num_prompt: int) -> None:
        """Takes up a sequence."""
        eos = () if sampling.ignore_eos else tuple(self._eos.tolist())
        stops = [token for token in sampling.stop_token_ids if 0 <= token < 2**31]  # others never come
        ends = np.unique(np.array((*stops, *eos), np.int32))
        if ends.size > self._ends.shape[1]:
            missing = ends.size - self._ends.shape[1]
            self._ends = np.pad(self._ends, ((0, 0), (0, missing)), constant_values=-1)
        self._ends[slot] = -1
        self._ends[slot, : ends.size] = ends
        self.limit[slot] = min(num_prompt + sampling.max_tokens, self._context)

    def cut(self, slots: Ids, tokens_nW: Ids, counts: Ids, num_tokens: Ids) -> tuple[Ids, Ids]:
        """How many of the counts[i] new tokens stay, int32 [n], and RUNS, STOP or LENGTH for each sequence.

        num_tokens: length of each sequence before the new tokens. What follows an end in an accepted run is cut.
        """
        room = self.limit[slots] - num_tokens
        kept: Ids = np.minimum(counts, room)
        ends = self._ends[slots]
        is_end = tokens_nW == ends[:, :1]
        for column in range(1, ends.shape[1]):
            is_end |= tokens_nW == ends[:, column : column + 1]
        reason = np.where(kept < room, RUNS, LENGTH).astype(np.int32)
        if is_end.any():
            is_end &= np.arange(tokens_nW.shape[1]) < kept[:, None]
            stopped = is_end.any(1)
            kept = np.where(stopped, is_end.argmax(1) + 1, kept).astype(np.int32)
            reason[stopped] = STOP
        return kept, reason
