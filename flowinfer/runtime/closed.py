"""Remembers which requests are over, so that what comes late for them is refused. Pure: time passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

REMEMBERED_S = 600.0  # the longest that a message may be under way: the default limit of a whole request


class ClosedRequests:
    """A set of request ids that forgets each after REMEMBERED_S."""

    def __init__(self, remembered_s: float = REMEMBERED_S) -> None:
        self._remembered_s = remembered_s
        self._ids: set[str] = set()
        self._order: deque[tuple[float, str]] = deque()

    def __contains__(self, request: object) -> bool:
        return request in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, requests: Iterable[str], now: float) -> list[str]:
        """Closes requests; returns those that weren't closed yet."""
        new = [request for request in requests if request not in self._ids]
        self._ids.update(new)
        self._order.extend((now, request) for request in new)
        self._forget(now)
        return new

    def _forget(self, now: float) -> None:
        while self._order and now - self._order[0][0] > self._remembered_s:
            self._ids.discard(self._order.popleft()[1])
