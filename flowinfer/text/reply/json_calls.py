"""Calls whose arguments are a JSON object in the answer: passed on as they come, never parsed."""

from __future__ import annotations

import json
import re
from typing import Any

from flowinfer.text.reply.cursor import JsonScan, find_marker
from flowinfer.text.reply.delta import Delta
from flowinfer.text.reply.formats import NamedJson
from flowinfer.text.reply.syntax import MAX_NAME, NotACall

# The order in which all models write it; with another, or with more keys, the object is read as a whole.
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FIRST_KEY = re.compile(r'\{\s*(?:"([^"\\]*)"|[^"\s])')
_KEYS = {"name", "arguments", "parameters", "id", "type"}  # another first key makes no call, so text needn't wait
_MAX_HEAD = 4 * MAX_NAME


class JsonCall:
    """{"name": …, "arguments": {…}}, perhaps in a list."""

    def __init__(self) -> None:
        self.unread = ""
        self._object = JsonScan()  # the call
        self._seen = 0  # of unread, by _object
        self._arguments: JsonScan | None = None
        self._tail = False

    def read(self, text: str, delta: Delta) -> str | None:
        if self._arguments is None and not self._tail:
            self.unread += text
            if (start := self._start()) > MAX_NAME:
                raise NotACall(start)
            head = self._head()
            if head is None:
                return self._whole(delta)
            delta.open_call(_name_of(head[1]))
            self._arguments, text, self.unread = JsonScan(), self.unread[head.end() :], ""
        if self._arguments is not None:
            end = self._arguments.end(text)
            delta.add_arguments(text if end < 0 else text[:end])
            if end < 0:
                return None
            text, self._arguments, self._tail = text[end:], None, True
            self._object = _inside()
        end = self._object.end(text)
        return None if end < 0 else text[end:]

    def finish(self, delta: Delta) -> bool:
        return self._tail or self._arguments is not None

    def _head(self) -> re.Match[str] | None:
        start = self._start()
        if self._seen > start + _MAX_HEAD:
            return None  # tried on all that counts
        head = _HEAD.match(self.unread, start)
        return head if head is not None and head.end() <= start + _MAX_HEAD else None

    def _start(self) -> int:
        return len(self.unread) - len(self.unread.lstrip(" \t\r\n["))

    def _whole(self, delta: Delta) -> str | None:
        """Waits for the end of the object, then takes it as a whole."""
        start = self._start()
        first = _FIRST_KEY.match(self.unread, start, start + _MAX_HEAD)
        late = first is None and len(self.unread) >= start + _MAX_HEAD
        if late or self.unread[start : start + 1] not in ("", "{") or (first is not None and first[1] not in _KEYS):
            raise NotACall(min(start + 1, len(self.unread)))
        at, self._seen = max(start, self._seen), len(self.unread)
        end = self._object.end(self.unread, at)
        if end < 0:
            return None
        call = _call_of(self.unread[start:end])
        if call is None:
            raise NotACall(end)
        name, arguments = call
        delta.open_call(name, arguments)
        rest, self.unread, self._tail = self.unread[end:], "", True
        return rest


class NamedCall:
    """The name, a marker, {…}."""

    def __init__(self, syntax: NamedJson) -> None:
        self.unread = ""
        self._ends = (syntax.name_end, "{") if syntax.bare else (syntax.name_end,)
        self._arguments: JsonScan | None = None

    def read(self, text: str, delta: Delta) -> str | None:
        if self._arguments is None:
            self.unread += text
            text = self._open(delta)
            if self._arguments is None:
                return None
        end = self._arguments.end(text)
        delta.add_arguments(text if end < 0 else text[:end])
        return None if end < 0 else text[end:]

    def finish(self, delta: Delta) -> bool:
        return self._arguments is not None

    def _open(self, delta: Delta) -> str:
        """Text from the arguments on, once they begin."""
        name, marker, rest = find_marker(self.unread, self._ends)
        rest = marker + rest if marker == "{" else rest
        body = rest.lstrip()
        if max(len(name), len(rest) - len(body)) > MAX_NAME or "\n" in name.strip():
            raise NotACall
        if marker is None or not body:
            return ""
        name = name.partition("[CALL_ID]")[0].strip()  # Mistral's own ids; ours take their place
        if not name or body[0] != "{":
            raise NotACall
        delta.open_call(name)
        self._arguments, self.unread = JsonScan(), ""
        return body


def _inside() -> JsonScan:
    """A scan that has seen the bracket that opens its value."""
    scan = JsonScan()
    scan.end("{")
    return scan


def _name_of(quoted: str) -> str:
    try:
        name = str(json.loads(quoted, strict=False))
    except ValueError:
        raise NotACall(1) from None
    if not name:
        raise NotACall(1)
    return name


def _call_of(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call given as a whole, None if it's none."""
    try:
        call = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    name = call.get("name")
    arguments: Any = call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str) or not name or not call.keys() & {"arguments", "parameters"}:
        return None
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
