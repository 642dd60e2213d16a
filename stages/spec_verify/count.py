"""Counts drafts for the metrics. Decides nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowinfer.message import Ids
from flowinfer.observe import metrics
from flowinfer.observe.prometheus import Counter

NUM_BINS = 10  # of confidence


class SpecCounters:
    """The speculation counters of this process, bound once."""

    def __init__(self, max_drafts: int) -> None:
        self._drafts = metrics.counter("spec_drafts_total")
        self._drafted = metrics.counter("spec_draft_tokens_total")
        self._accepted = metrics.counter("spec_accepted_tokens_total")
        places = [str(i) for i in range(max_drafts)]
        self._drafted_at = [metrics.counter("spec_drafted_per_position_total").labels(position=i) for i in places]
        self._accepted_at = [metrics.counter("spec_accepted_per_position_total").labels(position=i) for i in places]
        bins = [f"{i / NUM_BINS:.1f}" for i in range(NUM_BINS)] if max_drafts else []
        self._guessed_in = [metrics.counter("spec_confidence_guesses_total").labels(confidence=i) for i in bins]
        self._held_in = [metrics.counter("spec_confidence_held_total").labels(confidence=i) for i in bins]

    def count(self, num_drafts: Ids, accepted: Ids) -> None:
        """One step: of num_drafts[i] drafts of a sequence, accepted[i] held."""
        self._drafts.inc(int(np.count_nonzero(num_drafts)))
        self._drafted.inc(int(num_drafts.sum()))
        self._accepted.inc(int(accepted.sum()))
        _count_places(self._drafted_at, num_drafts)
        _count_places(self._accepted_at, accepted)

    def calibrate(self, confidences_nD: NDArray[np.float32], hits: Ids, trials: Ids) -> None:
        """Of each sequence's drafts, the first trials[i] were put to the test, and the first hits[i] of those held."""
        places = np.arange(confidences_nD.shape[1])
        bins = np.clip((confidences_nD * NUM_BINS).astype(np.int64), 0, NUM_BINS - 1)
        for counters, numbers in ((self._guessed_in, trials), (self._held_in, hits)):
            counts = np.bincount(bins[places < numbers[:, None]], minlength=NUM_BINS)
            for index in np.flatnonzero(counts).tolist():
                counters[index].inc(int(counts[index]))


def _count_places(counters: list[Counter], numbers: Ids) -> None:
    """Adds 1 to the first numbers[i] of the counters, for each i."""
    reached = 0
    by_number = np.bincount(numbers, minlength=len(counters) + 1).tolist()
    for counter, ending_here in zip(reversed(counters), reversed(by_number), strict=False):
        reached += ending_here
        if reached:
            counter.inc(reached)
