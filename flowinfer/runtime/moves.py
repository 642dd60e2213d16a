"""Counts what moves requests between workers without an edge, so that nobody is ended while such is under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from flowinfer.message import Event, HandOff, Moved, Replay

EDGE = "moves"  # stands for an edge in `Counted`
_KINDS = (HandOff, Moved, Replay)


class Moves:
    """Those of one worker, by peer and over the lives of both."""

    def __init__(self) -> None:
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()

    def note_sent(self, event: Event, to: str) -> None:
        if isinstance(event, _KINDS):
            self._sent[to] += 1

    def note_received(self, event: Event, sender: str) -> None:
        if isinstance(event, _KINDS):
            self._received[sender] += 1

    def forget(self, peer: str) -> None:
        """It died; the next of that name counts from 0."""
        self._sent.pop(peer, None)
        self._received.pop(peer, None)

    def sent(self) -> Iterator[tuple[str, str, int]]:
        """As in Counted."""
        return ((EDGE, peer, count) for peer, count in self._sent.items())

    def received(self) -> Iterator[tuple[str, str, int, int]]:
        """As in Counted; nothing is owed for them."""
        return ((EDGE, peer, count, 0) for peer, count in self._received.items())
