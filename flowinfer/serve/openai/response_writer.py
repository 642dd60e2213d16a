"""Writes answers of the Responses API: output items, and the events that build them in order."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from flowinfer.errors import RequestError
from flowinfer.message import CallPart, Finish, Piece, TextLogprob
from flowinfer.serve.openai.encode import chat_logprobs, encode, finish_of, usage_of
from flowinfer.serve.openai.stream import padding

Item = dict[str, Any]


class ResponseWriter:
    """Writes one response. head: its fields that don't change; on_end gets the whole response when it has ended.

    logprobs: the text goes with those of its tokens.  obfuscated: deltas are padded at random.  parallel=False: of
    several calls, only the first is told.
    """

    def __init__(
        self,
        head: dict[str, Any],
        on_end: Callable[[dict[str, Any]], None],
        *,
        logprobs: bool = False,
        obfuscated: bool = False,
        parallel: bool = True,
    ) -> None:
        self._head, self._on_end = head, on_end
        self._logprobs, self._obfuscated, self._parallel = logprobs, obfuscated, parallel
        self._sequence = 0
        self._items: list[Item] = []
        self._call = -1  # index of the call that the last item is

    # ----------------------------------------------------------------------------------------------------- as a stream

    def queued(self) -> bytes:
        """Events of a response that is made in the background, and waits."""
        waiting = self.response("queued")
        return self._event("response.created", response=waiting) + self._event("response.queued", response=waiting)

    def opening(self) -> bytes:
        started = self.response("in_progress")
        out = b"" if self._sequence else self._event("response.created", response=started)
        return out + self._event("response.in_progress", response=started)

    def event(self, index: int, piece: Piece) -> bytes:
        out = b""
        if piece.reasoning:
            out += self._text("reasoning", piece.reasoning)
        if piece.text:
            out += self._text("message", piece.text, piece.logprobs if self._logprobs else ())
        for part in piece.calls if self._parallel else [part for part in piece.calls if part.index == 0]:
            out += self._call_part(part)
        return out

    def closing(self, pieces: Sequence[Piece]) -> bytes:
        finish = finish_of(pieces[0])
        out = self._close("completed" if finish.reason == "stop" else "incomplete")
        response = self._ended(finish)
        return out + self._event(f"response.{response['status']}", response=response)

    def idle(self) -> bytes:
        return b": keep-alive\n\n"

    def failure(self, error: RequestError) -> bytes:
        """The stream's last event, after the status line has gone out; the response that is kept says the same."""
        said = {"code": "server_error", "message": error.message}
        response = self.response("failed", error=said)
        self._on_end(response)
        return self._event("response.failed", response=response)

    # ---------------------------------------------------------------------------------------------------------- at once

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        self.event(0, pieces[0])
        finish = finish_of(pieces[0])
        self._close("completed" if finish.reason == "stop" else "incomplete")
        return encode(self._ended(finish))

    def response(self, status: str, **more: Any) -> dict[str, Any]:
        """The response as it stands."""
        return self._head | {"status": status, "output": [dict(item) for item in self._items], "usage": None} | more

    # ------------------------------------------------------------------------------------------------------------ items

    def _ended(self, finish: Finish) -> dict[str, Any]:
        whole = finish.reason == "stop"
        response = self.response("completed" if whole else "incomplete", usage=_usage(finish))
        if not whole:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._on_end(response)
        return response

    def _text(self, kind: str, text: str, entries: Sequence[TextLogprob] = ()) -> bytes:
        out = b""
        if not self._items or self._items[-1]["type"] != kind:
            part = _part(kind, "")
            out = self._open({"type": kind, "id": _id(kind), "status": "in_progress", **_fields(kind), "content": []})
            self._items[-1]["content"].append(part)
            out += self._event("response.content_part.added", **self._at_part(), part=dict(part))
        part, told = self._items[-1]["content"][0], {}
        part["text"] += text
        if kind == "message":
            told["logprobs"] = chat_logprobs(entries)["content"]
            part["logprobs"] += told["logprobs"]
        return out + self._delta(f"response.{_name(kind)}.delta", **self._at_part(), delta=text, **told)

    def _call_part(self, part: CallPart) -> bytes:
        out = b""
        if not self._items or self._items[-1]["type"] != "function_call" or self._call != part.index:
            self._call = part.index
            item = {"type": "function_call", "id": _id("call"), "call_id": part.id, "name": part.name}
            out = self._open({**item, "arguments": "", "status": "in_progress"})
        self._items[-1]["arguments"] += part.arguments
        if part.arguments:
            out += self._delta("response.function_call_arguments.delta", **self._at(), delta=part.arguments)
        return out

    def _open(self, item: Item) -> bytes:
        out = self._close("completed")
        self._items.append(item)
        return out + self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(item))

    def _close(self, status: str) -> bytes:
        """Ends the last item."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return b""
        item, out = self._items[-1], b""
        if item["type"] == "function_call":
            ended = {"arguments": item["arguments"], "name": item["name"]}
            out += self._event("response.function_call_arguments.done", **self._at(), **ended)
        else:
            part = item["content"][0]
            told = {key: part[key] for key in ("text", "logprobs") if key in part}
            out += self._event(f"response.{_name(item['type'])}.done", **self._at_part(), **told)
            out += self._event("response.content_part.done", **self._at_part(), part=part)
        item["status"] = status
        return out + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _at_part(self) -> dict[str, Any]:
        return {**self._at(), "content_index": 0}

    def _delta(self, kind: str, **fields: Any) -> bytes:
        if self._obfuscated:
            fields["obfuscation"] = padding(len(encode(fields)))
        return self._event(kind, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(body) + b"\n\n"


def _usage(finish: Finish) -> dict[str, Any]:
    usage = usage_of([finish], 1)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": finish.reasoning_tokens},
        "total_tokens": usage["total_tokens"],
    }


def _id(kind: str) -> str:
    return {"message": "msg", "reasoning": "rs", "call": "fc"}[kind] + "_" + uuid.uuid4().hex


def _fields(kind: str) -> dict[str, Any]:
    return {"role": "assistant"} if kind == "message" else {"summary": []}


def _name(kind: str) -> str:
    return "output_text" if kind == "message" else "reasoning_text"


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}
