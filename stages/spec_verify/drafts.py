"""Where drafts come from and how many of them are verified: the interfaces, and the ones that need no model.

A `Drafter` guesses the next tokens of the sequences that run; a `DraftSchedule` says how many of them a step verifies.
Both work on the whole batch by arrays, never on one request at a time, and both are free to be wrong: a draft holds iff
it equals the target's own sample at its position, whose noise hangs on (seed, position, token) alone. So neither can
change a token of the output, only its speed. spec-verify calls, in this order:

- `join(slot)` when a sequence first runs in a slot, `leave(slot)` when it leaves. What was known of the slot is void;
  one that comes back after a preemption, or from another worker, joins like a new one, with its history.
- after each step, `observe(run)`: tokens that the target ran and that belong to the history now. Their features are
  there if `needs_features` names layers.
- `guess(slots, num_tokens, choose)` for all sequences that go on, where `DraftSchedule.looks` allows it: `block`
  tokens each, to stand at positions num_tokens, num_tokens + 1, ... (a sequence's history is its first num_tokens
  tokens, which `batch.tokens`, handed over when the drafter is made, holds; the last one hasn't been run yet).
- `DraftSchedule.choose(confidences, limits)`: of those, how many are verified.

A drafter that draws from a distribution calls `choose(k, logits)` for its k-th draft, k = 0, 1, ... in order, with
float32 logits [n, V] of all n sequences: each token is chosen by its request's own settings (temperature, filters,
penalties with the drafts before it counted, grammar) and with the noise that the target will have at that position, so
that equal distributions give equal tokens. It returns valid ids, int64 [n] on their device; what a grammar refuses
is not proposed.

Legend: n sequences, D drafts (`block`), R rows that a step ran and that held; V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flowinfer.message import Ids
from flowinfer.stages.spec_verify.policy import F64, I64, Flags

if TYPE_CHECKING:
    from torch import Tensor

F32 = NDArray[np.float32]
Choose = Callable[[int, "Tensor"], "Tensor"]
LOOK_EVERY = 4  # steps from look-up to look-up while no sequence of the batch is worth a draft


class Ran(NamedTuple):
    """R rows of a step whose tokens are history now: the last token of each sequence and its drafts that held.

    slots, positions, tokens int32 [R]: row r ran tokens[r] at positions[r] of the sequence in slots[r]; rows of a
    sequence are consecutive and rising.  features: [R, layers * H] in the model's dtype on its device, the residual
    stream after each layer of `needs_features`, in that order; None where no layer was asked for. Row r's features are
    those of the token at positions[r]: the history's last one (position num_tokens - 1) has none until the next step.
    """

    slots: Ids
    positions: Ids
    tokens: Ids
    features: Tensor | None


class Guesses(NamedTuple):
    """What a drafter gives. found bool [n]: which sequences have drafts.  tokens int32 [n, D].

    confidences float32 [n, D]: probability that a draft holds if all before it do; None: unknown.
    """

    found: Flags
    tokens: Ids
    confidences: F32 | None = None


class Drafter(Protocol):
    """Guesses next tokens. State by slot starts empty at `join`.

    block: tokens that `guess` gives, D.  needs_features: 0-based layers of the target whose output `observe` gets.
    needs_host: drafts are made by the host from the tokens, so no decode step can start before the host saw the last.
    calibrated: its confidences follow what became of its drafts; else spec-verify sees to that.
    """

    block: int
    needs_features: tuple[int, ...]
    needs_host: bool
    calibrated: bool

    def join(self, slot: int) -> None:
        """The slot has a new sequence, or one that is back."""

    def leave(self, slot: int) -> None:
        """Its sequence is gone; harmless where there is none. Its row of batch.tokens is still as it was."""

    def observe(self, ran: Ran) -> None:
        """What a step ran; sequences that ended with it are left out."""

    def guess(self, slots: Ids, num_tokens: Ids, choose: Choose) -> Guesses:
        """The next `block` tokens of each sequence. slots, num_tokens int32 [n]."""


class DraftSchedule(Protocol):
    """How many drafts are worth verifying. Pure but for what `timed` and earlier calls taught it; knows no slots."""

    def looks(self, acceptance: F64, step: int) -> bool:
        """Whether to guess at all in this step. acceptance [n]: share of each sequence's guesses that held lately."""

    def choose(self, confidences: F64, limits: I64) -> I64:
        """Drafts to verify of each of n sequences that run together, int64 [n], each 0 .. limits.

        confidences [n, D]: probability that draft j holds if all before it do (the drafter's own; else the sequence's
        acceptance, for each j).  limits int64 [n]: drafts that there are and that may be verified, 0 .. D.
        """

    def timed(self, num_rows: int, seconds: float, context: float, *, plain: bool) -> None:
        """A step over num_rows rows of about `context` tokens each took so long. plain: there was no draft in it."""

    def drafted(self, num_sequences: int, seconds: float) -> None:
        """Drafting for so many sequences took so long."""


class Acceptances(Protocol):
    """How well the guesses of each sequence did lately, for drafters that have no confidences."""

    def join(self, slot: int, hits: float = 0.0, trials: float = 0.0) -> None:
        """A new sequence, of which nothing is known but what another worker learned of it."""

    def record(self, slot: int) -> tuple[float, float]:
        """Hits and trials of this slot's sequence, for who goes on with it."""

    def learn(self, slots: Ids, hits: Ids, trials: Ids) -> None:
        """hits[i] of the first trials[i] guessed tokens of slots[i] came true; slots without a guess stay out."""

    def of(self, slots: Ids) -> F64:
        """Chance of each draft to hold if those before it do, float64 [n, D]."""


class Acceptance:
    """Acceptances with one chance for all places of a draft: that the next guessed token of the sequence holds.

    Every step with a guess is a trial of its first token, verified or not: the token that came tells for free, so
    a sequence whose text turns repetitive starts to draft without a probe. Hits and trials fade by FADE a trial, beside
    a fixed prior of PRIOR_HITS in PRIOR_TRIALS.
    """

    FADE = 0.9  # remembers about ten steps
    PRIOR_HITS, PRIOR_TRIALS = 1.0, 2.0

    def __init__(self, max_slots: int, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._hits = np.zeros(max_slots)
        self._trials = np.zeros(max_slots)

    def join(self, slot: int, hits: float = 0.0, trials: float = 0.0) -> None:
        """See Acceptances."""
        self._hits[slot], self._trials[slot] = hits, trials

    def record(self, slot: int) -> tuple[float, float]:
        """See Acceptances."""
        return float(self._hits[slot]), float(self._trials[slot])

    def learn(self, slots: Ids, hits: Ids, trials: Ids) -> None:
        """See Acceptances."""
        self._hits[slots] = self._hits[slots] * self.FADE + hits
        self._trials[slots] = self._trials[slots] * self.FADE + trials

    def of(self, slots: Ids) -> F64:
        """See Acceptances."""
        chance: F64 = (self._hits[slots] + self.PRIOR_HITS) / (self._trials[slots] + self.PRIOR_TRIALS)
        return np.repeat(chance[:, None], self._num_drafts, axis=1)


class FixedLength:
    """`schedule: fixed`: every draft that there is."""

    def looks(self, acceptance: F64, step: int) -> bool:
        """Always."""
        return True

    def choose(self, confidences: F64, limits: I64) -> I64:
        """The limits."""
        return limits

    def timed(self, num_rows: int, seconds: float, context: float, *, plain: bool) -> None:
        """Is of no interest."""

    def drafted(self, num_sequences: int, seconds: float) -> None:
        """Is of no interest."""


class LearnedLength:
    """`schedule: learned`: drafts that hold with more than what their row costs.

    A step takes 1 + row_cost * rows (in units of its fixed time). A further row pays if it raises tokens per time, that
    is, if its draft holds with more than row_cost * n / (1 + row_cost * n) at n sequences: nearly free for one stream,
    nearly never worth it in a full batch on a CPU, where each row costs as much as a token. While no sequence of the
    batch is worth a draft, guesses are made on every fourth step only.
    """

    def __init__(self, row_cost: float) -> None:
        self._row_cost = row_cost

    def looks(self, acceptance: F64, step: int) -> bool:
        """If a first draft pays for anybody, and on every fourth step."""
        return bool((acceptance >= self._break_even(acceptance.size)).any()) or not step % LOOK_EVERY

    def choose(self, confidences: F64, limits: I64) -> I64:
        """As many as hold, all together, with more than the break-even."""
        holds = np.multiply.accumulate(confidences, axis=1) >= self._break_even(len(limits))
        length: I64 = np.minimum(np.logical_and.accumulate(holds, axis=1).sum(1), limits)
        return length

    def timed(self, num_rows: int, seconds: float, context: float, *, plain: bool) -> None:
        """Is of no interest: row_cost says it."""

    def drafted(self, num_sequences: int, seconds: float) -> None:
        """Is of no interest: look-ups cost next to nothing."""

    def _break_even(self, num_sequences: int) -> float:
        rows = self._row_cost * num_sequences
        return rows / (1 + rows)


class NgramDraft:
    """Prompt look-up: the longest n-gram that ends the history, at its latest earlier place, predicts what follows.

    Method: Saxena, "Prompt lookup decoding" (2023). The index is one table of int32 a slot and n-gram length, addressed
    by a hash of the n-gram, holding the position after its latest occurrence; a newer n-gram takes the cell of an older
    one with the same hash. Look-ups compare the tokens themselves, so a collision costs a draft, never a wrong match.
    All slots are indexed and looked up by a few numpy calls, about 0.1 ms a step for 64 slots at any history length.
    """

    MAX_CELLS_LOG2 = 14  # 64 KiB a slot and length; beyond 16k tokens the oldest n-grams are forgotten first

    needs_features: tuple[int, ...] = ()
    needs_host = True
    calibrated = True  # it has none

    def __init__(self, tokens: Ids, *, ngram_min: int, ngram_max: int, max_drafts: int) -> None:
        """tokens: the batch's history, int32 [max_slots, max_tokens], read in place."""
        self.block, self.ngram = max_drafts, (ngram_min, ngram_max)
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

    def leave(self, slot: int) -> None:
        """Its index is emptied by the next one that joins."""

    def observe(self, ran: Ran) -> None:
        """The history says it all."""

    def guess(self, slots: Ids, num_tokens: Ids, choose: Choose | None = None) -> Guesses:
        """What followed the last n-gram of each history before.

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
        return Guesses(hit, self._tokens[slots[:, None], source[:, None] + self._columns % span[:, None]])

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
