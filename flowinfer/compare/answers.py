"""Whether two sides answered the same, and where they part. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from flowinfer.compare.arms import Answer
from flowinfer.compare.rounds import Group


class Difference(msgspec.Struct):
    """Two answers to one request that differ. at: the first token (or character, where only text is known) to differ.

    shared: length in characters of what both texts begin with.
    """

    request: str
    round: int
    at: int
    unit: Literal["token", "character"]
    shared: int
    a: str
    b: str


class Answers(msgspec.Struct):
    """All pairs of answers: how many there are, which differ, which requests failed on each side."""

    num_pairs: int
    differences: list[Difference]
    failed_a: list[str]
    failed_b: list[str]

    @property
    def same(self) -> bool:
        """True when all pairs agree and nothing failed on one side only."""
        return not self.differences and len(self.failed_a) == len(self.failed_b)


def compare_answers(groups: Sequence[Group]) -> Answers:
    """Pairs in the order in which they ran; a failed one is in failed_a or failed_b and differs from nothing."""
    found = Answers(0, [], [], [])
    for group in groups:
        for ask, a, b in zip(group.asks, group.a, group.b, strict=True):
            found.num_pairs += 1
            found.failed_a += [f"{ask.name}: {a.error}"] if a.error else []
            found.failed_b += [f"{ask.name}: {b.error}"] if b.error else []
            if not a.error and not b.error and (a.text, a.tokens) != (b.text, b.tokens):
                found.differences.append(_difference(ask.name, group.round, a, b))
    return found


def _difference(request: str, number: int, a: Answer, b: Answer) -> Difference:
    by_token = bool(a.tokens and b.tokens)
    at = _common(a.tokens, b.tokens) if by_token else _common(a.text, b.text)
    unit: Literal["token", "character"] = "token" if by_token else "character"
    return Difference(request, number, at, unit, _common(a.text, b.text), a.text, b.text)


def _common(a: Sequence[object], b: Sequence[object]) -> int:
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return min(len(a), len(b))
