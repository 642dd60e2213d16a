"""Channels between workers of one process: every frame is there at the receiver's next look, or some looks later.

Over plain channels a frame comes when a thread of ZeroMQ's gets its turn, so what a test counts in turns of the workers
depends on what else the machine does.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Sequence

from flowinfer.channel import Channel, Received
from flowinfer.message import Event, Message

PATIENCE_S = 60.0  # on a busy machine
LATE = 0.4  # of the frames that a look could take, those that wait for the next one, where frames are delayed


class Post:
    """What the channels of a cluster know of each other: frames under way, by sender and receiver.

    delays: holds frames back for some looks; those of one sender on one lane keep their order, and no others do.
    """

    def __init__(self, delays: random.Random | None = None) -> None:
        self.delays = delays
        self.under_way: Counter[tuple[str, str]] = Counter()

    def is_awaited(self, receiver: str) -> bool:
        return any(count > 0 for (_, to), count in self.under_way.items() if to == receiver)

    def forget(self, name: str) -> None:
        """This one is closed: what it sent last may come or not."""
        for pair in [pair for pair in self.under_way if name in pair]:
            del self.under_way[pair]


class SureChannel(Channel):
    """A mailbox of a cluster."""

    def __init__(self, name: str, post: Post) -> None:
        super().__init__(name)
        self.post = post
        self._held: dict[tuple[str, str], deque[Received]] = {}  # by lane and sender

    def send(self, peer: str, edge: str, lane: str, messages: Sequence[Message], cost: int = 1) -> int:
        size = super().send(peer, edge, lane, messages, cost)
        self.post.under_way[self.name, peer] += size > 0
        return size

    def send_event(self, peer: str, event: Event) -> bool:
        is_sent = super().send_event(peer, event)
        self.post.under_way[self.name, peer] += is_sent
        return is_sent

    def poll(self, timeout_s: float | None) -> tuple[list[Received], list[Received]]:
        """Waits for all that was sent here before."""
        deadline = time.monotonic() + PATIENCE_S
        events, data = self._look(timeout_s)
        while self.post.is_awaited(self.name):
            assert time.monotonic() < deadline, f"frames to {self.name} are lost: {self.post.under_way}"
            more_events, more_data = self._look(1.0)
            events += more_events
            data += more_data
        if self.post.delays is None:
            return events, data
        return self._delayed("events", events, self.post.delays), self._delayed("data", data, self.post.delays)

    def close(self, linger_ms: int = 0) -> None:
        super().close(linger_ms)
        self.post.forget(self.name)

    def _look(self, timeout_s: float | None) -> tuple[list[Received], list[Received]]:
        events, data = super().poll(timeout_s)
        for header, _ in (*events, *data):
            self.post.under_way[header.sender, self.name] -= 1
        return events, data

    def _delayed(self, lane: str, come: list[Received], delays: random.Random) -> list[Received]:
        for received in come:
            self._held.setdefault((lane, received[0].sender), deque()).append(received)
        due: list[Received] = []
        for (of, _), frames in self._held.items():
            while of == lane and frames and delays.random() > LATE:
                due.append(frames.popleft())
        return due
