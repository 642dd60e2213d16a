"""Who gets the next message of an edge: pure choices over lanes, credit and what is outstanding. Sends nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from flowinfer.graph.plan import EdgePlan


class Head(NamedTuple):
    """A lane that has something to send: messages waiting, and the credit that the first of them costs."""

    waiting: int
    cost: int = 1
    work: float = 0.0  # size of the first message in tokens, for policies that weigh lanes


@dataclass(slots=True)
class Consumer:
    """One consumer instance as its producer sees it. sent: requests on their way to it, whose credit isn't back."""

    name: str
    generation: int
    connected: bool = False
    credit: dict[str, int] = field(default_factory=dict)  # by lane
    sent: dict[str, None] = field(default_factory=dict)
    outstanding: int = 0  # credit that it hasn't given back

    def takes(self, lane: str, cost: int) -> bool:
        return self.credit.get(lane, 0) >= cost


class Dispatch(Protocol):
    """Chooses the next lane to serve and the instance that gets its first message; None: wait for credit."""

    def choose(self, heads: Mapping[str, Head], consumers: Sequence[Consumer]) -> tuple[str, Consumer] | None: ...


class Pull:
    """The instance with the least outstanding gets the next message: who is free pulls."""

    def choose(self, heads: Mapping[str, Head], consumers: Sequence[Consumer]) -> tuple[str, Consumer] | None:
        for lane, head in heads.items():
            able = [c for c in consumers if c.takes(lane, head.cost)]
            if able:
                return lane, min(able, key=lambda c: (c.outstanding, -c.credit[lane]))
        return None


class HomeLanes:
    """Each lane has home instances, and an instance without work at home takes from the longest other lane."""

    def __init__(self, lanes: Sequence[str]) -> None:
        self._lanes = tuple(lanes)

    def choose(self, heads: Mapping[str, Head], consumers: Sequence[Consumer]) -> tuple[str, Consumer] | None:
        by_name = sorted(consumers, key=lambda c: c.name)
        for place, consumer in sorted(enumerate(by_name), key=lambda pair: pair[1].outstanding):
            home = self._homes(place, len(by_name))
            able = [lane for lane, head in heads.items() if consumer.takes(lane, head.cost)]
            if able:
                return max(able, key=lambda lane: (lane in home, heads[lane].waiting)), consumer
        return None

    def _homes(self, place: int, instances: int) -> frozenset[str]:
        if instances >= len(self._lanes):
            return frozenset({self._lanes[place % len(self._lanes)]})
        return frozenset(self._lanes[place::instances])


def rendezvous(key: str, names: Sequence[str]) -> str:
    """The name with the highest score for key: stable as names come and go (Thaler and Ravishankar, 1998)."""
    return max(names, key=lambda name: hashlib.blake2b(f"{key}\0{name}".encode(), digest_size=8).digest())


def make_dispatch(edge: EdgePlan) -> Dispatch:
    """The policy of an edge. With `hash` each message is bound to its instance before, so that Pull only meets one."""
    return HomeLanes(edge.lanes) if edge.dispatch == "bucket" else Pull()
