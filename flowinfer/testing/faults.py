"""Faults of a test at work in one worker: they count messages or wait for their time, then strike. Real or simulated.

Each strikes where it would in life: a killed worker stops between two instructions, a corrupt frame is damaged behind
the codec and refused by its receiver, lost credit never reaches its sender, a full disk says so to the disk tier.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from flowinfer.cache.disk.io import Files
from flowinfer.codec import Header
from flowinfer.graph.plan import Plan
from flowinfer.message import Message
from flowinfer.runtime.outbox import Outbox
from flowinfer.runtime.watch import watch
from flowinfer.testing.file import Fault

if TYPE_CHECKING:
    from flowinfer.runtime.stage_run import FusedEdge
    from flowinfer.runtime.worker import Worker

Die = Callable[[], None]


def kill_self() -> None:
    """kill -9 of this process."""
    os.kill(os.getpid(), signal.SIGKILL)


class Injector:
    """The faults of a test that concern one worker instance. `begin` starts the clock of those that have a time."""

    def __init__(self, worker: Worker, faults: Sequence[Fault], die: Die = kill_self) -> None:
        self.worker = worker
        self._die = die
        self._running = [_KINDS[fault.kind](self, fault) for fault in faults if _concerns(fault, worker)]

    def begin(self, at: float) -> None:
        """The first request was sent at this time of the worker's clock."""
        for running in self._running:
            running.begin(at)

    def close(self) -> None:
        """Takes back what reaches beyond the worker."""
        for running in self._running:
            running.end()

    def die(self) -> None:
        self._die()


class _Running:
    """One fault in one worker. active: it has begun and isn't over."""

    def __init__(self, injector: Injector, fault: Fault) -> None:
        self.injector, self.fault, self.worker = injector, fault, injector.worker
        self.active = False
        self.left = math.inf if fault.count is None else fault.count
        self._seen = 0
        self.prepare()
        if fault.trigger and self._is_new and not watch(self.worker, fault.trigger, self._count):
            self._count_arrivals(fault.trigger)

    def prepare(self) -> None:
        """Puts itself where it will strike."""

    def strike(self) -> None:
        """It begins now."""

    def end(self) -> None:
        """Its time is over."""

    @property
    def _is_new(self) -> bool:
        """False in a worker that comes back: what a message began has been. Of deaths there may be several."""
        return self.worker.generation <= (self.fault.count or 1 if self.fault.kind == "kill" else 1)

    def begin(self, at: float) -> None:
        start = at + (self.fault.at or 0.0)
        is_over = self.fault.lasts is not None and start + self.fault.lasts <= self.worker.clock.now()
        if not self.fault.trigger and not is_over:
            self.worker.call_at(None, start, self._start)

    def use(self) -> bool:
        """Takes one of its `count`; False when it isn't active."""
        if not self.active or self.left < 1:
            return False
        self.left -= 1
        return True

    def _count(self, message: Message) -> None:
        self._seen += 1
        if self._seen == self.fault.message:
            self._start()

    def _count_arrivals(self, name: str) -> None:
        """For an edge that ends here and begins in another worker."""
        worker: Any = self.worker
        deliver = worker._deliver

        def counted(header: Header, messages: list[Message]) -> None:
            for message in messages if header.edge == name else ():
                self._count(message)
            deliver(header, messages)

        worker._deliver = counted

    def _start(self) -> None:
        self.active = True
        if self.fault.lasts is not None:  # a worker that comes back in the middle of it may end it a little late
            self.worker.call_at(None, self.worker.clock.now() + self.fault.lasts, self._stop)
        self.strike()

    def _stop(self) -> None:
        self.active = False
        self.end()


class _Kill(_Running):
    def strike(self) -> None:
        if self._is_new:
            self.injector.die()


class _Delay(_Running):
    """Holds messages back at the sender, in their order."""

    def prepare(self) -> None:
        self._last = 0.0  # no message may be earlier than the one before it
        for run in self.worker.runs:
            for edges in run.outputs.values():
                for edge in edges:
                    if edge.edge.name == self.fault.delay:
                        setattr(edge, "put", self._later(edge, edge.put))  # noqa: B010 - one of two types
                        run.routes.clear()

    def _later(self, edge: FusedEdge | Outbox, put: Callable[[Message], None]) -> Callable[[Message], None]:
        def later(message: Message) -> None:
            now = self.worker.clock.now()
            at = max(self._last, now + (self.fault.by or 0.0) if self.use() else now)
            if at <= now:
                put(message)
                return
            self._last = at
            self.worker.call_at(None, at, lambda: self._put(edge, put, message))

        return later

    def _put(self, edge: FusedEdge | Outbox, put: Callable[[Message], None], message: Message) -> None:
        if getattr(message, "id", None) in self.worker.closed:  # an outbox would have been cleared of it
            self.worker.refuse(message, "closed")
            return
        put(message)
        if isinstance(edge, Outbox):
            edge.flush()


class _DropCredit(_Running):
    """What is at hand when it begins is gone, and what comes back while it lasts."""

    def prepare(self) -> None:
        self._outbox = self.worker.outputs[self.fault.target]
        book = self._outbox.credit

        def credit(name: str, generation: int, lane: str, amount: int, ids: Iterable[str]) -> None:
            book(name, generation, lane, 0 if self.use() else amount, ids)

        self._outbox.credit = credit  # type: ignore[method-assign]

    def strike(self) -> None:
        for consumer in self._outbox.consumers.values():
            consumer.credit.update(dict.fromkeys(consumer.credit, 0))


class _Corrupt(_Running):
    """Damages frames behind the codec, so that their receiver can't read them; one, unless it says more."""

    def prepare(self) -> None:
        if self.fault.count is None and self.fault.lasts is None:
            self.left = 1
        channel: Any = self.worker.channel
        send = channel.send

        def damaged(peer: str, edge: str, lane: str, messages: Sequence[Message], cost: int = 1) -> int:
            if edge != self.fault.corrupt or not self.use():
                return int(send(peer, edge, lane, messages, cost))
            with _damaging(channel.codec):
                return int(send(peer, edge, lane, messages, cost))

        channel.send = damaged


@contextlib.contextmanager
def _damaging(codec: Any) -> Iterator[None]:
    """Frames that are made meanwhile have a wrong format, and a wrong byte in the middle of what they say."""
    encode = codec.encode_behind

    def encode_behind(head: bytes, messages: Sequence[Message]) -> list[Any]:
        first, *rest = encode(head, messages)
        data = bytearray(first)
        data[0] ^= 0xFF
        data[len(data) // 2] ^= 0xFF
        return [bytes(data), *rest]

    codec.encode_behind = encode_behind
    try:
        yield
    finally:
        del codec.encode_behind


class _FullDisk(_Running):
    """The disk tier of this process finds no room. Inline, several workers share the process, and end in any order."""

    _striking: ClassVar[list[_FullDisk]] = []
    _real: ClassVar[dict[str, Callable[..., Any]]] = {}

    def strike(self) -> None:
        if not self._striking:
            for name in ("write", "create"):
                self._real[name] = getattr(Files, name)
                setattr(Files, name, self._full(self._real[name]))
        self._striking.append(self)

    @classmethod
    def _full(cls, real: Callable[..., Any]) -> Callable[..., Any]:
        def full(*arguments: Any, **named: Any) -> Any:
            if any(fault.use() for fault in cls._striking):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **named)

        return full

    def end(self) -> None:
        if self not in self._striking:
            return
        self._striking.remove(self)
        while self._real and not self._striking:
            setattr(Files, *self._real.popitem())


_KINDS: dict[str, type[_Running]] = {
    "kill": _Kill,
    "delay": _Delay,
    "drop_credit": _DropCredit,
    "corrupt": _Corrupt,
    "full_disk": _FullDisk,
}


def _concerns(fault: Fault, worker: Worker) -> bool:
    if fault.kind == "kill":
        return worker.name == instance_of(worker.plan, fault.target)
    if fault.kind == "full_disk":
        return True  # the stores are in the workers that run models, whose settings the stage gives
    edge = next((edge for edge in worker.plan.edges if edge.name == fault.target), None)
    return edge is not None and edge.source in worker.by_name


def instance_of(plan: Plan, target: str) -> str:
    """The instance that a stage, worker or instance name means; "" for none."""
    worker, _, replica = target.rpartition(".")
    if worker in plan.workers and replica.isdigit() and int(replica) < plan.workers[worker].replicas:
        return target
    name = plan.stages[target].worker if target in plan.stages else target
    return f"{name}.0" if name in plan.workers else ""
