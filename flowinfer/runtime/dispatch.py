"""Who gets the next message of an edge: pure choices over lanes, credit and what is outstanding. Sends nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from flowinfer.graph.plan import EdgePlan
from flowinfer.message import Message


class Head(NamedTuple):
    """A lane that has something to send: messages waiting, and the credit that the first of them costs."""

    waiting: int
    cost: int = 1
    work: float = 0.0  # size of the first message in tokens, for policies that weigh lanes
    message: Message | None = None  # the first one itself


@dataclass(slots=True)
class Consumer:
    """One consumer instance as its producer sees it.

    sent: requests on their way to it, whose credit isn't back, and the work that the policy expects of each.
    """

    name: str
    generation: int
    connected: bool = False
    leaving: bool = False  # gets what is bound to it, and nothing else
    credit: dict[str, int] = field(default_factory=dict)  # by lane
    sent: dict[str, float] = field(default_factory=dict)
    outstanding: int = 0  # credit that it hasn't given back
    num_sent: int = 0  # messages

    @property
    def is_open(self) -> bool:
        return self.connected and not self.leaving

    def takes(self, lane: str, cost: int) -> bool:
        return self.credit.get(lane, 0) >= cost


class Dispatch(Protocol):
    """Chooses the next lane to serve and the instance that gets its first message; None: wait for credit."""

    def choose(self, heads: Mapping[str, Head], consumers: Sequence[Consumer]) -> tuple[str, Consumer] | None: ...

    def weigh(self, message: Message, consumer: Consumer) -> float:
        """Work that this message is to this consumer, for the policy's own use; 0 where it doesn't ask."""


class Pull:
    """The instance with the least outstanding gets the next message: who is free pulls."""

    def choose(self, heads: Mapping[str, Head], consumers: Sequence[Consumer]) -> tuple[str, Consumer] | None:
        for lane, head in heads.items():
            able = [c for c in consumers if c.takes(lane, head.cost)]
            if able:
                return lane, min(able, key=lambda c: (c.outstanding, -c.credit[lane]))
        return None

    def weigh(self, message: Message, consumer: Consumer) -> float:
        return 0.0


class Buckets:
    """The bucket-route stage's own policy: shares of instances by lane, deficit round-robin, stealing by the idle."""

    def __init__(self, lanes: Sequence[str]) -> None:
        from flowinfer.stages.bucket_route.policy import BucketDispatch

        self._policy = BucketDispatch(tuple(lanes), ())
        self._names: set[str] = set()

    def choose(self, heads: Mapping[str, Head], consumers: Sequence[Consumer]) -> tuple[str, Consumer] | None:
        by_name = {consumer.name: consumer for consumer in consumers}
        if by_name.keys() != self._names:
            self._names = set(by_name)
            self._policy.resize(self._names)
        waiting = {lane: predicted_ms(head.work) for lane, head in heads.items()}
        idle = {consumer.name for consumer in consumers if not consumer.outstanding}
        ready, idle = self._offers(heads, consumers, idle)
        chosen = self._policy.choose(waiting, ready, idle)
        return None if chosen is None else (chosen[1], by_name[str(chosen[0])])

    def _offers(
        self, heads: Mapping[str, Head], consumers: Sequence[Consumer], idle: set[str]
    ) -> tuple[set[tuple[str, str]], set[str]]:
        """Pairs of instance and lane that may be served now, and the instances that may serve any lane."""
        return {(c.name, lane) for c in consumers for lane, head in heads.items() if c.takes(lane, head.cost)}, idle

    def weigh(self, message: Message, consumer: Consumer) -> float:
        return 0.0


class Prefix:
    """The instance that holds the prompt's prefix gets it, unless its queue is longer than what that saves.

    Works on the facet `prefix` (flowinfer.stages.cache_lookup.placement); first come, first served.
    """

    def choose(self, heads: Mapping[str, Head], consumers: Sequence[Consumer]) -> tuple[str, Consumer] | None:
        from flowinfer.stages.cache_lookup.placement import place

        for lane, head in heads.items():
            able = {c.name: c for c in consumers if c.takes(lane, head.cost)}
            if able:
                assert head.message is not None, "an outbox shows the message"
                holder, cached, key = _prefix_of(head.message)
                queues = {name: sum(consumer.sent.values()) for name, consumer in able.items()}
                return lane, able[place(queues, holder, predicted_ms(cached), key)]
        return None

    def weigh(self, message: Message, consumer: Consumer) -> float:
        holder, cached, _ = _prefix_of(message)
        tokens = float(len(getattr(message, "tokens", ())))
        return predicted_ms(tokens) - (predicted_ms(cached) if holder == consumer.name else 0.0)


class BucketPrefix(Buckets):
    """Lanes as with buckets; within the share of a lane, and among the idle, who holds the prompt's prefix gets it.

    A holder outside of that gets it too if what is left to compute fits into one step, which holds nobody up for long.
    """

    def _offers(
        self, heads: Mapping[str, Head], consumers: Sequence[Consumer], idle: set[str]
    ) -> tuple[set[tuple[str, str]], set[str]]:
        from flowinfer.stages.bucket_route.policy import QUANTUM_MS
        from flowinfer.stages.cache_lookup.placement import place

        offers: set[tuple[str, str]] = set()
        guests: set[str] = set()
        for lane, head in heads.items():
            assert head.message is not None, "an outbox shows the message"
            holder, cached, key = _prefix_of(head.message)
            saved = predicted_ms(cached)
            fits = predicted_ms(head.work) - saved <= QUANTUM_MS
            able = [consumer for consumer in consumers if consumer.takes(lane, head.cost)]
            queues = {
                c.name: sum(c.sent.values())
                for c in able
                if c.name in idle or lane in self._policy.home(c.name) or (c.name == holder and fits)
            }
            if queues:
                chosen = place(queues, holder, saved, key)
                offers.add((chosen, lane))
                if lane not in self._policy.home(chosen):
                    guests.add(chosen)
        return offers, guests

    def weigh(self, message: Message, consumer: Consumer) -> float:
        return Prefix().weigh(message, consumer)


def _prefix_of(message: Message) -> tuple[str, float, bytes]:
    """Who holds the start of a prompt, how many tokens of it, and a name for that start."""
    from flowinfer.stages.cache_lookup.placement import leading_run

    prefix, tokens = getattr(message, "prefix", None), len(getattr(message, "tokens", ()))
    if prefix is None or not prefix.hashes:
        return "", 0.0, str(getattr(message, "id", "")).encode()
    holder, run = leading_run(prefix.owners)
    return holder, tokens * run / len(prefix.hashes), prefix.hashes[0]


def predicted_ms(tokens: float) -> float:
    """Milliseconds of a prompt, up to a factor: lanes are only weighed against each other.

    Linear in tokens with a quadratic part that equals it at 8,192 tokens, where attention overtakes the rest of a small
    dense model.
    """
    return 0.1 * tokens * (1.0 + tokens / 8_192)


def rendezvous(key: str, names: Sequence[str]) -> str:
    """The name with the highest score for key: stable as names come and go (Thaler and Ravishankar, 1998)."""
    return max(names, key=lambda name: hashlib.blake2b(f"{key}\0{name}".encode(), digest_size=8).digest())


def make_dispatch(edge: EdgePlan) -> Dispatch:
    """The policy of an edge. With `hash` each message is bound to its instance before, so that Pull only meets one."""
    match edge.dispatch:
        case "prefix":
            return Prefix()
        case "bucket":
            return Buckets(edge.lanes)
        case "bucket+prefix":
            return BucketPrefix(edge.lanes)
    return Pull()
