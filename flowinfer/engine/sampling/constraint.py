"""What a grammar lets one sequence say: bits for the row of its last token and of each draft. Samples nothing."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from flowinfer.engine.grammar.after import AfterToken, all_but
from flowinfer.engine.grammar.base import Bits, Matcher
from flowinfer.message import Ids


class Constraint:
    """The matcher of one sequence, walked by its accepted tokens.

    ends: tokens that end a text. They may come where the grammar may end, and where nothing else may, they come
    whatever min_tokens says.
    """

    def __init__(
        self,
        matcher: Matcher,
        ends: Collection[int],
        output: Ids,
        after: int | None = None,
        opens: int | None = None,
    ) -> None:
        """after, opens: the token behind which the grammar begins, and the one that leads to it, as in Grammar."""
        self._matcher: Matcher = matcher if after is None else AfterToken(matcher, after, ends, opens)
        self._ends = frozenset(ends)
        self._not_ends: Bits | None = None
        self._broken = ""
        self.extend(output)

    @property
    def error(self) -> str:
        """Why the sequence can't go on; empty while it can."""
        return self._broken or self._matcher.error

    def extend(self, output: Ids) -> None:
        """Takes further tokens of the output."""
        for token in output.tolist():
            if token in self._ends:
                return  # the last token
            if not self._matcher.advance(token):
                self._broken = self._matcher.error or f"token {token} doesn't fit the grammar"
                return

    def with_drafts(self, drafts: Ids) -> list[Bits | None]:
        """The tokens allowed for the last token's row and each draft's, as if the drafts before it were taken.

        None for rows behind a draft that the grammar refuses, or that ends the text: they can't be reached.
        """
        rows: list[Bits | None] = [self._matcher.allowed()]
        if self.error:
            return [np.zeros_like(rows[0]), *[None] * drafts.size]
        for draft in drafts.tolist():
            if draft in self._ends or not self._matcher.advance(draft):
                break
            rows.append(self._matcher.allowed())
        self._matcher.rollback(len(rows) - 1)
        return rows + [None] * (drafts.size + 1 - len(rows))

    def behind(self, drafts: Ids) -> Bits | None:
        """The tokens allowed behind these drafts; None where the grammar refuses one of them, or one is an end."""
        tokens = drafts.tolist()
        if self.error or not self._ends.isdisjoint(tokens) or self._matcher.fitting(tokens) < len(tokens):
            return None
        for draft in tokens:
            self._matcher.advance(draft)
        allowed = self._matcher.allowed()
        self._matcher.rollback(len(tokens))
        return allowed

    def fitting(self, drafts: Ids) -> int:
        """How many of the drafts the grammar allows, one after the other."""
        return self._matcher.fitting(drafts.tolist())

    def may_go_on(self, allowed: Bits) -> bool:
        """Whether these bits hold a token that isn't an end."""
        if self._not_ends is None:
            self._not_ends = all_but(self._ends, allowed.size)
        return bool((allowed & self._not_ends).any())
