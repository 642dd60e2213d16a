"""Writes Lark grammars in llguidance's dialect: literals with control tokens in them, text up to a marker, values.

What stands in a vocabulary as one control token can't be spelled by other tokens, so a literal names it by its id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

Mark = Callable[[str], Sequence[int | str]]  # a literal as control ids and the text between them
ANY = "(?s:.*)"
JSON_SPACE = r"[ \n]{0,20}"  # unbounded white space between JSON tokens lets a small model indent for ever


class Lark:
    """A grammar under way: rules by name, each written once."""

    def __init__(self, mark: Mark) -> None:
        self._mark = mark
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def text(self, start: str) -> str:
        """The whole grammar; start: what it matches."""
        return "\n".join([f"start: {start}", *self._rules.values()]) + "\n"

    def rule(self, body: str) -> str:
        """Name of a rule of this body."""
        return self._define(body, "r{}", "{}: {}")

    def literal(self, text: str) -> str:
        """Text as it is, its markers as control tokens."""
        return " ".join(f"<[{part}]>" if isinstance(part, int) else _quoted(part) for part in self._mark(text))

    def is_text(self, text: str) -> bool:
        """Whether no part of it is a control token."""
        return all(isinstance(part, str) for part in self._mark(text))

    def until(self, body: str, end: str, *, without: Sequence[str] = ()) -> str:
        """Text that matches the regular expression `body`, then `end`, which the text can't hold.

        without: what it can't hold either, spelled in other tokens than a control token.
        """
        parts = list(self._mark(end))
        first = parts[0]
        if isinstance(first, int):  # ends the text by itself
            return f"{self._terminal(body, without)} {self.literal(end)}"
        if len(parts) > 1:  # the longest match, as what follows is no text
            return f"{self._terminal(body + escaped(first), without)} {self.literal(end[len(first) :])}"
        return self._define(f"/{body}{escaped(end)}/", "r{}", "{}[lazy]: {}")

    def free(self, body: str = ANY, *, without: Sequence[str] = ()) -> str:
        """Text that matches `body` and holds none of the others."""
        return self._terminal(body, without)

    def json(self, schema: Any) -> str:
        """A JSON value of this schema."""
        kept = schema if isinstance(schema, dict) else {"anyOf": [schema]}
        given = kept.get("x-guidance")
        guidance = {"whitespace_pattern": JSON_SPACE} | (given if isinstance(given, dict) else {})
        return self.rule("%json " + json.dumps({**kept, "x-guidance": guidance}, ensure_ascii=False))

    def _terminal(self, body: str, without: Sequence[str]) -> str:
        plain = f"/{body}/"
        if without:
            plain += f" & ~/{ANY}({'|'.join(map(escaped, without))}){ANY}/"
        return self._define(plain, "T{}", "{}: {}")

    def _define(self, body: str, name: str, form: str) -> str:
        key = form + body
        if key not in self._names:
            self._names[key] = name.format(len(self._names))
            self._rules[self._names[key]] = form.format(self._names[key], body)
        return self._names[key]


def any_of(parts: Sequence[str]) -> str:
    """One of these."""
    return parts[0] if len(parts) == 1 else "(" + " | ".join(parts) + ")"


def escaped(text: str) -> str:
    """Text as a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
