"""Which drafts hold, when a sequence ends, and what to draft next. Pure: arrays over the batch in, arrays out.

Legend: n sequences of a step, W rows of the longest, D drafts at most; `slots` int32 [n] name their rows in the batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowinfer.message import Ids, Progress, Sampling

RUNS, STOP, LENGTH = 0, 1, 2
LOOK_EVERY = 4  # steps from look-up to look-up while no sequence of the batch is worth a draft
Flags = NDArray[np.bool_]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


def pad_rows(tokens: I64, starts: Ids) -> Ids:
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


class DraftLength:
    """How many drafts are worth verifying, from how well the guesses of each sequence did lately.

    Every step with a guess is a trial of its first token, verified or not: the token that came tells for free, so
    a sequence whose text turns repetitive starts to draft without a probe. Hits and trials fade by FADE a trial, beside
    a fixed prior of PRIOR_HITS in PRIOR_TRIALS. With acceptance a, draft j holds with a**j. While no sequence of the
    batch is worth a draft, guesses are made on every fourth step only.

    A step takes 1 + row_cost * rows (in units of its fixed time). A further row pays if it raises tokens per time, that
    is, if its draft holds with more than row_cost * n / (1 + row_cost * n) at n sequences: nearly free for one stream,
    nearly never worth it in a full batch on a CPU, where each row costs as much as a token.
    """

    FADE = 0.9  # remembers about ten steps
    PRIOR_HITS, PRIOR_TRIALS = 1.0, 2.0

    def __init__(self, max_slots: int, row_cost: float) -> None:
        self._row_cost = row_cost
        self._hits = np.zeros(max_slots)
        self._trials = np.zeros(max_slots)

    def join(self, slot: int, progress: Progress | None = None) -> None:
        """A new sequence, of which nothing is known but what another worker learned of it."""
        self._hits[slot] = 0 if progress is None else progress.hits
        self._trials[slot] = 0 if progress is None else progress.trials

    def record(self, slot: int) -> tuple[float, float]:
        """Hits and trials of this slot's sequence, for who goes on with it."""
        return float(self._hits[slot]), float(self._trials[slot])

    def learn(self, slots: Ids, hits: Ids, trials: Ids) -> None:
        """hits[i] of the first trials[i] guessed tokens of slots[i] came true; slots without a guess stay out."""
        self._hits[slots] = self._hits[slots] * self.FADE + hits
        self._trials[slots] = self._trials[slots] * self.FADE + trials

    def choose(self, slots: Ids) -> I64:
        """Drafts worth verifying for each of the n sequences that run together, int64 [n]; no upper limit but 64."""
        acceptance = (self._hits[slots] + self.PRIOR_HITS) / (self._trials[slots] + self.PRIOR_TRIALS)
        rows = self._row_cost * slots.size
        break_even = rows / (1 + rows)
        if break_even <= 0:
            return np.full(slots.size, 64)
        length: I64 = np.minimum(np.log(break_even) / np.log(acceptance), 64).astype(np.int64)
        return length


class NgramDraft:
    """Prompt look-up: the longest n-gram that ends the history, at its latest earlier place, predicts what follows.

    Method: Saxena, "Prompt lookup decoding" (2023). The index is one table of int32 a slot and n-gram length, addressed
    by a hash of the n-gram, holding the position after its latest occurrence; a newer n-gram takes the cell of an older
    one with the same hash. Look-ups compare the tokens themselves, so a collision costs a draft, never a wrong match.
    All slots are indexed and looked up by a few numpy calls, about 0.1 ms a step for 64 slots at any history length.
    """

    MAX_CELLS_LOG2 = 14  # 64 KiB a slot and length; beyond 16k tokens the oldest n-grams are forgotten first

    def __init__(self, tokens: Ids, *, ngram_min: int, ngram_max: int, max_drafts: int) -> None:
        """tokens: the batch's history, int32 [max_slots, max_tokens], read in place."""
        max_slots, max_tokens = tokens.shape
        self._tokens = tokens
        self._bits = min(self.MAX_CELLS_LOG2, (2 * max_tokens - 1).bit_length())
        self._lengths = np.arange(ngram_min, ngram_max + 1)
        self._cells = np.zeros(max_slots * self._lengths.size << self._bits, np.int32)
        self._indexed = np.zeros(max_slots, np.int64)  # n-grams that end before this position are in the table
        self._offsets = np.arange(ngram_max)
        self._first, self._levels = ngram_min - 1, np.arange(self._lengths.size)
        self._multipliers = np.cumprod(np.full(ngram_max, 0xD1B54A32D192ED03, np.uint64))  # of a polynomial hash
        self._beyond = self._offsets >= self._lengths[:, None]  # offsets that an n-gram of each length doesn't reach
        self._columns = np.arange(max_drafts)

    def join(self, slot: int) -> None:
        """The slot has a new sequence; its prompt is indexed by the next `guess`."""
        size = self._lengths.size << self._bits
        self._cells[slot * size : (slot + 1) * size] = 0
        self._indexed[slot] = 0

    def guess(self, slots: Ids, num_tokens: Ids) -> tuple[Flags, Ids]:
        """Whether the history of each slot (its first num_tokens tokens) gives a guess, bool [n], and it, int32 [n, D].

        Where a match lies so near the end that fewer than D tokens follow it, they repeat, as they'd do in a loop.
        """
        last = num_tokens.astype(np.int64) - 1
        suffix, cells = self._index(slots, last)
        place = self._cells[cells]
        there = self._tokens[slots[:, None, None], np.maximum(place[:, :, None] - 1 - self._offsets, 0)]
        found = ((there == suffix[:, None, :]) | self._beyond).all(2)
        found &= (place > 0) & (num_tokens[:, None] > self._lengths)
        longest = self._lengths.size - 1 - found[:, ::-1].argmax(1)
        hit: Flags = found.any(1)
        source = np.where(hit, place[np.arange(slots.size), longest], last)
        span = last + 1 - source
        return hit, self._tokens[slots[:, None], source[:, None] + self._columns % span[:, None]]

    def _index(self, slots: Ids, last: I64) -> tuple[Ids, I64]:
        """Enters the n-grams that end before the last token; the one that ends there would only find itself.

        Returns that one: its tokens, latest first, int32 [n, ngram_max], and the cell of each of its lengths.
        """
        first = self._indexed[slots]
        counts = last - first + 1
        after = np.cumsum(counts)
        owners = np.repeat(slots, counts)
        ends = np.arange(owners.size) - np.repeat(after - counts - first, counts)
        windows = self._tokens[owners[:, None], np.maximum(ends[:, None] - self._offsets, 0)]
        cells = self._addresses(owners, windows)
        earlier = ends[:, None] >= self._lengths - 1
        earlier[after - 1] = False
        following = np.broadcast_to((ends + 1).astype(np.int32)[:, None], cells.shape)
        self._cells[cells[earlier]] = following[earlier]  # of equal addresses the last, so the latest, stays
        self._indexed[slots] = last
        return windows[after - 1], cells[after - 1]

    def _addresses(self, slots: Ids, windows: Ids) -> I64:
        """The cell of each length's n-gram, int64 [m, lengths]."""
        sums = np.cumsum((windows + 1).astype(np.uint64) * self._multipliers, axis=1)
        hashes = sums[:, self._first :] * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(64 - self._bits)
        tables = slots[:, None] * np.int64(self._lengths.size) + self._levels
        addresses: I64 = (tables << self._bits) + hashes.view(np.int64)
        return addresses
