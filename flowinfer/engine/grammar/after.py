"""A grammar that begins behind reasoning, which ends with a token; while it lasts, all but an end may come."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from flowinfer.engine.grammar.base import Bits, Matcher


class AfterToken:
    """Matcher that sleeps until `token` comes, be it as a draft, and sleeps again if that is undone.

    opens: it sleeps only if this comes first, and wherever else binds from the first token.
    """

    def __init__(self, matcher: Matcher, token: int, ends: Collection[int], opens: int | None = None) -> None:
        self._matcher, self._token, self._ends, self._opens = matcher, token, frozenset(ends), opens
        self._anything: Bits | None = None
        self._trace: list[bool] = []  # of each token taken, whether the matcher took it
        self._asleep = opens is None

    def allowed(self) -> Bits:
        if not self._asleep:
            allowed = self._matcher.allowed()
            return _with(allowed, self._opens) if self._opens is not None and not self._trace else allowed
        if self._anything is None:
            self._anything = all_but(self._ends, self._matcher.allowed().size)
        return self._anything

    def advance(self, token: int) -> bool:
        if self._asleep:
            if token in self._ends:
                return False
            self._asleep = token != self._token
            self._trace.append(False)
            return True
        if token == self._opens and not self._trace:
            self._asleep = True
            self._trace.append(False)
            return True
        if taken := self._matcher.advance(token):
            self._trace.append(True)
        return taken

    def rollback(self, count: int) -> None:
        if count == 0:
            return
        undone = self._trace[-count:]
        del self._trace[-count:]
        matched = sum(undone)
        self._matcher.rollback(matched)
        if matched < count:  # those that woke it are among them
            self._asleep = bool(self._trace) or self._opens is None

    def fitting(self, tokens: Sequence[int]) -> int:
        taken = 0
        for token in tokens:
            if not self.advance(token):
                break
            taken += 1
        self.rollback(taken)
        return taken

    @property
    def error(self) -> str:
        return self._matcher.error


def _with(bits: Bits, token: int) -> Bits:
    """The set with one more token."""
    wider = bits.copy()
    wider[token >> 3] |= np.uint8(1 << (token & 7))
    return wider


def all_but(ids: Collection[int], num_bytes: int) -> Bits:
    """The set of all ids less these."""
    flags = np.ones(num_bytes * 8, np.bool_)
    flags[[index for index in ids if 0 <= index < flags.size]] = False
    return np.packbits(flags, bitorder="little")
