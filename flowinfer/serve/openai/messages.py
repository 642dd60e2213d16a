"""The messages of a chat as the template takes them: role and plain text. Other content is refused by its place."""

from __future__ import annotations

from typing import Any

import msgspec

from flowinfer.serve.openai.fields import invalid, only, unsupported

ROLES = {"system", "developer", "user", "assistant"}
TOOL_ROLES = {"tool"}
_AS_SYSTEM = {"developer": "system"}  # open models' templates know no developer
TEXT_PARTS = ("text", "refusal")
_CALL_FIELDS = ("id", "type", "function", "index")  # index: of a delta that a client put together by itself


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One message. content is text, or a list of text parts."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


def plain_messages(messages: list[ChatMessage], *, tools: bool) -> list[dict[str, Any]]:
    """Messages with `content` joined to one string. Raises RequestError naming the message and field at fault."""
    if not messages:
        raise invalid("messages", "needs at least one message.")
    plain = [_plain(message, f"messages[{i}]", tools) for i, message in enumerate(messages)]
    _name_results(plain)
    return plain


def _plain(message: ChatMessage, where: str, tools: bool) -> dict[str, Any]:
    if message.role not in ROLES | TOOL_ROLES:
        raise invalid(
            f"{where}.role", f"must be one of {', '.join(sorted(ROLES | TOOL_ROLES))}, not {message.role[:40]!r}."
        )
    _refuse_parts(message, where, tools)
    plain: dict[str, Any] = {"role": _AS_SYSTEM.get(message.role, message.role), "content": _text(message, where)}
    for key in ("name", "tool_calls", "tool_call_id"):
        if (value := getattr(message, key)) is not None:
            plain[key] = value
    if thought := message.reasoning_content or message.reasoning:
        plain["reasoning_content"] = thought
    return plain


def _name_results(messages: list[dict[str, Any]]) -> None:
    """Gives tool results the name of the tool, which some templates show and clients leave out."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
        if message["role"] in TOOL_ROLES and (name := names.get(message.get("tool_call_id", ""))):
            message.setdefault("name", name)


def _refuse_parts(message: ChatMessage, where: str, tools: bool) -> None:
    for key in ("audio", "function_call"):
        if getattr(message, key):
            raise unsupported(f"{where}.{key}")
    if not tools and message.role in TOOL_ROLES:
        raise unsupported(f"{where}.role", "'tool' needs tools, which are not supported by this pipeline")
    if not tools and (message.tool_calls or message.tool_call_id):
        raise unsupported(f"{where}.tool_calls", "needs tools, which are not supported by this pipeline")
    if message.role in TOOL_ROLES and not message.tool_call_id:
        raise invalid(f"{where}.tool_call_id", "is required: it says which call this answers.")
    for place, call in enumerate(message.tool_calls or ()):
        _check_call(call, f"{where}.tool_calls[{place}]")


def _check_call(call: dict[str, Any], where: str) -> None:
    if call.get("type", "function") != "function":
        raise unsupported(f"{where}.type", f"{str(call['type'])[:40]!r} is not supported by this pipeline")
    only(call, where, _CALL_FIELDS)
    if not isinstance(call.get("id"), str):
        raise invalid(f"{where}.id", "must be a string.")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{where}.function", "must be an object with a name.")
    only(function, f"{where}.function", ("name", "arguments"))
    if not isinstance(function.get("arguments"), str):
        raise invalid(f"{where}.function.arguments", "must be JSON as a string.")


def _text(message: ChatMessage, where: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return message.refusal or ""
        raise invalid(f"{where}.content", "must be text.")
    return "".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(message.content))


def _part(part: dict[str, Any], where: str) -> str:
    kind = part.get("type")
    if kind not in TEXT_PARTS:
        raise unsupported(f"{where}.type", f"{str(kind)[:40]!r} is not supported by this pipeline; only text is")
    text = part.get(kind)
    if not isinstance(text, str):
        raise invalid(f"{where}.{kind}", "must be a string.")
    only(part, where, ("type", kind), {"prompt_cache_breakpoint": ()})
    return text
