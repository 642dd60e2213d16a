"""Reads answers that mark reasoning and calls by brackets: reasoning, then text, then calls, each once at most.

Text between calls and behind them isn't part of an answer: an answer ends with its calls. A call that turns out to be
none is given back as text, marker and all, unless a call came before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flowinfer.text.reply.cursor import find_marker
from flowinfer.text.reply.delta import Delta
from flowinfer.text.reply.formats import THINK_CLOSE, THINK_OPEN, JsonObjects, NamedJson, ToolFormat
from flowinfer.text.reply.json_calls import JsonCall, NamedCall
from flowinfer.text.reply.syntax import CallReader, Edges, NotACall
from flowinfer.text.reply.tagged_calls import TaggedCall


class Parser:
    """One answer. thinking: the prompt ended inside reasoning, so the answer begins there."""

    def __init__(
        self,
        tools: ToolFormat | None,
        delta: Delta,
        *,
        reasoning: bool,
        thinking: bool = False,
        strings: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.delta = delta
        self._tools = tools
        self._strings = strings or {}
        self._thinking = thinking
        self._buffer = ""  # read, but not yet understood
        self._space: list[str] = []  # white space before anything else
        self._state: Callable[[], bool] = self._opening if reasoning else self._front
        self._edges = Edges(front=False)
        self._opened: list[str] = []  # what is text if no call follows: markers, and what stands between them
        self._reader: CallReader | None = None

    @property
    def in_reasoning(self) -> bool:
        return self._state == self._reasoning or (self._thinking and self._state == self._opening)

    def push(self, text: str) -> None:
        self._buffer += text
        while self._state():
            pass

    def finish(self) -> None:
        if self._reader is not None:
            if not self._reader.finish(self.delta) and not self.delta.num_calls:
                self._say("".join([*self._opened, self._reader.unread]))
        elif self._state == self._reasoning:
            self._think(self._buffer)
            return
        elif self._state == self._opening and self._thinking:
            self.delta.reasoning.append(self._buffer.strip())
            return
        elif self._state != self._seeking or not self.delta.num_calls:
            self._say("".join([*self._space, *self._opened, self._buffer]))
        if not self.delta.num_calls:
            self.delta.text.append(self._edges.rest())

    # ------------------------------------------------------- states: each takes a step, and says if it could take one

    def _opening(self) -> bool:
        """Before anything: does the answer open reasoning?"""
        start = self._begin()
        if start.startswith(THINK_OPEN):
            self._buffer = start[len(THINK_OPEN) :]
        elif THINK_OPEN.startswith(start):
            return False
        elif not self._thinking:
            self._state = self._front
            return True
        self._space, self._edges, self._state = [], Edges(front=True), self._reasoning
        return True

    def _begin(self) -> str:
        """What comes behind white space, which is set aside: an answer may be white space for ever."""
        start = self._buffer.lstrip()
        self._space.append(self._buffer[: len(self._buffer) - len(start)])
        self._buffer = start
        return start

    def _reasoning(self) -> bool:
        text, marker, self._buffer = find_marker(self._buffer, (THINK_CLOSE,))
        self._think(text)
        if marker is None:
            return False
        self._edges, self._state = Edges(front=True), self._front
        return True

    def _front(self) -> bool:
        """Before any text: some calls count only here."""
        may_call = self._tools is not None and self._tools.at_start
        start = self._begin() if may_call else self._buffer
        if may_call and not start:
            return False
        self._buffer, self._space = "".join([*self._space, start]), []
        if self._tools is not None and may_call and start.startswith(self._tools.open):
            self._seek("", self._buffer)
        else:
            self._state = self._text
        return True

    def _text(self) -> bool:
        if self._tools is None:
            self._say(self._buffer)
            self._buffer = ""
            return False
        text, marker, rest = find_marker(self._buffer, self._tools.starts)
        self._say(text)
        if marker is None:
            self._buffer = rest
            return False
        if marker == self._tools.open:
            self._seek("", marker + rest)
        else:
            self._seek(marker, rest)
        return True

    def _seeking(self) -> bool:
        """Where a call may begin: finds it."""
        assert self._tools is not None, "only tools lead here"
        syntax = self._tools.syntax
        again = syntax.again if isinstance(syntax, JsonObjects) and self.delta.num_calls else self._tools.open
        skipped, marker, self._buffer = find_marker(self._buffer, (again,))
        shown = "" if marker in (None, "{") else marker
        if not self.delta.num_calls:
            self._opened += [skipped, shown or ""]
        if marker is None:
            return False
        if not shown:  # it belongs to the call
            self._buffer = marker + self._buffer
        self._reader, self._state = self._new_reader(), self._calling
        return True

    def _calling(self) -> bool:
        assert self._reader is not None, "a call is being read"
        text, self._buffer = self._buffer, ""
        try:
            rest = self._reader.read(text, self.delta)
        except NotACall as error:
            self._give_back(self._reader.unread, error.skip)
            return True
        if rest is None:
            return False
        self._reader = None
        self._seek("", rest)
        return True

    # ----------------------------------------------------------------------------------------------------------- moves

    def _seek(self, opened: str, rest: str) -> None:
        self._opened, self._buffer, self._state = [opened], rest, self._seeking

    def _give_back(self, unread: str, skip: int) -> None:
        """It wasn't a call: text, unless a call came before it."""
        self._reader = None
        if self.delta.num_calls:
            self._seek("", unread[skip:])
            return
        self._say("".join(self._opened))
        self._opened, self._buffer, self._state = [], unread, self._text

    def _new_reader(self) -> CallReader:
        assert self._tools is not None, "only tools lead here"
        syntax = self._tools.syntax
        if isinstance(syntax, JsonObjects):
            return JsonCall()
        if isinstance(syntax, NamedJson):
            return NamedCall(syntax)
        return TaggedCall(syntax, self._strings)

    def _say(self, text: str) -> None:
        self.delta.text.append(self._edges.push(text))
        if self._tools is None:  # no call can follow, before which white space would go
            self.delta.text.append(self._edges.rest())

    def _think(self, text: str) -> None:
        self.delta.reasoning.append(self._edges.push(text))
