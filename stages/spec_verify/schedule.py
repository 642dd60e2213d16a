"""How many drafts of each sequence a step verifies, so that it gives most tokens a second. Pure: no torch, no clock.

Method: DSpark (arXiv 2607.05147). Of sequence r, draft j survives with a_rj, the product of the confidences up to j,
and never more surely than the drafts before it. Verifying l_r drafts of each gives tau = sum_r (1 + sum_{j<=l_r} a_rj)
tokens in a step of B = sum_r (1 + l_r) rows; the best choice has the greatest tau / seconds(B). Whatever B is, its rows
go to the drafts that survive most surely, over all sequences; what is left is B.

Choosing B after a look at the newest confidences is exact only while acceptance doesn't hang on it: a confidence knows
the tokens drafted before it, so with rejection sampling a token would have a say in whether it is verified, which
shifts the output (the paper's appendix A). spec-verify accepts a draft iff it equals the target's own sample, so there
any choice is exact. The two ways that are exact with rejection sampling too: to stop at the first row that doesn't pay
(`early_stop`), and to find B from the confidences of two steps ago (`two_steps_old`), which also lets a device go on
without waiting for the host.

Legend: n sequences, D drafts of each, B rows.
"""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flowinfer.stages.spec_verify.costs import F64, I64, StepCosts

Budget = Literal["newest", "two_steps_old", "early_stop"]
STEPS_OLD = 2
VAIN = 0.01  # share of the time that looks in vain may take, as far as LONGEST_WAIT lets them be that rare
CHEAP = 0.02  # share of a step that drafting may take to be done always: a look-up's
LONGEST_WAIT = 32  # steps from look to look while drafting doesn't pay
MEMORY = 0.8  # of the running mean of what drafting gains
HOPE = 0.75  # of the best tokens a second, from which on all drafts are worth trying until it's known what they take
DOUBT = 1.25  # gain below which it is less sure that drafts pay
# Steps with drafts from one without to the next, which shows what those take: 5 soon, then at most 1 % of the time.
UNKNOWN_EVERY, DOUBT_EVERY, SURE_EVERY = 8, 32, 128
CHANGED = 0.75  # a batch that shrank to less of what it was is another case


def survival(confidences: F64, limits: I64) -> F64:
    """Chance of each draft to hold with all before it, float64 [n, D]; 0 where none is or none may be verified."""
    products = np.multiply.accumulate(np.clip(confidences, 0.0, 1.0), axis=1)
    chances: F64 = np.where(np.arange(products.shape[1]) < limits[:, None], products, 0.0)
    return chances


def split(chances: F64, num_drafts: int) -> I64:
    """Lengths int64 [n] of the num_drafts drafts that survive most surely; of equals the earlier sequence's.

    A chance never rises along its sequence, so what is taken of each is a prefix. Drafts without a chance stay out.
    """
    order = np.argsort(-chances, axis=None, kind="stable")[: max(0, num_drafts)]
    taken = order[chances.ravel()[order] > 0]
    lengths: I64 = np.bincount(taken // max(1, chances.shape[1]), minlength=len(chances))
    return lengths


def gains(chances: F64, costs: StepCosts, context: float = 0.0) -> F64:
    """Tokens a second with the k best drafts, k = 0 .. those with a chance; float64 [k + 1]. Drafting's time counts."""
    best = np.sort(chances, axis=None)[::-1]
    best = best[: int(np.count_nonzero(best))]
    num = len(chances)
    tokens = num + np.concatenate([[0.0], np.cumsum(best)])
    seconds = costs.seconds(num + np.arange(len(tokens)), context)
    seconds[0] = costs.plain_seconds(num, context)
    per_second: F64 = tokens / (seconds + costs.draft_seconds(num))
    return per_second


def first_stop(per_second: F64) -> int:
    """Drafts before the first that doesn't raise tokens a second."""
    falls = per_second[1:] <= per_second[:-1]
    return int(falls.argmax()) if falls.any() else len(per_second) - 1


class ConfidenceLength:
    """`schedule: confidence`. budget says how B is found; how the drafts share it always hangs on the newest."""

    def __init__(self, costs: StepCosts, budget: Budget = "newest") -> None:
        self.costs, self.budget = costs, budget
        self._context = 0.0
        self._shares: deque[float] = deque(maxlen=STEPS_OLD)  # drafts a sequence, as each of the last steps wanted them
        self._pays = Pays()
        self._drafted = 0  # steps with drafts since one without

    def looks(self, acceptance: F64, step: int) -> bool:
        """Whether to draft: while it pays, and now and then while it doesn't."""
        return self._pays.looks(len(acceptance))

    def choose(self, confidences: F64, limits: I64) -> I64:
        """Drafts to verify, int64 [n], each 0 .. limits. confidences float64 [n, D], limits int64 [n]."""
        chances, num = survival(np.asarray(confidences, np.float64), limits), len(limits)
        per_second = gains(chances, self.costs, self._context)
        wanted = first_stop(per_second) if self.budget == "early_stop" else int(per_second.argmax())
        if self.budget == "two_steps_old":
            old = self._shares[0] if len(self._shares) == STEPS_OLD else 0.0
            self._shares.append(wanted / num)
            wanted = round(old * num)
        plain_s = self.costs.plain_seconds(num, self._context)
        gain = float(per_second[min(wanted, len(per_second) - 1)]) * plain_s / num
        self._pays.learn(num, gain, self.costs.draft_seconds(num) / plain_s)
        self._drafted = self._drafted + 1 if wanted else 0
        if self._drafted > self._patience:
            self._drafted = wanted = 0
        elif self._drafted % UNKNOWN_EVERY == UNKNOWN_EVERY - 1 and self._might_pay(per_second, num):
            wanted = len(per_second) - 1
        return split(chances, wanted)

    def timed(self, num_rows: int, seconds: float, context: float = 0.0, *, plain: bool = False) -> None:
        """A step over num_rows rows, each of about `context` tokens, took so long. plain: there was no draft in it."""
        self._context = context
        self.costs.observe(num_rows, seconds, context, plain=plain)

    def drafted(self, num_sequences: int, seconds: float) -> None:
        """Drafting for so many sequences took so long."""
        self.costs.observe_draft(num_sequences, seconds)

    def _might_pay(self, per_second: F64, num_sequences: int) -> bool:
        """Whether all drafts together are near enough to the best to be tried, and nobody knows what they take.

        That is a look at the newest confidences, which causal budgets may not take.
        """
        if self.budget != "newest":
            return False
        known = self.costs.knows(num_sequences + len(per_second) - 1)
        return not known and bool(per_second[-1] >= HOPE * per_second.max())

    @property
    def _patience(self) -> int:
        """Steps with drafts after which one without shows what it would take."""
        if not self.costs.knows_plain:
            return UNKNOWN_EVERY
        return DOUBT_EVERY if self._pays.gain < DOUBT else SURE_EVERY


class Pays:
    """Whether drafting as such is worth its time, from what the last drafts promised against plain decoding.

    While it isn't, looks are so rare that they take VAIN of the time, but no rarer than every LONGEST_WAIT steps:
    drafts that are CHEAP are always looked at. A batch that shrank is looked at anew: its rows may be cheap
    now.
    """

    def __init__(self) -> None:
        self.gain = 1.0  # running mean of tokens a second with drafts over without
        self._left, self._num = 0, 0  # steps until the next look; sequences at the last one

    def looks(self, num_sequences: int) -> bool:
        """Whether to draft in this step of so many sequences. Call once a step."""
        if self._left == 0 or num_sequences < CHANGED * self._num:
            self._left = 0
            return True
        self._left -= 1
        return False

    def learn(self, num_sequences: int, gain: float, share: float) -> None:
        """Drafts promised this gain: tokens a second over those of plain decoding; they took this share of its step."""
        self._num = num_sequences
        self.gain += (1 - MEMORY) * (gain - self.gain)
        in_vain = max(gain, self.gain) <= 1
        self._left = min(ceil(share / VAIN), LONGEST_WAIT) - 1 if in_vain and share > CHEAP else 0


class PositionAcceptance:
    """Chance of each draft to hold if those before it do, learned by sequence and position, for drafters without one.

    Every guess is a trial of its tokens up to the first that differs from what came, verified or not: as far as tokens
    came, they tell for free. Hits and trials of a sequence fade by FADE a trial, beside PRIOR trials of what the last
    sequences did on the average at that position.
    """

    FADE = 0.9  # remembers about ten guesses
    PRIOR = 2.0
    COMMON_FADE = 0.995

    def __init__(self, max_slots: int, num_drafts: int) -> None:
        self._hits = np.zeros((max_slots, num_drafts))
        self._trials = np.zeros((max_slots, num_drafts))
        self._common = np.tile([[1.0], [2.0]], num_drafts)  # hits and trials of all

    def join(self, slot: int, hits: float = 0.0, trials: float = 0.0) -> None:
        """A new sequence; hits and trials of its first drafts, where another worker learned them."""
        self._hits[slot], self._trials[slot] = hits, trials

    def record(self, slot: int) -> tuple[float, float]:
        """Hits and trials of the first drafts of this slot's sequence, for who goes on with it."""
        return float(self._hits[slot, 0]), float(self._trials[slot, 0])

    def learn(self, slots: NDArray[np.int32], hits: NDArray[np.int32], trials: NDArray[np.int32]) -> None:
        """The first hits[i] drafts of slots[i] came true, and trials[i] of them met a token to be judged by."""
        columns = np.arange(self._hits.shape[1])
        tried = columns < trials[:, None]
        held = columns < np.minimum(hits, trials)[:, None]
        faded = np.where(tried, self.FADE, 1.0)
        self._hits[slots] = self._hits[slots] * faded + held
        self._trials[slots] = self._trials[slots] * faded + tried
        self._common = self._common * np.where(tried.any(0), self.COMMON_FADE, 1.0) + [held.sum(0), tried.sum(0)]

    def of(self, slots: NDArray[np.int32]) -> F64:
        """Chances, float64 [n, D]."""
        prior = self._common[0] / self._common[1]
        chances: F64 = (self._hits[slots] + self.PRIOR * prior) / (self._trials[slots] + self.PRIOR)
        return chances
