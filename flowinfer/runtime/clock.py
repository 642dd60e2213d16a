"""Time as a value: the system's clock, and one that a test moves by hand."""

from __future__ import annotations

import time


class SystemClock:
    """CLOCK_MONOTONIC, which all processes of a host share, and the wall clock."""

    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


class FakeClock:
    """A clock that stands still until `advance`."""

    def __init__(self, now: float = 1_000.0, wall: float = 1_700_000_000.0) -> None:
        self._now, self._wall = now, wall

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._wall

    def advance(self, seconds: float) -> None:
        """Moves both clocks forward. Raises ValueError backwards."""
        if seconds < 0:
            raise ValueError(f"time doesn't run backwards ({seconds} s)")
        self._now += seconds
        self._wall += seconds
