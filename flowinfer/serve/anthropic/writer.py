"""Writes messages and their events in the order that Anthropic's clients rely on: a block at a time, each closed."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from flowinfer.errors import RequestError
from flowinfer.message import CallPart, Finish, Opened, Piece
from flowinfer.serve.anthropic.errors import error_body
from flowinfer.serve.openai.encode import encode, finish_of
from flowinfer.serve.openai.job import KEEP_ALIVE
from flowinfer.serve.openai.stream import opened_of

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
_EMPTY: dict[str, dict[str, Any]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


class MessageWriter:
    """Writes one answer. parallel=False: of several calls, only the first is told.

    caching: the request marked what to cache, so what was stored of its prompt is told apart.
    """

    def __init__(self, id: str, model: str, *, parallel: bool = True, caching: bool = False) -> None:
        self._head = {"id": id, "type": "message", "role": "assistant", "model": model}
        self._parallel, self._caching = parallel, caching
        self._opened: Opened | None = None
        self._num_blocks = 0
        self._open = ""  # kind of the block that is being written
        self._thoughts: list[str] = []
        self._called = False

    def opening(self) -> bytes:
        return b""  # message_start tells the prompt's tokens, so it comes with the first piece

    def event(self, index: int, piece: Piece) -> bytes:
        out = b"" if self._opened else self._begin(piece)
        if piece.reasoning:
            self._thoughts.append(piece.reasoning)
            out += self._enter("thinking") + self._delta("thinking_delta", "thinking", piece.reasoning)
        if piece.text:
            out += self._enter("text") + self._delta("text_delta", "text", piece.text)
        for part in self._told(piece.calls):
            out += self._call(part)
        return out + self._leave() if piece.finish is not None else out

    def closing(self, pieces: Sequence[Piece]) -> bytes:
        finish = finish_of(pieces[0])
        delta = {"delta": _end(finish, self._called), "usage": self._usage(finish)}
        return _event("message_delta", delta) + _event("message_stop", {})

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        (piece,) = pieces
        calls, content = self._told(piece.calls), list[dict[str, Any]]()
        if piece.reasoning:
            signature = _signature([piece.reasoning])
            content.append({"type": "thinking", "thinking": piece.reasoning, "signature": signature})
        if piece.text:
            content.append({"type": "text", "text": piece.text})
        for part in calls:
            content.append({"type": "tool_use", "id": part.id, "name": part.name, "input": _input(part.arguments)})
        finish, self._opened = finish_of(piece), opened_of(piece)
        return encode(self._head | {"content": content} | _end(finish, bool(calls)) | {"usage": self._usage(finish)})

    def idle(self) -> bytes:
        """A ping; before message_start a comment, since some clients take no event before that."""
        return PING if self._opened else KEEP_ALIVE

    def failure(self, error: RequestError) -> bytes:
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    def _begin(self, piece: Piece) -> bytes:
        self._opened = opened_of(piece)
        usage = self._prompt_usage(self._opened.prompt_tokens, self._opened.cached_tokens) | {"output_tokens": 0}
        message: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", {"message": self._head | message}) + PING

    def _usage(self, finish: Finish) -> dict[str, int]:
        usage = self._prompt_usage(finish.prompt_tokens, finish.cached_tokens)
        return usage | {"output_tokens": finish.completion_tokens}

    def _prompt_usage(self, prompt_tokens: int, cached_tokens: int) -> dict[str, int]:
        """Each token of the prompt counts once: read from the cache, stored in it, or neither.

        All prompts are cached. But as in Anthropic's own API, storing is told only where the request asks for it.
        """
        stored = self._opened.stored_tokens if self._opened and self._caching else 0
        return {
            "input_tokens": prompt_tokens - cached_tokens - stored,
            "cache_read_input_tokens": cached_tokens,
            "cache_creation_input_tokens": stored,
        }

    # ---------------------------------------------------------------------------------------------------------- blocks

    def _call(self, part: CallPart) -> bytes:
        out = b""
        if part.id:
            self._called = True
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            out = self._leave() + self._start("tool_use", block)
        if part.arguments:
            out += self._delta("input_json_delta", "partial_json", part.arguments)
        return out

    def _told(self, calls: Sequence[CallPart]) -> list[CallPart]:
        return [part for part in calls if self._parallel or part.index == 0]

    def _enter(self, kind: str) -> bytes:
        return b"" if self._open == kind else self._leave() + self._start(kind, _EMPTY[kind])

    def _start(self, kind: str, block: dict[str, Any]) -> bytes:
        self._open = kind
        return _event("content_block_start", {"index": self._num_blocks, "content_block": block})

    def _leave(self) -> bytes:
        """Ends the open block; thoughts are signed first."""
        if not self._open:
            return b""
        out = b""
        if self._open == "thinking":
            out = self._delta("signature_delta", "signature", _signature(self._thoughts))
            self._thoughts = []
        out += _event("content_block_stop", {"index": self._num_blocks})
        self._num_blocks += 1
        self._open = ""
        return out

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        return _event("content_block_delta", {"index": self._num_blocks, "delta": {"type": kind, field: text}})


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"


def _end(finish: Finish, called: bool) -> dict[str, Any]:
    """stop_reason and stop_sequence. A call that was cut by length or by a stop isn't one to act on."""
    if isinstance(finish.stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop}
    if finish.reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}


def _signature(thoughts: Sequence[str]) -> str:
    """A checksum of thinking, in the place of Anthropic's signature; nobody here asks for it back."""
    digest = hashlib.blake2b("".join(thoughts).encode("utf-8", "replace"), digest_size=24, person=b"flowinfer")
    return base64.b64encode(digest.digest()).decode()


def _input(arguments: str) -> Any:
    """Arguments as an object; what isn't one (a call that was cut) is told as it is, in one field."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
