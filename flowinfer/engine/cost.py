"""Predicts how long a forward pass takes, from measured ones: seconds = a + b*tokens + c*query-key pairs. No torch.

a is what a step costs however small, b the weights' work on each token, c attention. The coefficients follow recursive
least squares on relative errors (noise on a shared machine grows with the time), in the form of Kalman (1960) with a
random walk: it forgets by letting uncertainty grow, and mostly along one line, "all got faster or slower". A plain
forgetting factor would unlearn attention in an hour of short prompts. Besides,

- outliers are clipped against the median of recent errors: one step ten times too slow moves little, a lasting change
  passes once it is the majority of the last steps;
- no coefficient is ever negative: a prompt never gets cheaper by growing.
"""

from __future__ import annotations

from collections import deque
from math import inf, log, sqrt
from statistics import median_low

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

# Only the proportions matter after the first measured step. SmolLM2-135M on one shared core, float32, measured: a step
# costs as much as 20 tokens, 1,300 pairs as much as a token.
PRIOR = (8e-3, 4e-4, 3e-7)
DOUBT = (1.0, 1.0, 3.0)  # standard deviation of each, relative: attention differs most between devices
MEDIAN = 7  # recent errors whose median tells drift from noise
GATE = 2.5  # standard deviations beyond which an error is an outlier; wide while the model knows little
NOISE = 0.1**2  # variance of the relative error of one step: a fit by hindsight misses by 4 % (median), 15 % (p90)
WALK_TOGETHER = 3e-4  # growth of variance a step, all coefficients as one: a new speed is followed in about six steps
WALK_APART = 3e-6  # and each for itself: 8 % in 2,000 steps
SHORTEST_S = 1e-7  # no step is shorter: a clock gone wrong
MOST_TOKENS = 1 << 30  # "no limit"


def query_key_pairs(context: int, num_tokens: int) -> int:
    """Pairs that causal attention scores when num_tokens tokens are run behind `context` cached ones."""
    return num_tokens * context + num_tokens * (num_tokens + 1) // 2


class StepTimeModel:
    """Predicted seconds of a step, learned while it runs. One model per engine; not thread-safe."""

    def __init__(self, prior: tuple[float, float, float] = PRIOR) -> None:
        self._prior = np.array(prior, np.float64)
        self._theta = self._prior.copy()
        self._start = self._theta  # as first guessed for this machine
        self._covariance: Matrix = np.diag((self._theta * DOUBT) ** 2)
        self._early: list[tuple[int, int, float]] = []
        self._errors: deque[float] = deque(maxlen=MEDIAN)
        self.num_observed = 0

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """a in seconds, b in seconds a token, c in seconds a pair; none negative."""
        a, b, c = (float(value) for value in self._theta)
        return a, b, c

    def predict(self, tokens: int, pairs: int) -> float:
        """Seconds of a step over `tokens` tokens whose attention scores `pairs` query-key pairs."""
        a, b, c = self._theta
        return float(a + b * tokens + c * pairs)

    def observe(self, tokens: int, pairs: int, seconds: float) -> None:
        """Learns from one measured step. Steps without tokens, or without a sane time, say nothing."""
        if tokens <= 0 or not SHORTEST_S <= seconds < inf:
            return
        self.num_observed += 1
        if self.num_observed <= MEDIAN:
            self._early.append((tokens, pairs, seconds))
            self._start_over()
        else:
            self._learn(tokens, pairs, seconds)

    def tokens_within(self, budget_s: float, context: int, *, beside: tuple[int, int] = (0, 0)) -> int:
        """The most tokens of a prompt that fit a step of budget_s seconds, its next token at position `context`.

        beside: tokens and pairs that the step runs already. 0 where not even one token fits; at most MOST_TOKENS.
        """
        _, b, c = self.coefficients
        room = budget_s - self.predict(*beside)
        linear = b + c * (context + 0.5)
        if room <= 0:
            return 0
        if room >= linear * MOST_TOKENS + c / 2 * MOST_TOKENS**2:
            return MOST_TOKENS
        # The root of c/2 n^2 + linear n = room, in the form that loses no digits when c is tiny.
        count = int(2 * room / (linear + sqrt(linear * linear + 2 * c * room)))
        return count - 1 if count and self._time(count, context, beside) > budget_s else count

    def _time(self, count: int, context: int, beside: tuple[int, int]) -> float:
        return self.predict(beside[0] + count, beside[1] + query_key_pairs(context, count))

    def _start_over(self) -> None:
        """Fits the first steps anew: the machine's speed from the median of them, since the first are often slow."""
        ratios = [seconds / float(self._prior @ (1, tokens, pairs)) for tokens, pairs, seconds in self._early]
        speed = median_low(ratios)
        self._start = self._theta = self._prior * speed
        self._covariance = np.diag((self._theta * DOUBT) ** 2)
        self._errors.clear()
        self._errors.extend([0.0] * (MEDIAN // 2))
        # The most usual first: by the time of an outlier the model knows enough to call it one.
        for _, step in sorted(zip(ratios, self._early, strict=True), key=lambda pair: abs(log(pair[0] / speed))):
            self._learn(*step)

    def _learn(self, tokens: int, pairs: int, seconds: float) -> None:
        step = np.array((1.0, tokens, pairs))
        predicted = float(self._theta @ step)
        self._errors.append(seconds / predicted - 1.0)
        gain, deviation = self._update(step / predicted)
        middle = median_low(self._errors)
        error = min(max(self._errors[-1], middle - GATE * deviation), middle + GATE * deviation)
        self._theta = _nearest_nonnegative(self._theta + gain * error, self._covariance)

    def _update(self, step: Vector) -> tuple[Vector, float]:
        """One Kalman step for the relative features `step`: the gain, and the deviation that its error may have."""
        walker = np.maximum(self._theta, 0.01 * self._start)  # a coefficient at 0 must be able to come back
        grown = self._covariance + WALK_TOGETHER * np.outer(walker, walker) + np.diag(WALK_APART * walker**2)
        seen = grown @ step
        variance = float(step @ seen) + NOISE
        narrowed = grown - np.outer(seen, seen) / variance
        self._covariance = (narrowed + narrowed.T) / 2
        gain: Vector = seen / variance
        return gain, sqrt(variance)


def _nearest_nonnegative(theta: Vector, covariance: Matrix) -> Vector:
    """Conditions the estimate on its negative entries being 0, the worst first: the others move as they correlate."""
    for _ in range(3):
        worst = int(np.argmin(theta / np.sqrt(np.diag(covariance))))
        if theta[worst] >= 0:
            break
        theta = theta - covariance[:, worst] * (theta[worst] / covariance[worst, worst])
        theta[worst] = 0.0
    return np.maximum(theta, 0.0)
