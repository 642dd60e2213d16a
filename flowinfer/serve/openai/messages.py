"""The messages of a chat as the template takes them: role and plain text. Other content is refused by its place."""

from __future__ import annotations

from typing import Any

import msgspec

from flowinfer.serve.openai.fields import invalid, unsupported

ROLES = {"system", "developer", "user", "assistant"}
TOOL_ROLES = {"tool"}
_AS_SYSTEM = {"developer": "system"}  # open models' templates know no developer
TEXT_PARTS = {"text", "refusal"}


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


def plain_messages(messages: list[ChatMessage], *, tools: bool) -> list[dict[str, Any]]:
    """Messages with `content` joined to one string. Raises RequestError naming the message and field at fault."""
    if not messages:
        raise invalid("messages", "needs at least one message.")
    return [_plain(message, f"messages[{i}]", tools) for i, message in enumerate(messages)]


def _plain(message: ChatMessage, where: str, tools: bool) -> dict[str, Any]:
    if message.role not in ROLES | TOOL_ROLES:
        raise invalid(f"{where}.role", f"must be one of {', '.join(sorted(ROLES))}, not {message.role[:40]!r}.")
    _refuse_parts(message, where, tools)
    plain: dict[str, Any] = {"role": _AS_SYSTEM.get(message.role, message.role), "content": _text(message, where)}
    for key in ("name", "tool_calls", "tool_call_id"):
        if (value := getattr(message, key)) is not None:
            plain[key] = value
    return plain


def _refuse_parts(message: ChatMessage, where: str, tools: bool) -> None:
    for key in ("audio", "function_call"):
        if getattr(message, key):
            raise unsupported(f"{where}.{key}")
    if not tools and message.role in TOOL_ROLES:
        raise unsupported(f"{where}.role", "'tool' needs tools, which are not supported by this pipeline")
    if not tools and (message.tool_calls or message.tool_call_id):
        raise unsupported(f"{where}.tool_calls", "needs tools, which are not supported by this pipeline")


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
    if unknown := part.keys() - {"type", kind}:
        raise invalid(f"{where}.{min(unknown)}", "is not a field of a text part.", "unknown_parameter")
    return text
