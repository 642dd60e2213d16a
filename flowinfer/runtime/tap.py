"""Shows messages of an edge to `flowinfer tap`: looked at for 1 % of the time at most, sent only when they can be.

What isn't looked at, or can't be sent at once, is dropped for the viewer, and counted; the service never waits. A tap
ends by itself when its viewer doesn't renew it, so that a viewer that dies leaves nothing behind.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from typing import TYPE_CHECKING

import msgspec

from flowinfer.errors import FlowInferError
from flowinfer.graph.plan import EdgePlan
from flowinfer.message import Message, type_registry
from flowinfer.observe.summary import summarize
from flowinfer.runtime.events import TapAsk
from flowinfer.runtime.outbox import Outbox
from flowinfer.runtime.watch import unwatch, watch

if TYPE_CHECKING:
    from flowinfer.runtime.group import Group

log = logging.getLogger("flowinfer.worker")

LEASE_S = 6.0  # without a renewal, of which there is one every two seconds
FLUSH_S = 0.05
SHARE = 0.01  # of the time of the loop
BURST_S = 0.005
CALL_S = 0.5e-6  # what a look costs beside what it measures of itself
REST_S = 0.05
MAX_WAITING = 256  # messages between two sendings
MAX_LINE = 16_000  # bytes of one message
MAX_DATAGRAM = 60_000  # bytes; a Unix datagram carries 200 KB


class Told(msgspec.Struct):
    """A datagram to the viewer: what a worker has to show, and its counts since the tap began.

    num_seen: messages that passed; num_skipped: not looked at, for want of time; num_lost: matched, but not sent.
    """

    worker: str
    generation: int
    num_seen: int
    num_matched: int
    num_skipped: int
    num_lost: int
    messages: list[msgspec.Raw] = []


class Tap:
    """One viewer's look at one edge in this worker."""

    def __init__(self, group: Group, ask: TapAsk, edge: EdgePlan) -> None:
        from flowinfer.observe.where import compile_where  # 40 ms of each worker's start

        self.group, self.ask, self.edge = group, ask, edge
        self.until = group.clock.now() + LEASE_S
        self._holds = compile_where(ask.where, type_registry.get(edge.message))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._waiting: list[bytes] = []
        self._told = Told(group.name, group.generation, 0, 0, 0, 0)
        self._passed = passed(group, edge)
        self._num_looked = 0
        self._balance = BURST_S
        self._looked_at = time.perf_counter()
        self._share = 0.0  # of the messages that `sample` asks for, so far
        self._rests = False
        self.over = False

    def begin(self) -> bool:
        """Looks at the edge from now on, unless it rests; False where no such edge begins here."""
        return self._rests or watch(self.group, self.edge.name, self.look)

    def look(self, message: Message) -> None:
        """Takes a message into the next datagram, if it is asked for and there is time."""
        began = time.perf_counter()
        self._balance = min(BURST_S, self._balance + (began - self._looked_at) * SHARE)
        self._looked_at = began
        if self._balance <= 0:
            self._rest()
            return
        self._num_looked += 1
        self._share += self.ask.sample
        if self._share >= 1.0 and self._told.num_matched < self.ask.limit:
            self._share -= 1.0
            if self._holds(message):
                self._told.num_matched += 1
                self._keep(message)
        self._balance -= time.perf_counter() - began + CALL_S

    def _rest(self) -> None:
        """Lets go of the edge until there is time again: even to count would be too much on a very busy one."""
        self._rests = True
        unwatch(self.group, self.look)
        self.group.call_at(None, self.group.clock.now() + REST_S - self._balance / max(SHARE, 1e-6), self._wake)

    def _wake(self) -> None:
        self._rests = False
        if not self.over:
            self.begin()

    def _keep(self, message: Message) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._told.num_lost += 1
            return
        line = msgspec.json.encode({"at": self.group.clock.wall(), **summarize(message)})
        if len(line) > MAX_LINE:
            short = {"at": self.group.clock.wall(), "type": type(message).__name__, "bytes": len(line)}
            line = msgspec.json.encode({**short, "…": "too long to be shown"})
        if not self._waiting:
            self.group.call_at(None, self.group.clock.now() + FLUSH_S, self.flush)
        self._waiting.append(line)

    def flush(self) -> None:
        """Sends what waits; what the viewer's socket doesn't take is lost to it. Its time is the tap's as well."""
        began = time.perf_counter()
        self._send_waiting()
        self._balance -= time.perf_counter() - began

    def _send_waiting(self) -> None:
        self._count()
        lines, self._waiting = self._waiting, []
        while True:
            batch, size = list[msgspec.Raw](), 0
            while lines and size + len(lines[0]) <= MAX_DATAGRAM:
                size += len(lines[0])
                batch.append(msgspec.Raw(lines.pop(0)))
            self._told.messages = batch
            if not self._send(msgspec.json.encode(self._told)):
                self._told.num_lost += len(batch)
            self._told.messages = []
            if not lines:
                return

    def _count(self) -> None:
        """What has passed, by the edge's own count, which costs nothing; what wasn't looked at of it."""
        now = passed(self.group, self.edge)
        self._told.num_seen += now - self._passed if now >= self._passed else now  # a new instance counts anew
        self._passed = now
        self._told.num_skipped = max(0, self._told.num_seen - self._num_looked)

    def _send(self, data: bytes) -> bool:
        try:
            self._socket.sendto(data, self.ask.to)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
                self.over = True  # the viewer is gone
            return False
        return True

    def close(self) -> None:
        self._socket.close()


def passed(group: Group, edge: EdgePlan) -> int:
    """Messages that were put on an edge that begins in this worker."""
    run = group.by_name.get(edge.source)
    for one in run.outputs.get(edge.message, ()) if run is not None else ():
        if one.edge.name == edge.name and isinstance(one, Outbox):
            return one.num_sent + one.waiting
    target = group.by_name.get(edge.target)
    inbox = target.inboxes.get(edge.port) if target is not None else None
    return inbox.num_taken + len(inbox.messages) if inbox is not None else 0


class Taps:
    """The taps of a worker."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._taps: dict[str, Tap] = {}

    def ask(self, ask: TapAsk) -> None:
        """Begins a tap, renews it, or with limit 0 ends it."""
        tap = self._taps.get(ask.to)
        if tap is None and ask.limit > 0:
            tap = self._begin(ask)
        if tap is None:
            return
        tap.until = self.group.clock.now() + LEASE_S
        tap.over = ask.limit <= 0 or not tap.begin()
        tap.flush()
        self._end_over()

    def _begin(self, ask: TapAsk) -> Tap | None:
        edge = next((edge for edge in self.group.plan.edges if edge.name == ask.edge), None)
        if edge is None or edge.source not in self.group.by_name:
            return None  # it begins in another worker
        try:
            tap = self._taps[ask.to] = Tap(self.group, ask, edge)
        except FlowInferError as error:  # the command line has checked it; another version may know less
            log.warning("%s: a tap was refused: %s", self.group.name, error)
            return None
        self.group.call_at(None, tap.until, self._expire)
        return tap

    def _expire(self) -> None:
        now = self.group.clock.now()
        for tap in self._taps.values():
            tap.over = tap.over or now >= tap.until
        self._end_over()
        if self._taps:
            self.group.call_at(None, min(tap.until for tap in self._taps.values()), self._expire)

    def _end_over(self) -> None:
        for to in [to for to, tap in self._taps.items() if tap.over]:
            tap = self._taps.pop(to)
            unwatch(self.group, tap.look)
            tap.close()
