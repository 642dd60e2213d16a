"""The sending half of an edge between workers: messages that wait for credit, by lane. Knows no sockets.

A message goes to a consumer instance that has credit for it; without, it waits here, and a full outbox makes the worker
stop feeding the stage behind it. Nothing is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flowinfer.graph.plan import EdgePlan
from flowinfer.message import Message
from flowinfer.runtime.dispatch import Consumer, Dispatch, Head, make_dispatch, rendezvous
from flowinfer.runtime.waits import PROBE_EVERY_S

MAX_BATCH = 64  # messages a frame: hides the cost of a frame, and the receiver works on one while the next is made
Probe = Callable[[str, EdgePlan, float], None]  # instance, edge, when the message that was just sent was made
Send = Callable[[str, EdgePlan, str, Sequence[Message], int], None]  # instance, edge, lane, messages, cost of each


@dataclass(slots=True)
class Reservation:
    """Credit taken for a request before its message exists. instance "" after that consumer died."""

    instance: str
    lane: str
    amount: int


class Outbox:
    """Outbox of one edge in one producer instance."""

    def __init__(
        self,
        edge: EdgePlan,
        send: Send,
        now: Callable[[], float],
        dispatch: Dispatch | None = None,
        probe: Probe | None = None,
    ) -> None:
        self.edge = edge
        self.waiting = 0
        self.num_sent = 0
        self.bytes_sent = 0
        self.wait_s = 0.0  # time in which something waited for credit
        self.dispatch = dispatch or make_dispatch(edge)
        self.consumers: dict[str, Consumer] = {}
        self._send = send
        self._now = now
        self._blocked_at: float | None = None
        self._bound: dict[str, deque[tuple[Message, Reservation | None]]] = {}
        self._reserved: dict[str, Reservation] = {}
        self.num_tokens = 0
        self.counts_tokens = False  # set by the stage that sends, where its inputs have none
        self._probe = probe
        self._probing = probe is not None  # the next message is the sample
        self._probe_at = 0.0  # when there may be the next sample
        self._sample: Message | None = None
        self._sample_at = 0.0
        self._shape(edge)

    @property
    def full(self) -> bool:
        return self.waiting >= self.edge.capacity

    def put(self, message: Message) -> None:
        """Queues a message; `flush` sends it."""
        self.waiting += 1
        if self._probing:
            self._probing, self._sample, self._sample_at = False, message, self._now()
        if self._simple and not self._reserved:
            self._default.append(message)
        else:
            self._place(message)

    def _place(self, message: Message) -> None:
        reservation = self._reserved.pop(getattr(message, "id", ""), None)
        if reservation is not None:
            self._bound.setdefault(reservation.instance, deque()).append((message, reservation))
        elif self.edge.dispatch == "hash":
            self._bound.setdefault(self._hashed(message), deque()).append((message, None))
        else:
            self._lane_of(message).append(message)

    def _lane_of(self, message: Message) -> deque[Message]:
        lane: str | None = getattr(message, "bucket", None) if self._by_bucket else None
        return self._lanes.get(lane or "", self._default)

    def _hashed(self, message: Message) -> str:
        names = [name for name, consumer in self.consumers.items() if consumer.is_open]
        return rendezvous(str(getattr(message, self.edge.key or "id", "")), names) if names else ""

    def reshape(self, edge: EdgePlan) -> None:
        """Goes on as this edge says: where dispatch or lanes differ, what waits is sorted anew.

        Credit of lanes that are gone lapses; that of new ones the consumers grant when they take the new plan.
        """
        before, self.edge = self.edge, edge
        if (before.dispatch, before.key, before.lanes) == (edge.dispatch, edge.key, edge.lanes):
            return
        waiting = [message for queue in self._lanes.values() for message in queue]
        for queue in self._bound.values():
            waiting += [message for message, reservation in queue if reservation is None]
        bound = {name: deque(pair for pair in queue if pair[1]) for name, queue in self._bound.items()}
        self._bound = {name: queue for name, queue in bound.items() if queue}
        self.dispatch = make_dispatch(edge)
        self._shape(edge)
        for consumer in self.consumers.values():
            for lane in consumer.credit.keys() & set(before.lanes) - set(edge.lanes):
                del consumer.credit[lane]
        for message in waiting:
            self._place(message)

    def _shape(self, edge: EdgePlan) -> None:
        self._lanes: dict[str, deque[Message]] = {lane: deque() for lane in edge.lanes}
        self._default = self._lanes[edge.lanes[0]]
        self._by_bucket = len(edge.lanes) > 1
        self._simple = not self._by_bucket and edge.dispatch in ("pull", "bucket")

    # -- sending -------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Sends what has credit."""
        if not self.waiting:
            return
        if self._bound:
            self._flush_bound()
        if self._simple and len(self.consumers) == 1:
            self._flush_only()
        else:
            self._flush_chosen()
        self._note_wait()

    def _flush_only(self) -> None:
        (consumer,) = self.consumers.values()
        queue, lane = self._default, self.edge.lanes[0]
        while queue and consumer.is_open and (credit := consumer.credit.get(lane, 0)) > 0:
            count = min(len(queue), credit, MAX_BATCH)
            self._post(consumer, lane, [queue.popleft() for _ in range(count)], 1)

    def _flush_chosen(self) -> None:
        batches: dict[tuple[str, str], list[Message]] = {}
        heads = {lane: _head(queue) for lane, queue in self._lanes.items() if queue}
        consumers = [consumer for consumer in self.consumers.values() if consumer.is_open]
        while heads and (chosen := self.dispatch.choose(heads, consumers)) is not None:
            lane, consumer = chosen
            message = self._lanes[lane].popleft()
            batches.setdefault((consumer.name, lane), []).append(message)
            if work := self.dispatch.weigh(message, consumer):
                consumer.sent[getattr(message, "id", "")] = work
            consumer.credit[lane] -= 1  # so that the next choice sees it; _post books the whole batch
            consumer.outstanding += 1
            if self._lanes[lane]:
                heads[lane] = _head(self._lanes[lane])
            else:
                del heads[lane]
        for (name, lane), batch in batches.items():
            consumer = self.consumers[name]
            consumer.credit[lane] += len(batch)
            consumer.outstanding -= len(batch)
            for start in range(0, len(batch), MAX_BATCH):
                self._post(consumer, lane, batch[start : start + MAX_BATCH], 1)

    def _flush_bound(self) -> None:
        for name in list(self._bound):
            if name == "":
                self._rebind()
        for name, queue in list(self._bound.items()):
            consumer = self.consumers.get(name)
            if consumer is not None and consumer.connected:
                self._flush_to(consumer, queue)
            if not queue:
                del self._bound[name]

    def _flush_to(self, consumer: Consumer, queue: deque[tuple[Message, Reservation | None]]) -> None:
        lane = self.edge.lanes[0]
        while queue:
            message, reservation = queue[0]
            if reservation is not None:  # paid when it was reserved
                consumer.credit[reservation.lane] += reservation.amount
                consumer.outstanding -= reservation.amount
            elif not consumer.takes(lane, 1):
                return
            queue.popleft()
            cost = reservation.amount if reservation else 1
            self._post(consumer, reservation.lane if reservation else lane, [message], cost)

    def _rebind(self) -> None:
        """Finds new consumers for messages whose instance is gone."""
        left: deque[tuple[Message, Reservation | None]] = deque()
        for message, reservation in self._bound.pop(""):
            if reservation is None:
                target = self._hashed(message)
            else:
                target = self._take(reservation.lane, reservation.amount)
                reservation.instance = target
            if target:
                self._bound.setdefault(target, deque()).append((message, reservation))
            else:
                left.append((message, reservation))
        if left:
            self._bound[""] = left

    def _post(self, consumer: Consumer, lane: str, batch: list[Message], cost: int) -> None:
        total = cost * len(batch)
        consumer.credit[lane] -= total
        consumer.outstanding += total
        self.waiting -= len(batch)
        self.num_sent += len(batch)
        consumer.num_sent += len(batch)
        if self.counts_tokens:
            for message in batch:  # 17 ns each; sum() and map() take longer
                self.num_tokens += len(message.tokens)  # type: ignore[attr-defined]
        if len(batch) == 1 or len(set(map(type, batch))) == 1:
            self._send(consumer.name, self.edge, lane, batch, cost)
        else:  # a frame holds one type; subclasses on one edge are rare
            for message in batch:
                self._send(consumer.name, self.edge, lane, [message], cost)
        if self._sample is not None and any(message is self._sample for message in batch):
            self._send_sample(consumer.name)
        if hasattr(batch[0], "id"):
            for message in batch:
                consumer.sent.setdefault(message.id, 0.0)  # type: ignore[attr-defined]

    def _send_sample(self, instance: str) -> None:
        if self._probe is not None:
            self._probe(instance, self.edge, self._sample_at)
        self._sample, self._probe_at = None, self._sample_at + PROBE_EVERY_S

    def _note_wait(self) -> None:
        if self.waiting and self._blocked_at is None:
            self._blocked_at = self._now()
        elif not self.waiting and self._blocked_at is not None:
            self.wait_s += self._now() - self._blocked_at
            self._blocked_at = None

    # -- credit and reservations ---------------------------------------------------------------------------------------

    def credit(self, name: str, generation: int, lane: str, amount: int, ids: Iterable[str]) -> None:
        """Books credit that an instance grants or gives back; it may come before the connection is there."""
        consumer = self.consumers.get(name)
        if consumer is None or consumer.generation < generation:
            consumer = self.consumers[name] = Consumer(name, generation)
        elif consumer.generation > generation:
            return
        if self._sample is None and self._probe is not None and self._now() >= self._probe_at:
            self._probing = True
        if lane in self._lanes or not consumer.num_sent:  # else it comes back on a lane that is gone
            consumer.credit[lane] = consumer.credit.get(lane, 0) + amount
        consumer.outstanding = max(0, consumer.outstanding - amount)
        for request in ids:
            consumer.sent.pop(request, None)

    def regrant(self, name: str, generation: int, lane: str, amount: int) -> None:
        """An instance's grant itself grew or shrank: nothing came back, and credit may be below 0 for a while."""
        consumer = self.consumers.get(name)
        if consumer is None or consumer.generation != generation:
            self.credit(name, generation, lane, amount, ())
        else:
            consumer.credit[lane] = consumer.credit.get(lane, 0) + amount

    def leave(self, name: str) -> None:
        """This instance gets nothing new; what is bound to it goes there still."""
        if name in self.consumers:
            self.consumers[name].leaving = True

    def stay(self, name: str) -> None:
        """This instance doesn't leave after all."""
        if name in self.consumers:
            self.consumers[name].leaving = False

    def owes(self, name: str) -> bool:
        """True while something is bound to this instance, or on its way there and not yet out of it."""
        consumer = self.consumers.get(name)
        if consumer is None:
            return False
        reserved = any(reservation.instance == name for reservation in self._reserved.values())
        return bool(consumer.sent or consumer.outstanding or self._bound.get(name) or reserved)

    def connect(self, name: str, generation: int) -> None:
        """The way to this instance is open."""
        consumer = self.consumers.get(name)
        if consumer is None or consumer.generation != generation:
            consumer = self.consumers[name] = Consumer(name, generation)
        consumer.connected = True

    def drop(self, name: str, generation: int) -> list[str]:
        """Forgets a dead instance; returns the requests that were on their way to it or waited there unread."""
        consumer = self.consumers.get(name)
        if consumer is None or consumer.generation > generation:
            return []
        del self.consumers[name]
        for reservation in self._reserved.values():
            if reservation.instance == name:
                reservation.instance = ""
        orphans = self._bound.pop(name, None)
        for _, reservation_or_none in orphans or ():
            if reservation_or_none is not None:
                reservation_or_none.instance = ""
        if orphans:
            self._bound.setdefault("", deque()).extend(orphans)
        return list(consumer.sent)

    def reserve(self, request: str, amount: int) -> str | None:
        """Name of the instance whose credit was taken for request, None when none has enough.

        A request that needs more than any whole share goes alone, beyond its credit: else it would wait for ever.
        """
        held = self._reserved.get(request)
        if held is not None and held.instance:
            return held.instance
        lane = self.edge.lanes[0]
        name = self._take(lane, amount)
        if not name:
            return None
        self._reserved[request] = Reservation(name, lane, amount)
        return name

    def unreserve(self, request: str) -> None:
        reservation = self._reserved.pop(request, None)
        if reservation is not None:
            self._return(reservation)

    def _take(self, lane: str, amount: int) -> str:
        others = [c for c in self.consumers.values() if c.is_open]
        able = [c for c in others if c.takes(lane, amount)]
        if not able and all(c.credit.get(lane, 0) + c.outstanding < amount for c in others):
            able = [c for c in others if c.takes(lane, 1) and not c.outstanding]
        if not able:
            return ""
        consumer = max(able, key=lambda c: (c.credit[lane], -c.outstanding))
        consumer.credit[lane] -= amount
        consumer.outstanding += amount
        return consumer.name

    def _return(self, reservation: Reservation) -> None:
        consumer = self.consumers.get(reservation.instance)
        if consumer is not None:
            consumer.credit[reservation.lane] += reservation.amount
            consumer.outstanding -= reservation.amount

    # -- ends ----------------------------------------------------------------------------------------------------------

    def cancel(self, requests: Collection[str]) -> list[Message]:
        """Takes back what waits here for these requests, and their reservations; returns the messages."""
        for request in requests:
            self.unreserve(request)
        if not self.waiting:
            return []
        dropped: list[Message] = []
        for queue in self._lanes.values():
            _purge(queue, lambda message: getattr(message, "id", None) in requests, dropped)
        for bound in self._bound.values():
            gone = [pair for pair in bound if getattr(pair[0], "id", None) in requests]
            for pair in gone:
                bound.remove(pair)
                dropped.append(pair[0])
                if pair[1] is not None:
                    self._return(pair[1])
        self.waiting -= len(dropped)
        if self._sample is not None and any(message is self._sample for message in dropped):
            self._sample = None
        return dropped


def has_tokens(message: type[Message] | None) -> bool:
    """Whether messages of this type carry token ids."""
    return message is not None and "tokens" in message.__struct_fields__


def _head(queue: deque[Message]) -> Head:
    tokens: Any = getattr(queue[0], "tokens", ())
    return Head(len(queue), 1, float(len(tokens)), queue[0])


def _purge(queue: deque[Message], gone: Callable[[Message], bool], dropped: list[Message]) -> None:
    if any(gone(message) for message in queue):
        kept = [message for message in queue if not gone(message)]
        dropped.extend(message for message in queue if gone(message))
        queue.clear()
        queue.extend(kept)
