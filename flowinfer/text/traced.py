"""A string that remembers which of its characters a chat template's author wrote. Knows nothing of Jinja or tokens.

Everything is plain text unless it is known to be the author's: an operation that isn't listed here gives a plain `str`,
whose characters all count as plain. So what is forgotten can cost a marker, but can never turn user text into one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, SupportsIndex, cast

Span = tuple[int, int]
_PERCENT = re.compile(r"%(?:s|%|(.))", re.DOTALL)


class Segment(NamedTuple):
    """A stretch of a rendered prompt: control is the template's own, plain a user's or of unknown origin."""

    control: bool
    text: str


class Traced(str):
    """A string whose `spans` [start, end) of characters are the template author's. Built without spans, it has none."""

    __slots__ = ("spans",)
    spans: tuple[Span, ...]

    def __new__(cls, text: object = "", spans: Iterable[Span] = ()) -> Traced:
        self = super().__new__(cls, text)
        self.spans = tuple(spans)
        return self

    @classmethod
    def author(cls, text: str) -> Traced:
        """`text` as the template's author wrote it."""
        return cls(text, ((0, len(text)),) if text else ())

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:  # as a list of strings is shown in a prompt: without a trace of tracing
        return repr(str.__str__(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return (str, (str.__str__(self),))

    def __add__(self, other: str) -> str:
        return join_traced((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return join_traced((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        return join_traced([self] * times.__index__())

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        conversions = [match[1] for match in _PERCENT.finditer(self)]
        if any(conversions) or isinstance(values, dict):
            return str.__mod__(self, values)
        given = values if isinstance(values, tuple) else (values,)
        if len(given) != sum(match[0] == "%s" for match in _PERCENT.finditer(self)):
            return str.__mod__(self, values)  # raises what Python raises
        return self.fill(_PERCENT, given)

    def fill(self, slot: re.Pattern[str], values: Sequence[Any]) -> str:
        """The string with a value in each slot; what matches as a doubled character stands for that character."""
        parts: list[str] = []
        at, rest = 0, iter(values)
        for match in slot.finditer(self):
            literal = match[0] in ("%%", "{{", "}}")
            parts += [self.cut(at, match.start()), match[0][1:] if literal else str(next(rest))]
            at = match.end()
        return join_traced([*parts, self.cut(at, len(self))])

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if not isinstance(key, slice):
            index = range(len(self))[key]
            return self.cut(index, index + 1)
        start, end, stride = key.indices(len(self))
        return self.cut(start, max(start, end)) if stride == 1 else super().__getitem__(key)

    def cut(self, start: int, end: int) -> Traced:
        """Characters start to end (both within the string), with their spans."""
        spans = ((max(s, start) - start, min(e, end) - start) for s, e in self.spans if s < end and e > start)
        return Traced(super().__getitem__(slice(start, end)), spans)

    def is_control(self, start: int, end: int) -> bool:
        """True if one span covers all of start to end."""
        return any(s <= start and end <= e for s, e in self.spans)

    def strip(self, chars: str | None = None, /) -> str:
        start = len(self) - len(str.lstrip(self, chars))
        return self.cut(start, start + len(str.strip(self, chars)))

    def lstrip(self, chars: str | None = None, /) -> str:
        return self.cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self.cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> str:
        return self.cut(len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> str:
        return self.cut(0, len(str.removesuffix(self, suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._locate(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._locate(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return cast(tuple[str, str, str], tuple(self._locate(str.partition(self, sep), 0)))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return cast(tuple[str, str, str], tuple(self._locate(str.rpartition(self, sep), 0)))

    def _locate(self, pieces: Sequence[str], gap: int) -> list[str]:
        found: list[str] = []
        at = 0
        for piece in pieces:  # in order of the text, so the next occurrence is the piece itself
            at = self.index(piece, at)
            found.append(self.cut(at, at + len(piece)))
            at += len(piece) + gap
        return found

    def upper(self) -> str:
        return self._recase(str.upper(self))

    def lower(self) -> str:
        return self._recase(str.lower(self))

    def capitalize(self) -> str:
        return self._recase(str.capitalize(self))

    def _recase(self, text: str) -> str:
        return Traced(text, self.spans) if len(text) == len(self) else text  # ß grows: positions no longer fit

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        """As str.replace; what replaces plain text is plain too, so that user text can't ask for a marker."""
        limit = count.__index__()
        if not old:
            return str.replace(self, old, new, limit)
        parts: list[str] = []
        at = 0
        while limit != 0 and (hit := self.find(old, at)) >= 0:
            end = hit + len(old)
            parts += [self.cut(at, hit), new if self.is_control(hit, end) else str.__str__(new)]
            at, limit = end, limit - 1
        return join_traced([*parts, self.cut(at, len(self))])

    def join(self, items: Iterable[str], /) -> str:
        parts: list[str] = []
        for item in items:
            parts += [self, item]
        return join_traced(parts[1:])

    def segments(self) -> list[Segment]:
        """The string as alternating control and plain segments, none empty, of exact `str`."""
        found: list[Segment] = []
        at = 0
        text = str.__str__(self)
        for start, end in self.spans:
            found += [Segment(False, text[at:start]), Segment(True, text[start:end])]
            at = end
        return [segment for segment in [*found, Segment(False, text[at:])] if segment.text]


def join_traced(parts: Iterable[str]) -> str:
    """The parts in one string, each keeping its spans; spans that touch become one."""
    parts = list(parts)
    text = "".join(parts)
    spans: list[Span] = []
    at = 0
    for part in parts:
        if isinstance(part, Traced):
            for start, end in part.spans:
                _append(spans, at + start, at + end)
        at += len(part)
    return Traced(text, spans) if spans else text


def _append(spans: list[Span], start: int, end: int) -> None:
    if spans and spans[-1][1] == start:
        spans[-1] = (spans[-1][0], end)
    elif end > start:
        spans.append((start, end))


def segments_of(text: str) -> list[Segment]:
    """Segments of a traced string; all of any other string is plain."""
    if isinstance(text, Traced):
        return text.segments()
    return [Segment(False, text)] if text else []
