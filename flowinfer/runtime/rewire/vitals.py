"""How a service does, before a change and after it: errors and latency, from counters that its door keeps. Pure.

A reading is cumulative; two of them make a window. Medians tell of a change, since a pause of each stream, which every
change brings, moves only the tail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from flowinfer.observe.metrics import Sample

NAMES = ("time_to_first_token_seconds", "inter_token_latency_seconds")
KEPT_S = 120.0  # of readings
BEFORE_S = 60.0  # the window that a change is measured against
LEAST = 20  # observations of a latency in each window, below which chance speaks
LEAST_ERRORS = 3
FLOOR_S = 0.1  # a median that rose by less is no breach, however small it was
SHORT_S = 10.0  # a window as long must break twice the limit, a shorter one more: load comes in bursts of seconds
HARMLESS = ("rewired", "cancelled")  # failures that a change brings by itself, by their code
_PREFIX = "flowinfer:"


class Histogram(NamedTuple):
    """Cumulative counts by upper bound, in seconds; the last bound is infinite."""

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()

    def less(self, before: Histogram) -> Histogram:
        """What came since."""
        if self.bounds != before.bounds:
            return self
        return Histogram(self.bounds, tuple(b - a for a, b in zip(before.counts, self.counts, strict=True)))

    @property
    def total(self) -> float:
        return self.counts[-1] if self.counts else 0.0

    @property
    def median(self) -> float:
        """Interpolated inside its bucket, as Prometheus does; 0 without observations."""
        half, low, below = self.total / 2, 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= half and count > below:
                return low if bound == float("inf") else low + (bound - low) * (half - below) / (count - below)
            low, below = bound, count
        return 0.0


class Reading(NamedTuple):
    """The counters at one time."""

    at: float
    finished: float = 0.0
    failed: float = 0.0
    latencies: tuple[Histogram, ...] = (Histogram(), Histogram())

    def since(self, before: Reading) -> Reading:
        """The window between two readings."""
        latencies = tuple(b.less(a) for a, b in zip(before.latencies, self.latencies, strict=True))
        return Reading(self.at - before.at, self.finished - before.finished, self.failed - before.failed, latencies)


def is_vital(sample: Sample) -> bool:
    """True for the samples that `read` needs."""
    name = sample[0].removeprefix(_PREFIX)
    return name.startswith(NAMES) or name in ("requests_finished_total", "requests_failed_total")


def read(samples: Iterable[Sample], at: float) -> Reading:
    """The counters of the door among these samples."""
    finished = failed = 0.0
    buckets: dict[str, dict[float, float]] = {name: {} for name in NAMES}
    for name, labels, value in samples:
        name = name.removeprefix(_PREFIX)
        if name == "requests_finished_total":
            finished += value
        elif name == "requests_failed_total" and labels.get("code") not in HARMLESS:
            failed += value
        elif name.endswith("_bucket") and name.removesuffix("_bucket") in buckets:
            bound = float(labels["le"])
            own = buckets[name.removesuffix("_bucket")]
            own[bound] = own.get(bound, 0.0) + value
    latencies = tuple(Histogram(tuple(sorted(own)), tuple(own[b] for b in sorted(own))) for own in buckets.values())
    return Reading(at, finished, failed, latencies)


class Limits(NamedTuple):
    """errors: by how much the share of failed requests may rise.  latency: by which factor a median may.

    The shorter the window, the more it takes: at SHORT_S, twice that factor.
    """

    errors: float = 0.05
    latency: float = 3.0


@dataclass
class Vitals:
    """The last readings of a service."""

    _readings: deque[Reading] = field(default_factory=deque)

    def add(self, reading: Reading) -> None:
        """Takes the newest. A door that started anew begins at nought, and so does this."""
        if self._readings and reading.finished < self._readings[-1].finished:
            self._readings.clear()
        self._readings.append(reading)
        while self._readings[0].at < reading.at - KEPT_S:
            self._readings.popleft()

    @property
    def last(self) -> Reading | None:
        return self._readings[-1] if self._readings else None

    def before(self) -> Reading | None:
        """The window of the last BEFORE_S, None where there is none yet."""
        if len(self._readings) < 2:
            return None
        last = self._readings[-1]
        first = next(reading for reading in self._readings if reading.at >= last.at - BEFORE_S)
        return last.since(first)


def breach(before: Reading, during: Reading, limits: Limits) -> str:
    """Which limit the window `during` breaks, measured against `before`; "" for none."""
    ended = during.finished + during.failed
    share, usual = _share(during), _share(before)
    if during.failed >= LEAST_ERRORS and share > usual + limits.errors:
        return f"{during.failed:.0f} of {ended:.0f} requests failed, {share:.0%} against {usual:.0%} before"
    factor = limits.latency * (1 + SHORT_S / max(during.at, 0.5))
    for name, now, was in zip(("first tokens", "tokens"), during.latencies, before.latencies, strict=True):
        if min(now.total, was.total) >= LEAST and now.median > max(factor * was.median, was.median + FLOOR_S):
            return f"{name} take {now.median * 1e3:.0f} ms at the median, {was.median * 1e3:.0f} ms before"
    return ""


def _share(window: Reading) -> float:
    ended = window.finished + window.failed
    return window.failed / ended if ended else 0.0
