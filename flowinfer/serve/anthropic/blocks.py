"""Content blocks of Anthropic's API as messages that chat templates take. What isn't text is refused by its place."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from flowinfer.serve.openai.fields import invalid, only, unsupported

Block = dict[str, Any]
Content = str | list[Block]
ROLES = ("user", "assistant", "system")
# Fields of the blocks that are understood. cache_control is taken as it comes: all prompts are cached anyway.
_FIELDS: dict[str, set[str]] = {
    "text": {"text"},
    "tool_use": {"id", "name", "input"},
    "tool_result": {"tool_use_id", "content", "is_error"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "caller": ({"type": "direct"},),
    "citations": ([],),
    "toolset_name": (),
}
_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}


def check_mark(mark: Any, where: str) -> None:
    """Raises RequestError unless it is what `cache_control` may be. All prompts are cached anyway, and for as long."""
    if mark is None:
        return
    if not isinstance(mark, dict) or mark.get("type") != "ephemeral" or mark.get("ttl", "5m") not in ("5m", "1h"):
        raise invalid(where, "must be {type: ephemeral}, with ttl 5m or 1h if any.")
    only(mark, where, ("type", "ttl"))


def system_text(system: Content) -> str:
    """The system prompt as one text. Raises RequestError naming the block at fault."""
    return _joined(_blocks(system, "system", ("text",)))


def messages_of(turns: list[tuple[str, Content]]) -> list[dict[str, Any]]:
    """Turns (role, content) as OpenAI-like messages. Raises RequestError naming the block at fault."""
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for place, (role, content) in enumerate(turns):
        where = f"messages[{place}]"
        if role not in ROLES:
            raise invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {role[:40]!r}.")
        blocks = _blocks(content, f"{where}.content", _OF_ROLE[role])
        if role == "assistant":
            messages.append(_assistant(blocks))
            names |= {block["id"]: block["name"] for block in blocks if block["type"] == "tool_use"}
        else:
            messages += _others(role, blocks, names)
    return _merged(messages)


def _blocks(content: Content, where: str, allowed: Collection[str]) -> list[Block]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [_block(block, f"{where}[{place}]", allowed) for place, block in enumerate(content)]


def _block(block: Block, where: str, allowed: Collection[str]) -> Block:
    check_mark(block.get("cache_control"), f"{where}.cache_control")
    clean = {key: value for key, value in block.items() if value is not None and key != "cache_control"}
    kind = clean.get("type")
    if not isinstance(kind, str) or kind not in allowed:
        raise unsupported(f"{where}.type", f"{str(kind)[:40]!r} is not supported here; {', '.join(allowed)} is")
    fields = _FIELDS[kind]
    only(clean, where, {"type", *fields}, _NEUTRAL)
    for key in fields & {"text", "id", "name", "tool_use_id", "thinking"}:
        if not isinstance(clean.get(key), str):
            raise invalid(f"{where}.{key}", "must be a string.")
    if kind == "tool_use" and not isinstance(clean.get("input"), dict):
        raise invalid(f"{where}.input", "must be an object.")
    if kind == "tool_result":
        given = clean.get("content", "")
        if not isinstance(given, str) and not (isinstance(given, list) and all(isinstance(b, dict) for b in given)):
            raise invalid(f"{where}.content", "must be text or a list of blocks.")
        clean["content"] = _joined(_blocks(given, f"{where}.content", ("text",)))
    return clean


def _assistant(blocks: list[Block]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _joined(blocks)}
    if thought := "\n".join(block["thinking"] for block in blocks if block["type"] == "thinking"):
        message["reasoning_content"] = thought
    calls = [_call(block) for block in blocks if block["type"] == "tool_use"]
    return message | {"tool_calls": calls} if calls else message


def _call(block: Block) -> dict[str, Any]:
    arguments = msgspec.json.encode(block["input"]).decode()
    return {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": arguments}}


def _others(role: str, blocks: list[Block], names: dict[str, str]) -> list[dict[str, Any]]:
    """A user's or the system's turn: results of tools first, as each answers a call of the turn before."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] == "tool_result":
            text = ("Error: " if block.get("is_error") else "") + block["content"]
            result = {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}
            name = names.get(block["tool_use_id"])
            messages.append(result | {"name": name} if name else result)
    texts = [block for block in blocks if block["type"] == "text"]
    return [*messages, {"role": role, "content": _joined(texts)}] if texts or not messages else messages


def _joined(blocks: list[Block]) -> str:
    return "\n".join(block["text"] for block in blocks if block["type"] == "text")


def _merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns of a user that follow each other are one, as in Anthropic's own API: many templates take no two."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        if merged and message["role"] == "user" == merged[-1]["role"]:
            merged[-1] = {**message, "content": f"{merged[-1]['content']}\n{message['content']}"}
        else:
            merged.append(message)
    return merged
