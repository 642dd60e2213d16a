"""`draft: suffix`: what most often followed the longest known end of a text, here or in the tenant's recent outputs.

Method: SuffixDecoding (Oliaro et al. 2024): match the end of the history against the sequence itself and against a
store of recent outputs, go on by what followed most often, draft longer behind longer matches, and take the share of
times that it followed as the chance that it will. There a suffix tree gives the match; here it is a graph of contexts
in
one hash table: a context is the last k tokens (k of LEVELS), its cell holds the token that follows it most often of
late, how often, and the context that this token leads to. So the whole batch is matched by one look-up for each k, and
a draft is a walk along cells, a few numpy calls a token: about 0.15 ms a step at 32 sequences.

A context is looked up by 64 bits of hash over its tokens and its space: a sequence's own (prompt and output), or that
of a tenant's salt (outputs only), keyed by a secret of the process. So no tenant's text can be drafted for another.
The table is bounded: a new context takes the cell of an older one with the same address, whosoever that was.

Legend: n sequences, L levels, S = 2 L places to look: own levels, then the tenant's; D drafts. A cell is four uint64:
key of its context, key of the following one, int32 token beside float32 hits, float32 total beside nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flowinfer.message import Ids
from flowinfer.stages.spec_verify.drafts import Choose, Guesses, Ran
from flowinfer.stages.spec_verify.policy import F64, I64, Flags

U64 = NDArray[np.uint64]
Cells = NDArray[np.uint64]
KEY, NEXT, TOKEN, HITS, TOTAL = 0, 1, 4, 5, 6  # in a cell, as uint64, int32 and float32
LEVELS = (16, 8, 4, 2)  # tokens of a context; of equal chances the longest decides
FIRST_CHANCES = (0.9, 0.8, 0.6, 0.4)  # of drafts behind them, until their own record tells
LENGTH_BY_MATCH = 2  # drafts for each token that matched
CELLS_LOG2 = 20  # 32 MiB: contexts of about 130,000 tokens
SHORT, CHUNK = 16, 1024  # positions of a sequence that are entered at once: in a step, and of a prompt
FADE = 0.9  # of a context's counts at each time it comes: about the last ten count
TIMES = 8  # that a context of a prompt's chunk is counted, the latest ones
RECORD_FADE = 0.99  # of a place's record at each of its first drafts
PRIOR = 2.0  # times that a place's own record counts beside a context's
_ODD, _MIX, _HALF = np.uint64(0xD1B54A32D192ED03), np.uint64(0x9E3779B97F4A7C15), np.uint64(29)


class SuffixDraft:
    """Drafts of the batch whose history is `tokens`; see drafts.Drafter."""

    needs_features: tuple[int, ...] = ()
    needs_host = True
    calibrated = False

    def __init__(
        self,
        tokens: Ids,
        num_prompt: Ids,
        salt_of: Callable[[int], str],
        *,
        max_drafts: int,
        cells_log2: int = CELLS_LOG2,
    ) -> None:
        """tokens int32 [max_slots, max_tokens] and num_prompt int32 [max_slots]: the batch's, read in place.

        salt_of: the tenant of a slot's sequence; equal ones share outputs.
        """
        self.block = max_drafts
        self._tokens, self._num_prompt, self._salt_of = tokens, num_prompt, salt_of
        self._cells = np.zeros((1 << cells_log2, 4), np.uint64)
        self._shift = np.uint64(64 - cells_log2)
        self._secret = os.urandom(16)
        self._seeds = np.zeros((len(tokens), 2), np.uint64)  # of each slot's own space and its tenant's
        self._num_joined = 0
        self._entered = np.zeros(len(tokens), np.int64)  # tokens of each slot that are in the table
        self._matched = np.array(LEVELS * 2)  # tokens of a context, by place
        self._offsets = np.arange(max(LEVELS))
        powers = np.cumprod(np.full((max(LEVELS), 1), _ODD), axis=0)
        self._powers = (powers * (self._offsets[:, None] < LEVELS)).view(np.int64)  # of a polynomial hash, by level
        self._columns = np.arange(max_drafts)[:, None]
        chances = np.array(FIRST_CHANCES * 2)
        self._record = np.stack([10 * chances, np.full(len(chances), 10.0)])  # hits and trials of first drafts by place
        self._pending = np.full((len(tokens), 3), -1, np.int64)  # of each slot's first draft: position, token, place
        self._lengths = self._matched * LENGTH_BY_MATCH

    def join(self, slot: int) -> None:
        """The slot has a new sequence; its prompt is entered by the next `guess`."""
        self._num_joined += 1
        salts = (b"own %d" % self._num_joined, b"of " + self._salt_of(slot).encode())
        digests = [hashlib.blake2b(salt, digest_size=8, key=self._secret).digest() for salt in salts]
        self._seeds[slot] = [int.from_bytes(digest, "little") for digest in digests]
        self._entered[slot] = 0
        self._pending[slot] = -1

    def leave(self, slot: int) -> None:
        """Its own contexts are never met again; those of its tenant stay."""

    def observe(self, ran: Ran) -> None:
        """The history says it all."""

    def guess(self, slots: Ids, num_tokens: Ids, choose: Choose | None = None) -> Guesses:
        """What follows the ends of these histories; a draft whose confidence is 0 has nothing behind it."""
        self._learn(slots, num_tokens)
        last = num_tokens.astype(np.int64) - 1
        keys = self._enter(slots, last)
        cells = self._cells.take(keys >> self._shift, axis=0)
        known = cells[..., KEY] == keys
        known &= last[:, None] + 1 >= self._matched
        chances = np.where(known, self._chances(cells, self._record), -1.0)
        place, rows = chances.argmax(1), np.arange(slots.size)
        found: Flags = chances[rows, place] >= 0
        tokens, confidences = self._walk(cells[rows, place], found, place)
        pending = self._pending
        pending[slots, 0], pending[slots, 1], pending[slots, 2] = np.where(found, num_tokens, -1), tokens[:, 0], place
        return Guesses(found, tokens, confidences)

    def _walk(self, cells: Cells, found: Flags, place: I64) -> tuple[Ids, NDArray[np.float32]]:
        """Tokens and confidences [n, D] along the contexts that follow each other from these."""
        path = np.empty((self.block, *cells.shape), np.uint64)
        path[0] = cells
        for j in range(1, self.block):
            np.take(self._cells, path[j - 1, :, NEXT] >> self._shift, axis=0, out=path[j], mode="clip")
        there = np.empty(path.shape[:2], np.bool_)
        there[0] = found
        np.equal(path[:-1, :, NEXT], path[1:, :, KEY], out=there[1:])
        there &= self._columns < self._lengths[place]
        there = np.logical_and.accumulate(there, axis=0)
        tokens = path.view(np.int32)[..., TOKEN] * there
        chances = self._chances(path, self._record[:, place]) * there
        return tokens.T, chances.T

    def _chances(self, cells: Cells, record: F64) -> NDArray[np.float32]:
        """Share of a context's times that its token followed, beside PRIOR times of the record of its place."""
        prior = (PRIOR * record[0] / record[1]).astype(np.float32)
        counts = cells.view(np.float32)
        chances: NDArray[np.float32] = (counts[..., HITS] + prior) / (counts[..., TOTAL] + np.float32(PRIOR))
        return chances

    def _learn(self, slots: Ids, num_tokens: Ids) -> None:
        """What became of the last first drafts, by place."""
        position, token, place = self._pending[slots].T
        judged = np.flatnonzero((position >= 0) & (position < num_tokens))
        if judged.size:
            held = self._tokens[slots[judged], position[judged]] == token[judged]
            counts = np.bincount(2 * place[judged] + held, minlength=2 * len(self._matched)).reshape(-1, 2)
            trials = counts.sum(1)
            self._record = self._record * RECORD_FADE**trials + (counts[:, 1], trials)
            self._pending[slots, 0] = -1

    # ------------------------------------------------------------------------------------------------------- the table

    def _enter(self, slots: Ids, last: I64) -> U64:
        """Enters what the histories have grown by, and returns the contexts that they end in, uint64 [n, S]."""
        for i in np.flatnonzero(last - self._entered[slots] > SHORT).tolist():
            self._enter_long(slots[i : i + 1], int(last[i]))
        first = np.maximum(self._entered[slots] - 1, 0)  # the context before the first new token
        counts = last - first + 1
        after = np.cumsum(counts)
        owners = np.repeat(slots, counts)
        ends = np.arange(owners.size) - np.repeat(after - counts - first, counts)
        keys = self._keys(owners, ends)
        inner = np.ones(owners.size, np.bool_)
        inner[after - 1] = False  # what a history ends in has no follower yet
        before = np.flatnonzero(inner)
        if before.size:
            known = self._counted(owners[before], ends[before], keys[before])
            self._count(known, self._tokens[owners[before], ends[before] + 1][:, None], keys[before + 1])
        self._entered[slots] = last + 1
        ending: U64 = keys[after - 1]
        return ending

    def _enter_long(self, slot: Ids, last: int) -> None:
        """Of a history that is new or far behind, all up to `last`, a chunk at a time."""
        first = max(int(self._entered[slot[0]]) - 1, 0)
        for start in range(first, last, CHUNK):
            ends = np.arange(start, min(start + CHUNK, last) + 1)
            owners = np.repeat(slot, ends.size)
            keys = self._keys(owners, ends)
            known = self._counted(owners[:-1], ends[:-1], keys[:-1])
            tokens = np.broadcast_to(self._tokens[slot, ends[1:]][:, None], known.shape)
            self._count_all(known.ravel(), tokens.ravel(), keys[1:].ravel())
        self._entered[slot] = last + 1

    def _keys(self, slots: Ids, ends: I64) -> U64:
        """Names of the contexts that end at these positions, uint64 [m, S]."""
        windows = self._tokens[slots[:, None], np.maximum(ends[:, None] - self._offsets, 0)]
        sums = ((windows.astype(np.int64) + 1) @ self._powers).view(np.uint64)
        mixed = (sums[:, None, :] ^ self._seeds[slots][:, :, None]) * _MIX
        mixed ^= mixed >> _HALF
        mixed *= _ODD
        keys: U64 = mixed.reshape(len(ends), -1)
        return keys

    def _counted(self, slots: Ids, ends: I64, keys: U64) -> U64:
        """The contexts [m, S], 0 where none counts: longer than the text, or before a prompt's token for a tenant."""
        end = ends[:, None] + 1
        counted = end >= self._matched
        counted[:, len(LEVELS) :] &= end >= self._num_prompt[slots][:, None]
        known: U64 = np.where(counted, keys, np.uint64(0))
        return known

    def _count_all(self, keys: U64, tokens: Ids, following: U64) -> None:
        """As _count, where contexts may come more than once: counted in their order, the last TIMES of each."""
        order = np.argsort(keys, kind="stable")
        order = order[np.searchsorted(keys[order], 1) :]
        ordered = keys[order]
        later = np.searchsorted(ordered, ordered, side="right") - np.arange(order.size)  # times from here on, this too
        for times in range(TIMES, 0, -1):
            now = order[later == times]
            if now.size:
                self._count(keys[now], tokens[now], following[now])

    def _count(self, keys: U64, token: Ids, following: U64) -> None:
        """Contexts were followed by these tokens and these contexts; of equal ones the last counts.

        The cell of key 0 takes what doesn't count: 0 is never looked up.
        """
        at = keys >> self._shift
        cells = self._cells.take(at, axis=0)
        tokens, counts = cells.view(np.int32)[..., TOKEN], cells.view(np.float32)
        old = cells[..., KEY] == keys
        same = old & (tokens == token)
        faded = old * np.float32(FADE)
        total = counts[..., TOTAL] * faded + np.float32(1)
        hits = counts[..., HITS] * faded + same
        takes = ~same & (hits + hits <= total)
        others = np.maximum((total - hits) * np.float32(0.5), np.float32(1))  # half of the rest may have been this one
        cells[..., KEY], counts[..., TOTAL], counts[..., HITS] = keys, total, np.where(takes, others, hits)
        writes = same | takes
        np.copyto(tokens, token, where=writes)
        np.copyto(cells[..., NEXT], following, where=writes)
        self._cells[at] = cells
