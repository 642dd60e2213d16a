"""A grammar that begins behind a token, as behind the end of reasoning; before it, all but an end may come."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from flowinfer.engine.grammar.base import Bits, Matcher


class AfterToken:
    """Matcher that sleeps until `token` comes, be it as a draft, and sleeps again if that is undone."""

    def __init__(self, matcher: Matcher, token: int, ends: Collection[int]) -> None:
        self._matcher, self._token, self._ends = matcher, token, frozenset(ends)
        self._anything = all_but(ends, matcher.allowed().size)
        self._awake = False
        self._num_matched = 0  # tokens that the grammar has taken

    def allowed(self) -> Bits:
        return self._matcher.allowed() if self._awake else self._anything

    def advance(self, token: int) -> bool:
        if self._awake:
            taken = self._matcher.advance(token)
            self._num_matched += taken
            return taken
        if token in self._ends:
            return False
        self._awake = token == self._token
        return True

    def rollback(self, count: int) -> None:
        matched = min(count, self._num_matched)
        self._matcher.rollback(matched)
        self._num_matched -= matched
        if count > matched:
            self._awake = False

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


def all_but(ids: Collection[int], num_bytes: int) -> Bits:
    """The set of all ids less these."""
    flags = np.ones(num_bytes * 8, np.bool_)
    flags[[index for index in ids if 0 <= index < flags.size]] = False
    return np.packbits(flags, bitorder="little")
