"""Input items of the Responses API as chat messages. Knows no store and no model."""

from __future__ import annotations

import uuid
from typing import Any

from flowinfer.serve.openai.fields import invalid, only, unsupported

Message = dict[str, Any]
_TEXTS = ("input_text", "output_text", "text")
# Fields of the items that are understood, and of those that came out of an earlier response.
_FIELDS: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content", "summary", "encrypted_content"),
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "async": (False,),
    "caller": (),
    "created_by": (),
    "name": (),
    "namespace": (),
    "phase": ("final_answer",),
    "prompt_cache_breakpoint": (),
}
_PREFIX = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}  # of ids


def messages_of(given: str | list[dict[str, Any]]) -> list[Message]:
    """The messages that `input` stands for. Raises RequestError naming the item at fault."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    reader = _Reader()
    for place, item in enumerate(given):
        reader.take(item, f"input[{place}]")
    return reader.messages


def items_of(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of an input that `messages_of` takes, written out: each with its type and id, texts as parts."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(item) for item in given]


def _item(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    whole = {"type": kind, "id": f"{_PREFIX[kind]}_{uuid.uuid4().hex}", "status": "completed"}
    if kind == "reasoning":
        whole["summary"] = []
    whole |= {key: value for key, value in item.items() if value is not None}
    if kind == "message" and isinstance(whole["content"], str):
        said: dict[str, Any] = {"type": "input_text", "text": whole["content"]}
        if whole["role"] == "assistant":
            said |= {"type": "output_text", "annotations": [], "logprobs": []}
        whole["content"] = [said]
    return whole


class _Reader:
    """Joins what belongs to one assistant message: reasoning, text and calls come as items of their own."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._thought = ""

    def take(self, item: dict[str, Any], where: str) -> None:
        kind = item.get("type", "message" if "role" in item else None)
        if isinstance(kind, str) and kind in _FIELDS:
            only(item, where, ("type", "id", "status", *_FIELDS[kind]), _NEUTRAL)
        if kind == "message":
            self._message(item, where)
        elif kind == "function_call":
            self._call(item, where)
        elif kind == "function_call_output":
            content = _text(item.get("output"), f"{where}.output")
            self.messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": content})
        elif kind == "reasoning":
            self._thought = _text(item.get("content") or [], f"{where}.content", ("reasoning_text",))
        else:
            raise unsupported(f"{where}.type", f"{str(kind)[:40]!r} is not supported by this pipeline")

    def _message(self, item: dict[str, Any], where: str) -> None:
        role = _string(item, "role", where)
        message: Message = {"role": role, "content": _text(item.get("content"), f"{where}.content")}
        if role == "assistant":
            message |= self._thoughts()
        self.messages.append(message)

    def _call(self, item: dict[str, Any], where: str) -> None:
        function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
        call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
        if not (self.messages and self.messages[-1]["role"] == "assistant"):
            self.messages.append({"role": "assistant", "content": "", **self._thoughts()})
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def _thoughts(self) -> dict[str, str]:
        thought, self._thought = self._thought, ""
        return {"reasoning_content": thought} if thought else {}


def _text(content: Any, where: str, kinds: tuple[str, ...] = _TEXTS) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "must be a string or a list of parts.")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise unsupported(f"{where}[{place}].type", f"{str(kind)[:40]!r} is not supported by this pipeline")
        only(part, f"{where}[{place}]", ("type", "text", "annotations", "logprobs"), _NEUTRAL)
        texts.append(_string(part, "text", f"{where}[{place}]"))
    return "".join(texts)


def _string(item: dict[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise invalid(f"{where}.{key}", "must be a string.")
    return value
