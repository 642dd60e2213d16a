"""The small tools of a parser that reads text as it comes: find a marker, follow a JSON value to its end."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

_STRUCTURE = re.compile(r'["\\{}\[\]]')


class Found(NamedTuple):
    """`text` is free to go; `marker` was found behind it (None: not yet), `rest` follows, or may become a marker."""

    text: str
    marker: str | None
    rest: str


def find_marker(buffer: str, markers: Sequence[str]) -> Found:
    """The marker that begins first, of several at one place the longest. No marker may begin another."""
    for marker in markers:
        if marker[0] in buffer:
            break
    else:
        return Found(buffer, None, "")  # the usual case
    best: tuple[int, int] | None = None
    for marker in markers:
        start = buffer.find(marker)
        if start >= 0 and (best is None or (start, -len(marker)) < best):
            best = (start, -len(marker))
    if best is not None:
        end = best[0] - best[1]
        return Found(buffer[: best[0]], buffer[best[0] : end], buffer[end:])
    keep = open_end(buffer, markers)
    return Found(buffer[: len(buffer) - keep], None, buffer[len(buffer) - keep :])


def open_end(buffer: str, markers: Sequence[str]) -> int:
    """Length of the longest end of buffer that begins one of the markers."""
    longest = 0
    for marker in markers:
        start = buffer.find(marker[0], max(0, len(buffer) - len(marker) + 1))
        while start >= 0:
            if marker.startswith(buffer[start:]):
                longest = max(longest, len(buffer) - start)
                break
            start = buffer.find(marker[0], start + 1)
    return longest


class JsonScan:
    """Follows one JSON object or array, given piece by piece, to its closing bracket. Doesn't check it."""

    __slots__ = ("_depth", "_escaped", "_quoted")

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def end(self, text: str, start: int = 0) -> int:
        """Place behind the closing bracket, -1 if it isn't in text[start:]. The next call goes on where this ended."""
        at = start
        if self._escaped and at < len(text):
            self._escaped = False
            at += 1
        while (match := _STRUCTURE.search(text, at)) is not None:
            at = match.end()
            char = match[0]
            if char == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if char in "{[" else -1 if char in "}]" else 0
                if self._depth <= 0 and char in "}]":
                    return at
            elif char == "\\":
                self._escaped = at == len(text)
                at += 1
        return -1


def quoted(text: str) -> str:
    """Text as the inside of a JSON string; pieces join to the whole's."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
