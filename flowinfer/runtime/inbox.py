"""The receiving half of an edge: messages that wait for a stage, and the credit that they took from other workers.

Credit comes back when a message was passed to `step`; on a held port, when the stage gives it back. Knows no sockets.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flowinfer.message import Credit, Message
from flowinfer.runtime.waits import Waits

# Small amounts wait this long for more, so that a slow edge pays for one event and not for each message.
BACK_AFTER_S = 0.01


@dataclass(slots=True, eq=False)
class Account:
    """The credit of one producer instance on one lane of an edge. used: taken and not settled; due: on its way back."""

    edge: str
    producer: str
    lane: str
    half: float  # of its share: so much goes back at once
    used: int = 0
    due: int = 0
    num_received: int = 0  # messages
    ids: list[str] = field(default_factory=list)


class Debt(NamedTuple):
    """Credit that messages here have taken."""

    account: Account
    amount: int
    ids: tuple[str, ...] = ()


def ids_of(messages: Sequence[Any]) -> tuple[str, ...]:
    """Ids of messages of one type, if they have any."""
    return tuple(message.id for message in messages) if hasattr(messages[0], "id") else ()


class Inbox:
    """Messages of one parameter of `step`."""

    __slots__ = ("debts", "has_tokens", "held", "messages", "num_taken", "num_tokens", "probes", "waits")

    def __init__(self, *, has_tokens: bool = False) -> None:
        self.messages: list[Message] = []  # stays the same object: edges inside the worker append to it directly
        self.debts: list[Debt] = []
        self.held: dict[tuple[str, str], Debt] = {}  # by port and request
        self.num_taken = 0
        self.has_tokens = has_tokens
        self.num_tokens = 0  # in messages that were taken
        self.waits = Waits()
        self.probes: list[float] = []  # when messages that wait here were made, by the clock; a sample

    def take(self) -> tuple[list[Message], list[Debt]]:
        """All messages, with the debts that are settled by passing them on."""
        messages, debts = self.messages[:], self.debts
        if messages:
            self.messages.clear()
            self.num_taken += len(messages)
            if self.has_tokens:
                for message in messages:  # 17 ns each; sum() and map() take longer
                    self.num_tokens += len(message.tokens)  # type: ignore[attr-defined]
        if debts:
            self.debts = []
        return messages, debts

    def receive(self, messages: Sequence[Message], account: Account, cost: int, held_port: str = "") -> None:
        """Takes messages of one frame, each of which took `cost` of the account."""
        self.messages.extend(messages)
        ids = ids_of(messages)
        amount = cost * len(messages)
        account.used += amount
        if held_port and ids:
            self.held.update(((held_port, request), Debt(account, cost, (request,))) for request in ids)
        else:
            self.debts.append(Debt(account, amount, ids))

    def cancel(self, requests: Collection[str]) -> tuple[list[Message], list[Debt]]:
        """Takes out the messages of these requests, with the debts that nobody else will settle."""
        dropped = [m for m in self.messages if getattr(m, "id", None) in requests]
        if not dropped:
            return [], []
        gone = set(ids_of(dropped))
        self.messages[:] = [m for m in self.messages if getattr(m, "id", None) not in gone]
        settled = [self.held.pop(key) for key in list(self.held) if key[1] in gone]
        if not self.messages:
            settled += self.debts
            self.debts = []
        return dropped, settled


class Grants:
    """What this worker has granted to producers, what they have used, and what is due to go back to them."""

    def __init__(self) -> None:
        self._accounts: dict[tuple[str, str, str], Account] = {}  # by edge, producer, lane
        self._shares: dict[str, int] = {}  # by edge
        self._due: list[Account] = []
        self.next_at = math.inf  # when `collect` has something; a plain number, since the loop asks every turn

    def share(self, edge: str, amount: int) -> None:
        """Sets what each producer instance of an edge may have in hand, for each lane."""
        self._shares[edge] = max(1, amount)
        for account in self._accounts.values():
            if account.edge == edge:
                account.half = self._shares[edge] / 2

    def share_of(self, edge: str) -> int:
        return self._shares[edge]

    def account(self, edge: str, producer: str, lane: str) -> Account:
        """The account of a producer, made on first use."""
        key = (edge, producer, lane)
        found = self._accounts.get(key)
        if found is None:
            found = self._accounts[key] = Account(edge, producer, lane, self._shares[edge] / 2)
        return found

    def opening(self, edge: str, producer: str, lanes: Sequence[str]) -> list[Credit]:
        """The grants for a producer that connects: its share less what its predecessor's messages still take."""
        share = self._shares[edge]
        return [Credit(edge=edge, lane=x, amount=share - self.account(edge, producer, x).used) for x in lanes]

    def settle(self, debt: Debt, now: float) -> None:
        """This debt goes back: at once when much is due, else soon."""
        account = debt.account
        account.used -= debt.amount
        if not account.due:
            self._due.append(account)
            self.next_at = min(self.next_at, now + BACK_AFTER_S)
        account.due += debt.amount
        if debt.ids:
            account.ids.extend(debt.ids)
        if account.due >= account.half:
            self.next_at = now

    def hurry(self) -> None:
        """What is due goes back at the end of this turn."""
        self.next_at = -math.inf

    def collect(self, now: float) -> list[tuple[str, Credit]]:
        """Credit events to send now, by producer: all that is due, once some of it is old or half of a share."""
        if now < self.next_at:
            return []
        self.next_at = math.inf
        due, self._due = self._due, []
        return [(account.producer, _credit(account)) for account in due if account.due]

    def counts(self) -> list[tuple[str, str, int, int]]:
        """Of each edge and producer: messages that came, and credit that they still take."""
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for account in self._accounts.values():
            key = account.edge, account.producer
            received, used = found.get(key, (0, 0))
            found[key] = received + account.num_received, used + account.used
        return [(edge, producer, *numbers) for (edge, producer), numbers in found.items()]

    def forget(self, producer: str) -> None:
        """A producer died: what is due to it needn't be sent; `opening` counts anew."""
        for account in self._accounts.values():
            if account.producer == producer:
                account.due, account.ids, account.num_received = 0, [], 0
        self._due = [account for account in self._due if account.due]


def _credit(account: Account) -> Credit:
    credit = Credit(edge=account.edge, lane=account.lane, amount=account.due, ids=account.ids)
    account.due, account.ids = 0, []
    return credit
