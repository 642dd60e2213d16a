"""What reads one tool call, and white space at the edges of a part of an answer."""

from __future__ import annotations

from typing import Protocol

from flowinfer.text.reply.delta import Delta

MAX_NAME = 256  # characters; what opens like a call and has no name by then is none


class NotACall(Exception):
    """What was read since the call's marker is no call; the reader's `unread` is all of it.

    skip: characters of it that can't hold the begin of another call.
    """

    def __init__(self, skip: int = 0) -> None:
        super().__init__(skip)
        self.skip = skip


class CallReader(Protocol):
    """Reads one call behind its marker. Until it's certain that it is one, nothing goes into the delta."""

    unread: str

    def read(self, text: str, delta: Delta) -> str | None:
        """Takes text; gives what stands behind the call, None while it isn't over. Raises NotACall."""

    def finish(self, delta: Delta) -> bool:
        """The answer is over. False if this was no call."""


class Edges:
    """Passes text on without the white space at its end, and at its front if asked to."""

    def __init__(self, *, front: bool) -> None:
        self.said = not front
        self._held: list[str] = []

    def push(self, text: str) -> str:
        if text.isspace() or not text:
            if self.said:
                self._held.append(text)
            return ""
        if not self.said:
            text = text.lstrip()
            self.said = True
        body = text.rstrip()
        out = "".join([*self._held, body])
        self._held = [text[len(body) :]]
        return out

    def rest(self) -> str:
        """The white space at the end, when it is to be kept."""
        held, self._held = self._held, []
        return "".join(held)
