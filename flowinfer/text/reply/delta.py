"""What a parser found in the text that it was given, by kind; and what all parsers have in common."""

from __future__ import annotations

import hashlib
import string
from typing import Protocol

from flowinfer.message import CallPart

_LETTERS = string.digits + string.ascii_letters
_SHORT = 9  # characters: Mistral's templates refuse ids of any other length


class ReplyParser(Protocol):
    """Takes an answer's text as it comes. What it finds doesn't depend on how the text is cut."""

    delta: Delta

    @property
    def in_reasoning(self) -> bool:
        """True while text that comes belongs to reasoning, as far as is known."""

    def push(self, text: str) -> None:
        """Reads on; what is certain is added to delta."""

    def finish(self) -> None:
        """No text will follow: what was held back is added to delta."""


class Delta:
    """New reasoning, text and calls since the last `clear`. Numbers the calls and gives them ids."""

    def __init__(self, call_prefix: str, *, short_ids: bool = False) -> None:
        self.reasoning: list[str] = []
        self.text: list[str] = []
        self.calls: list[CallPart] = []
        self.num_calls = 0
        self._prefix = call_prefix
        self._short = short_ids

    def clear(self) -> None:
        self.reasoning, self.text, self.calls = [], [], []

    def open_call(self, name: str, arguments: str = "") -> None:
        """A new call; what `add_arguments` brings belongs to it."""
        self.calls.append(CallPart(index=self.num_calls, id=self._id(), name=name, arguments=arguments))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        if not text:
            return
        if self.calls:  # always the last call's: they don't interleave
            self.calls[-1].arguments += text
        else:
            self.calls.append(CallPart(index=self.num_calls - 1, arguments=text))

    def _id(self) -> str:
        digest = hashlib.blake2s(f"{self._prefix}/{self.num_calls}".encode(), digest_size=18).digest()
        if self._short:
            return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:_SHORT])
        return f"call_{digest.hex()[:24]}"
