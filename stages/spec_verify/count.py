"""Counts drafts for the metrics. Decides nothing."""

from __future__ import annotations

import numpy as np

from flowinfer.message import Ids
from flowinfer.observe import metrics


class SpecCounters:
    """The speculation counters of this process, bound once."""

    def __init__(self, max_drafts: int) -> None:
        self._drafts = metrics.counter("spec_drafts_total")
        self._drafted = metrics.counter("spec_draft_tokens_total")
        self._accepted = metrics.counter("spec_accepted_tokens_total")
        by_position = metrics.counter("spec_accepted_per_position_total")
        self._positions = [by_position.labels(position=str(i)) for i in range(max_drafts)]

    def count(self, num_drafts: Ids, accepted: Ids) -> None:
        """One step: of num_drafts[i] drafts of a sequence, accepted[i] held."""
        self._drafts.inc(int(np.count_nonzero(num_drafts)))
        self._drafted.inc(int(num_drafts.sum()))
        held = 0
        by_count = np.bincount(accepted, minlength=len(self._positions) + 1).tolist()
        for counter, ending_here in zip(reversed(self._positions), reversed(by_count), strict=False):
            held += ending_here
            if held:
                counter.inc(held)
                self._accepted.inc(held)
