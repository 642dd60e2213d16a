"""Reads gpt-oss's harmony: messages with a channel each. analysis is reasoning, final text, a recipient a call."""

from __future__ import annotations

import re

from flowinfer.text.reply.cursor import find_marker
from flowinfer.text.reply.delta import Delta

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
MARKERS = (MESSAGE, *ENDS, "<|constrain|>")
_MAX_HEADER = 1024
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class Harmony:
    """One answer. It begins in the header of its first message, behind <|start|>assistant."""

    def __init__(self, delta: Delta) -> None:
        self.delta = delta
        self._buffer = ""
        self._kind = ""  # of the message whose body is being read; "": its header is
        self._num_messages = 0

    @property
    def in_reasoning(self) -> bool:
        return self._kind == "reasoning"

    def push(self, text: str) -> None:
        self._buffer += text
        while self._body() if self._kind else self._header():
            pass

    def finish(self) -> None:
        if self._kind:
            self._add(self._buffer)
        elif not self._num_messages:
            self.delta.text.append(self._buffer)  # a model that doesn't keep to its format

    def _header(self) -> bool:
        header, marker, rest = find_marker(self._buffer, (MESSAGE,))
        if len(header) > _MAX_HEADER:  # a model that doesn't keep to its format: it isn't held back for ever
            self._kind, self._buffer = "text", self._buffer[_MAX_HEADER:]
            self._num_messages += 1
            self._add(header[:_MAX_HEADER])
            return True
        if marker is None:
            return False
        self._buffer = rest
        self._num_messages += 1
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None:
            self._kind = "call"
            self.delta.open_call(recipient[1])
        else:
            self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "text"
        return True

    def _body(self) -> bool:
        text, marker, rest = find_marker(self._buffer, ENDS)
        self._add(text)
        self._buffer = rest
        if marker is None:
            return False
        self._kind = ""
        self._buffer = marker + rest if marker in ("<|start|>", "<|channel|>") else rest
        return True

    def _add(self, text: str) -> None:
        if self._kind == "call":
            self.delta.add_arguments(text)
        elif self._kind == "reasoning":
            self.delta.reasoning.append(text)
        else:
            self.delta.text.append(text)
