"""Text of one sequence while its tokens come in: whole characters only, and nothing that may still be a stop string.

Holds back the longest end of the text that begins a stop string, no more. What is found doesn't depend on how the text
is cut into tokens: the stop that is completed first counts, and of those completed by one character the longest.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

_decoder_of = codecs.getincrementaldecoder("utf-8")


class Glyphs:
    """Each token's bytes, and its text where the bytes are whole characters. Shared by all streams of a model.

    hidden ids give nothing. opening_strip: leading spaces to take off a text's first token, -1 for all.
    """

    def __init__(
        self, token_bytes: Sequence[bytes], hidden: frozenset[int] = frozenset(), opening_strip: int = 0
    ) -> None:
        self.data = [b"" if index in hidden else data for index, data in enumerate(token_bytes)]
        self.text = [_whole(data) for data in self.data]
        self.opening_strip = opening_strip

    def bytes_of(self, token: int) -> bytes:
        """The token's bytes; none for an id beyond the table, which padded vocabularies have."""
        return self.data[token] if 0 <= token < len(self.data) else b""

    def text_of(self, token: int) -> str | None:
        """The token's text, None if its bytes are no whole characters."""
        return self.text[token] if 0 <= token < len(self.text) else ""


def _whole(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def strip_opening(data: bytes, count: int) -> bytes:
    """Takes `count` leading spaces (-1: all) off the first bytes of a text."""
    return data.lstrip(b" ") if count < 0 else data.removeprefix(b" " * count)


class ByteStream:
    """Characters out of tokens' bytes. A byte that can't become one turns into U+FFFD once that is certain."""

    __slots__ = ("_decoder", "_glyphs", "_opening")

    def __init__(self, glyphs: Glyphs) -> None:
        self._glyphs = glyphs
        self._decoder: codecs.IncrementalDecoder | None = None  # present while a character is half there
        self._opening = glyphs.opening_strip != 0

    def push(self, token: int) -> str:
        """The characters that this token completes."""
        if self._decoder is None and not self._opening:
            text = self._glyphs.text_of(token)
            if text is not None:
                return text
        return self._decode(self._bytes(token))

    def flush(self) -> str:
        """What is left when no token will follow: U+FFFD for half a character."""
        decoder, self._decoder = self._decoder, None
        return decoder.decode(b"", True) if decoder else ""

    def _bytes(self, token: int) -> bytes:
        data = self._glyphs.bytes_of(token)
        if self._opening and data:
            self._opening = False
            return strip_opening(data, self._glyphs.opening_strip)
        return data

    def _decode(self, data: bytes) -> str:
        decoder = self._decoder or _decoder_of("replace")
        text = decoder.decode(data)
        self._decoder = decoder if decoder.getstate()[0] else None
        return text


class Match(NamedTuple):
    """A stop string that was completed; `text` is what comes before it and wasn't given out yet."""

    text: str
    stop: str


class StopScanner:
    """Watches text for stop strings and holds back what may become one."""

    __slots__ = ("_firsts", "_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._firsts = {stop[0] for stop in self._stops}
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> str | Match:
        """Text that is free to go, or the match. Stops completed while not armed are let through."""
        if not self._held and not any(first in text for first in self._firsts):
            return text  # the usual case: nothing of a stop in sight
        buffer = self._held + text
        match = self._find(buffer, len(self._held)) if armed else None
        if match is not None:
            return match
        keep = self._open_end(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """What was held back, when no text will follow."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str, seen: int) -> Match | None:
        """The stop that ends first behind the `seen` characters that were searched before."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return None if best is None else Match(buffer[: best[1]], buffer[best[1] : best[0]])

    def _open_end(self, buffer: str) -> int:
        """Length of the longest end of buffer that begins a stop string."""
        longest = 0
        for stop in self._stops:
            start = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while start >= 0:
                if stop.startswith(buffer[start:]):
                    longest = max(longest, len(buffer) - start)
                    break
                start = buffer.find(stop[0], start + 1)
        return longest
