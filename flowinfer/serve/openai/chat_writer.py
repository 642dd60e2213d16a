"""Writes chat completions and their chunks: reasoning, text and tool calls as OpenAI's clients read them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from flowinfer.message import CallPart, Finish, Piece
from flowinfer.serve.openai.encode import (
    DONE,
    SPOT,
    chat_logprobs,
    encode,
    finish_of,
    finishes,
    halves,
    prompt_logprobs,
    usage_of,
)
from flowinfer.serve.openai.stream import Chunks, StreamShape, opened_of

_PLAIN = StreamShape()


class ChatWriter(Chunks):
    """Writes one request's answer. parallel=False: of several calls in an answer, only the first is told.

    prompt_logprobs: the first choice brings those of the prompt.  more: fields that the answer and its chunks repeat.
    """

    def __init__(
        self,
        id: str,
        model: str,
        shape: StreamShape = _PLAIN,
        *,
        logprobs: bool = False,
        parallel: bool = True,
        prompt_logprobs: bool = False,
        more: dict[str, Any] | None = None,
    ) -> None:
        self._head = {"id": id, "created": int(time.time()), "model": model, **(more or {})}
        super().__init__(self._head | {"object": "chat.completion.chunk"}, shape)
        self._logprobs, self._prompt_logprobs = logprobs, prompt_logprobs
        self._parallel = parallel
        self._halves: dict[int, tuple[bytes, bytes]] = {}
        self._opened: set[int] = set()
        self._called: set[int] = set()

    def opening(self) -> bytes:
        return b""

    def event(self, index: int, piece: Piece) -> bytes:
        out = b""
        if not self._plain:
            self.note(index, piece)
        if index not in self._opened:
            self._opened.add(index)
            out = self._chunk(index, {"role": "assistant", "content": ""})
        if piece.reasoning:
            out += self._chunk(index, _thought(piece.reasoning))
        if piece.logprobs and self._logprobs:
            out += self._chunk(index, {"content": piece.text}, logprobs=chat_logprobs(piece.logprobs))
        elif piece.text and not self._plain:
            out += self._chunk(index, {"content": piece.text})
        elif piece.text:
            before, after = self._halves.get(index) or self._split(index)
            out += before + encode(piece.text) + after
        if piece.calls and (calls := self._told(piece.calls)):
            self._called.add(index)
            out += self._chunk(index, {"tool_calls": [_call_delta(part) for part in calls]})
        if piece.finish is not None:
            out += self._chunk(index, {}, finish=_reason(piece.finish, index in self._called))
        return out

    def closing(self, pieces: Sequence[Piece]) -> bytes:
        if not self._shape.usage:
            return DONE
        return self.data(self.frame([], usage_of(finishes(pieces), len(pieces)))) + DONE

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        choices = [
            {
                "index": index,
                "message": self._message(piece),
                "logprobs": chat_logprobs(piece.logprobs) if self._logprobs else None,
                "finish_reason": _reason(finish_of(piece), bool(piece.calls)),
            }
            for index, piece in enumerate(pieces)
        ]
        answer = {"object": "chat.completion", "choices": choices, "usage": usage_of(finishes(pieces), len(pieces))}
        if self._prompt_logprobs:
            answer["prompt_logprobs"] = prompt_logprobs(opened_of(pieces[0]).prompt)
        return encode(self._head | answer)

    def _message(self, piece: Piece) -> dict[str, Any]:
        calls = [
            {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}
            for part in self._told(piece.calls)
        ]
        content = piece.text or None if calls else piece.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= _thought(piece.reasoning) if piece.reasoning else {}
        return message | {"tool_calls": calls} if calls else message

    def _told(self, calls: Iterable[CallPart]) -> list[CallPart]:
        return [part for part in calls if self._parallel or part.index == 0]

    def _split(self, index: int) -> tuple[bytes, bytes]:
        choice = {"index": index, "delta": {"content": SPOT}, "logprobs": None, "finish_reason": None}
        self._halves[index] = halves(self.frame([choice]))
        return self._halves[index]

    def _chunk(self, index: int, delta: dict[str, Any], *, logprobs: Any = None, finish: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self.data(self.frame([choice]))


def _reason(finish: Finish, called: bool) -> str:
    """A call that was cut by a stop string or by length isn't one to act on."""
    whole = finish.reason == "stop" and not isinstance(finish.stop, str)
    return "tool_calls" if called and whole else finish.reason


def _thought(text: str) -> dict[str, str]:
    return {"reasoning": text, "reasoning_content": text}  # clients read the one or the other


def _call_delta(part: CallPart) -> dict[str, Any]:
    function = {"arguments": part.arguments}
    if not part.id:
        return {"index": part.index, "function": function}
    return {"index": part.index, "id": part.id, "type": "function", "function": {"name": part.name, **function}}
