"""The receiving half of an edge: messages that wait for a stage, and the credit that they took from other workers.

Credit comes back when a message was passed to `step`; on a held port, when the stage gives it back. Knows no sockets.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flowinfer.message import Credit, Message

BACK_AFTER_S = (
    0.01  # small amounts wait this long for more, so that a slow edge pays for one event and not for each message
)


class Debt(NamedTuple):
    """Credit that messages here have taken from a producer instance."""

    edge: str
    producer: str
    lane: str
    amount: int
    ids: tuple[str, ...] = ()


def ids_of(messages: Sequence[Any]) -> tuple[str, ...]:
    """Ids of messages of one type, if they have any."""
    return tuple(message.id for message in messages) if hasattr(messages[0], "id") else ()


class Inbox:
    """Messages of one parameter of `step`."""

    __slots__ = ("debts", "held", "messages", "num_taken")

    def __init__(self) -> None:
        self.messages: list[Message] = []  # stays the same object: edges inside the worker append to it directly
        self.debts: list[Debt] = []
        self.held: dict[tuple[str, str], Debt] = {}  # by port and request
        self.num_taken = 0

    def take(self) -> tuple[list[Message], list[Debt]]:
        """All messages, with the debts that are settled by passing them on."""
        messages, debts = self.messages[:], self.debts
        self.messages.clear()
        self.debts = []
        self.num_taken += len(messages)
        return messages, debts

    def receive(self, messages: Sequence[Message], debt: Debt, held_port: str = "") -> None:
        """Takes messages of one frame; debt is what each of them costs."""
        self.messages.extend(messages)
        ids = ids_of(messages)
        if held_port and ids:
            self.held.update(((held_port, request), debt._replace(ids=(request,))) for request in ids)
        else:
            self.debts.append(debt._replace(amount=debt.amount * len(messages), ids=ids))

    def cancel(self, requests: Collection[str]) -> tuple[list[Message], list[Debt]]:
        """Takes out the messages of these requests, with the debts that nobody else will settle."""
        dropped = [m for m in self.messages if getattr(m, "id", None) in requests]
        if not dropped:
            return [], []
        gone = {m.id for m in dropped}  # type: ignore[attr-defined]
        self.messages[:] = [m for m in self.messages if getattr(m, "id", None) not in gone]
        settled = [self.held.pop(key) for key in list(self.held) if key[1] in gone]
        if not self.messages:
            settled += self.debts
            self.debts = []
        return dropped, settled


@dataclass(slots=True)
class _Due:
    amount: int = 0
    ids: list[str] = field(default_factory=list)
    since: float = 0.0


class Grants:
    """What this worker has granted to producers, what they have used, and what is due to go back to them."""

    def __init__(self) -> None:
        self._used: dict[tuple[str, str, str], int] = {}  # edge, producer, lane -> credit taken and not given back
        self._shares: dict[str, int] = {}  # by edge
        self._due: dict[tuple[str, str, str], _Due] = {}
        self.next_at = math.inf  # when `collect` has something; a plain number, since the loop asks every turn

    def share(self, edge: str, amount: int) -> None:
        """Sets what each producer instance of an edge may have in hand, for each lane."""
        self._shares[edge] = max(1, amount)

    def share_of(self, edge: str) -> int:
        return self._shares[edge]

    def opening(self, edge: str, producer: str, lanes: Sequence[str]) -> list[Credit]:
        """The grants for a producer that connects: its share less what its predecessor's messages still take."""
        share = self._shares[edge]
        for lane in lanes:
            self._due.pop((edge, producer, lane), None)
        return [
            Credit(edge=edge, lane=lane, amount=share - self._used.get((edge, producer, lane), 0)) for lane in lanes
        ]

    def use(self, debt: Debt, messages: int) -> None:
        key = debt[:3]
        self._used[key] = self._used.get(key, 0) + debt.amount * messages

    def settle(self, debt: Debt, now: float) -> None:
        """This debt goes back, soon."""
        key = debt[:3]
        self._used[key] = self._used.get(key, 0) - debt.amount
        due = self._due.get(key)
        if due is None:
            due = self._due[key] = _Due(since=now)
            self.next_at = min(self.next_at, now + BACK_AFTER_S)
        due.amount += debt.amount
        due.ids.extend(debt.ids)
        if 2 * due.amount >= self._shares.get(debt.edge, 1):
            self.next_at = now

    def hurry(self) -> None:
        """What is due goes back at the end of this turn."""
        self.next_at = -math.inf

    def collect(self, now: float) -> list[tuple[str, Credit]]:
        """Credit events to send now, by producer: all that is due, once some of it is old or half of a share."""
        if now < self.next_at:
            return []
        self.next_at = math.inf
        return [(key[1], self._credit(key)) for key in list(self._due)]

    def _credit(self, key: tuple[str, str, str]) -> Credit:
        due = self._due.pop(key)
        return Credit(edge=key[0], lane=key[2], amount=due.amount, ids=due.ids)

    def forget(self, producer: str) -> None:
        """A producer died: what is due to it needn't be sent; `opening` counts anew."""
        for key in [key for key in self._due if key[1] == producer]:
            del self._due[key]
