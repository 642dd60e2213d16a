"""How long messages of an edge wait, from being made to being taken: a histogram that costs the hot path nothing.

Inside a worker a message only waits while its stage may not run, which is noted when it happens; all others waited
less than a turn and are counted as such. Between workers one message in PROBE_EVERY_S carries the time of its making.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from math import inf

from flowinfer.observe.catalog import WAIT_BUCKETS

PROBE_EVERY_S = 0.02
NAME = "edge_wait_seconds"
Sample = tuple[str, dict[str, str], float]


class Waits:
    """Counts by bucket. stays: when messages that wait now began to, and how many each time, oldest first."""

    __slots__ = ("_counts", "_sum", "num", "stays")

    def __init__(self) -> None:
        self.num = 0
        self.stays: list[tuple[float, int]] = []
        self._counts = [0] * (len(WAIT_BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        self._counts[bisect_left(WAIT_BUCKETS, seconds)] += count
        self._sum += seconds * count
        self.num += count

    def stay(self, waiting: int, now: float) -> None:
        """So many messages wait, and can't be taken now."""
        more = waiting - sum(count for _, count in self.stays)
        if more > 0:
            self.stays.append((now, more))

    def leave(self, now: float) -> None:
        """All that waited were taken."""
        for began, count in self.stays:
            self.observe(now - began, count)
        self.stays.clear()

    def samples(self, edge: str, num_messages: int = 0) -> Iterator[Sample]:
        """The histogram, in which messages beyond those that were observed waited less than a turn."""
        total = max(0, num_messages - self.num)
        whole = total + self.num
        for bound, count in zip([*WAIT_BUCKETS, inf], self._counts, strict=True):
            total += count
            yield f"{NAME}_bucket", {"edge": edge, "le": "+Inf" if bound == inf else str(float(bound))}, float(total)
        yield f"{NAME}_count", {"edge": edge}, float(whole)
        yield f"{NAME}_sum", {"edge": edge}, self._sum
