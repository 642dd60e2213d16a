"""Writes chat completions and their chunks: reasoning, text and tool calls as OpenAI's clients read them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from flowinfer.message import CallPart, Finish, Piece
from flowinfer.serve.openai.encode import DONE, SPOT, chat_logprobs, encode, finish_of, finishes, halves, usage_of
from flowinfer.serve.openai.job import OpenAIEvents


class ChatWriter(OpenAIEvents):
    """Writes one request's answer. parallel=False: of several calls in an answer, only the first is told."""

    def __init__(self, id: str, model: str, include_usage: bool, logprobs: bool, parallel: bool = True) -> None:
        self._head = {"id": id, "created": int(time.time()), "model": model}
        self._usage = include_usage
        self._logprobs = logprobs
        self._parallel = parallel
        self._halves: dict[int, tuple[bytes, bytes]] = {}
        self._opened: set[int] = set()
        self._called: set[int] = set()

    def opening(self) -> bytes:
        return b""

    def event(self, index: int, piece: Piece) -> bytes:
        out = b""
        if index not in self._opened:
            self._opened.add(index)
            out = self._chunk(index, {"role": "assistant", "content": ""})
        if piece.reasoning:
            out += self._chunk(index, _thought(piece.reasoning))
        if piece.logprobs and self._logprobs:
            out += self._chunk(index, {"content": piece.text}, logprobs=chat_logprobs(piece.logprobs))
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
        if not self._usage:
            return DONE
        usage = usage_of(finishes(pieces), len(pieces))
        return b"data: " + encode(self._frame([]) | {"usage": usage}) + b"\n\n" + DONE

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
        usage = usage_of(finishes(pieces), len(pieces))
        return encode(self._head | {"object": "chat.completion", "choices": choices, "usage": usage})

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
        self._halves[index] = halves(self._frame([choice]))
        return self._halves[index]

    def _chunk(self, index: int, delta: dict[str, Any], *, logprobs: Any = None, finish: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return b"data: " + encode(self._frame([choice])) + b"\n\n"

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        frame = self._head | {"object": "chat.completion.chunk", "choices": choices}
        return frame | {"usage": None} if self._usage else frame


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
