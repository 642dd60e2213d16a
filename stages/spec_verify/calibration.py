"""Makes confidences of what a drafter says of its drafts, fitted to what became of the last ones. Pure.

Method: Platt scaling (1999): temperature scaling, as DSpark (arXiv 2607.05147) does it for its head, and an offset. A
drafter's own probability of its draft needs that: with the target's noise, a draft that is one of many likely tokens
still holds if the target's distribution is the same, far more often than its probability says.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
WINDOW = 1024  # drafts that a fit looks at
FIRST, GROWTH = 64, 1.5  # drafts before the first fit; from fit to fit that many times more, at most half a WINDOW more
ROUNDS = 10  # of a fit, from where the last one ended
TRUST = np.array([32.0, 2.0])  # in temperature 1 and offset 0: a shift of all is the likelier error
_EDGE = 1e-4  # probabilities nearer to 0 or 1 say no more than this


class Calibration:
    """sigmoid(logit(p) / temperature + offset), by the last WINDOW drafts; p itself until there are FIRST."""

    def __init__(self) -> None:
        self._weights: F64 = np.array([1.0, 0.0])
        self._features = np.ones((WINDOW, 2))
        self._held = np.zeros(WINDOW)
        self._num, self._due = 0, FIRST

    @property
    def temperature(self) -> float:
        """Above 1: the drafter is surer than it should be."""
        return 1 / max(float(self._weights[0]), 1e-3)

    def apply(self, probabilities: F32) -> F32:
        """Confidences for what the drafter said, float32 of the same shape."""
        scores = _logit(probabilities) * self._weights[0] + self._weights[1]
        return _sigmoid(scores).astype(np.float32)

    def learn(self, probabilities: F32, held: NDArray[np.bool_]) -> None:
        """Drafts of these probabilities [m] were put to the test, and these held."""
        probabilities, held = probabilities[-WINDOW:], held[-WINDOW:]
        at = (self._num + np.arange(len(held))) % WINDOW
        self._features[at, 0], self._held[at] = _logit(probabilities), held
        self._num += len(held)
        if self._num >= self._due:
            self._due = min(int(self._num * GROWTH), self._num + WINDOW // 2)
            self._fit()

    def _fit(self) -> None:
        """Least log-loss, with TRUST, by steps that never overshoot (curvature bound of Boehning, 1992)."""
        seen = min(self._num, WINDOW)
        x, held, weights = self._features[:seen], self._held[:seen], self._weights
        inverse = np.linalg.inv(x.T @ x / 4 + np.diag(TRUST))
        for _ in range(ROUNDS):
            weights = weights + inverse @ (x.T @ (held - _sigmoid(x @ weights)) - TRUST * (weights - [1.0, 0.0]))
        self._weights = np.array([max(weights[0], 0.0), weights[1]])  # what is likelier never holds less often


def _logit(probabilities: F32) -> F64:
    p = np.clip(probabilities.astype(np.float64), _EDGE, 1 - _EDGE)
    logits: F64 = np.log(p / (1 - p))
    return logits


def _sigmoid(scores: F64) -> F64:
    p: F64 = 1 / (1 + np.exp(-np.clip(scores, -50.0, 50.0)))
    return p
