"""Calls whose parameters stand between tags: turned into a JSON object as they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from flowinfer.text.reply.cursor import find_marker, quoted
from flowinfer.text.reply.delta import Delta
from flowinfer.text.reply.formats import Tagged
from flowinfer.text.reply.syntax import MAX_NAME, NotACall

_PYTHON = {"True": "true", "False": "false", "None": "null"}


class TaggedCall:
    """One call. strings: of each tool, the parameters that hold text."""

    def __init__(self, syntax: Tagged, strings: Mapping[str, Sequence[str]]) -> None:
        self.unread = ""
        self._syntax = syntax
        self._strings = strings
        self._state: Callable[[Delta], bool] | None = self._name
        self._strings_here: Sequence[str] = ()
        self._opened = False
        self._num_keys = 0
        self._key = ""
        self._value: list[str] = []  # of a key, or of a value that is judged as a whole
        self._emit: Callable[[Delta, str], None] = self._collect
        self._fresh = True  # nothing of the value was read

    def read(self, text: str, delta: Delta) -> str | None:
        self.unread += text
        while self._state is not None and self._state(delta):
            pass
        return self.unread if self._state is None else None

    def finish(self, delta: Delta) -> bool:
        if self._state == self._in_value and self._emit == self._text:
            self._text(delta, self.unread)
        return self._opened

    def _name(self, delta: Delta) -> bool:
        syntax = self._syntax
        space = len(self.unread) - len(self.unread.lstrip())
        name, marker, rest = find_marker(self.unread[space:], (syntax.name_end, syntax.key_open, syntax.close))
        if max(space, len(name)) > MAX_NAME or "<" in name or "{" in name:
            raise NotACall
        if marker is None:
            return False
        name = name.strip()
        if not name:
            raise NotACall
        delta.open_call(name, "{")
        self._opened, self._strings_here, self._state = True, self._strings.get(name, ()), self._between
        self.unread = rest if marker == syntax.name_end else marker + rest
        return True

    def _between(self, delta: Delta) -> bool:
        _, marker, self.unread = find_marker(self.unread, (self._syntax.key_open, self._syntax.close))
        if marker is None:
            return False
        if marker == self._syntax.close:
            delta.add_arguments("}")
            self._state = None
        else:
            self._value, self._state = [], self._in_key
        return True

    def _in_key(self, delta: Delta) -> bool:
        key = self._up_to(self._syntax.key_end)
        if key is None:
            return False
        self._key, self._state = key.strip(), self._in_attributes
        return True

    def _in_attributes(self, delta: Delta) -> bool:
        attributes = self._up_to(self._syntax.value_open) if self._syntax.value_open else ""
        if attributes is None:
            return False
        delta.add_arguments((", " if self._num_keys else "") + json.dumps(self._key, ensure_ascii=False) + ": ")
        self._num_keys += 1
        self._emit, self._state, self._fresh, self._value = self._way(attributes), self._in_value, True, []
        return True

    def _up_to(self, end: str) -> str | None:
        """All before `end`, None while that isn't there: what was searched isn't searched again."""
        text, marker, self.unread = find_marker(self.unread, (end,))
        self._value.append(text)
        if marker is None:
            return None
        found, self._value = "".join(self._value), []
        return found

    def _way(self, attributes: str) -> Callable[[Delta, str], None]:
        if self._syntax.attributes:
            return self._text if 'string="true"' in attributes else self._json
        return self._text if self._key in self._strings_here else self._collect

    def _in_value(self, delta: Delta) -> bool:
        if self._fresh:
            if not self.unread:
                return False
            if self._syntax.trim and self.unread[0] == self._syntax.trim:
                self.unread = self.unread[1:]
            if self._emit == self._text:
                delta.add_arguments('"')
            self._fresh = False
        text, marker, self.unread = find_marker(self.unread, self._syntax.value_close)
        if text:
            self._emit(delta, text)
        if marker is None:
            return False
        self._close_value(delta)
        self._state = self._between
        return True

    def _text(self, delta: Delta, text: str) -> None:
        delta.add_arguments(quoted(text))

    def _json(self, delta: Delta, text: str) -> None:
        self._value = ["shown"] if text.strip() or self._value else []
        delta.add_arguments(text)

    def _collect(self, delta: Delta, text: str) -> None:
        self._value.append(text)

    def _close_value(self, delta: Delta) -> None:
        if self._emit == self._text:
            delta.add_arguments('"')
        elif self._emit == self._collect:
            delta.add_arguments(_as_json("".join(self._value)))
        elif not self._value:
            delta.add_arguments("null")


def _as_json(text: str) -> str:
    """A value whose type nobody told: JSON if it is that, else text."""
    bare = text.strip()
    try:
        json.loads(bare, parse_constant=_refuse)
        return bare
    except (ValueError, RecursionError):
        return _PYTHON.get(bare) or json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(constant)
