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
from flowinfer.observe.where import compile_where
from flowinfer.runtime.events import TapAsk
from flowinfer.runtime.watch import unwatch, watch

if TYPE_CHECKING:
    from flowinfer.runtime.group import Group

log = logging.getLogger("flowinfer.worker")

LEASE_S = 6.0  # without a renewal, of which there is one every two seconds
FLUSH_S = 0.05
SHARE = 0.01  # of the time of the loop
BURST_S = 0.005
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
        self.group, self.ask = group, ask
        self.until = group.clock.now() + LEASE_S
        self._holds = compile_where(ask.where, type_registry.get(edge.message))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._waiting: list[bytes] = []
        self._told = Told(group.name, group.generation, 0, 0, 0, 0)
        self._balance = BURST_S
        self._looked = time.perf_counter()
        self._share = 0.0  # of the messages that `sample` asks for, so far
        self.over = False

    def look(self, message: Message) -> None:
        """Takes a message into the next datagram, if it is asked for and there is time."""
        told = self._told
        told.num_seen += 1
        self._share += self.ask.sample
        if self._share < 1.0 or told.num_matched >= self.ask.limit:
            return
        self._share -= 1.0
        began = time.perf_counter()
        self._balance = min(BURST_S, self._balance + (began - self._looked) * SHARE)
        self._looked = began
        if self._balance <= 0:
            told.num_skipped += 1
            return
        if self._holds(message):
            told.num_matched += 1
            self._keep(message)
        self._balance -= time.perf_counter() - began

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
        """Sends what waits; what the viewer's socket doesn't take is lost to it."""
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
        tap.over = ask.limit <= 0 or not watch(self.group, ask.edge, tap.look)
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
