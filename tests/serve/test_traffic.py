"""Agents' traffic and people's are told apart: by a header, by a field, else by whether tools are offered."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from flowinfer.message import Call, Finish, Piece

SAY = [{"role": "user", "content": "hi"}]
CHAT_TOOL = {"type": "function", "function": {"name": "f"}}
CLAUDE_TOOL = {"name": "f", "input_schema": {"type": "object"}}
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": SAY}, CHAT_TOOL),
    "responses": ("responses", {"input": "hi"}, {"type": "function", "name": "f"}),
    "messages": ("messages", {"messages": SAY, "max_tokens": 5}, CLAUDE_TOOL),
    "completions": ("completions", {"prompt": "hi"}, {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_header_wins_over_a_field_and_that_over_tools(start: Any, way: str) -> None:
    seen: list[str] = []

    def note(call: Call) -> Any:
        seen.append(call.cache_class)
        yield Piece(id=call.id, text="ok", finish=Finish(reason="stop"))

    service = start(note, tools=True, apis=("openai", "anthropic"))
    path, body, tool = WAYS[way]

    def ask(header: str = "", **fields: Any) -> None:
        headers = {"x-cache-class": header} if header else {}
        answer = httpx.post(f"{service.url}/v1/{path}", json={"model": "tiny"} | body | fields, headers=headers)
        assert answer.status_code == 200, answer.text

    tools = {"tools": [tool]} if tool else {}
    named = {} if way == "messages" else {"cache_class": "nightly"}  # Anthropic's client has no such field
    ask()
    ask(**tools)
    ask(**tools, **named)
    ask("batch", **tools, **named)
    agent = "agent" if tool else "chat"
    assert seen == ["chat", agent, "nightly" if named else agent, "batch"]


@pytest.mark.parametrize("way", WAYS)
def test_a_header_says_how_long_blocks_stay(start: Any, way: str) -> None:
    seen: list[float | None] = []

    def note(call: Call) -> Any:
        seen.append(call.cache_keep_s)
        yield Piece(id=call.id, text="ok", finish=Finish(reason="stop"))

    service = start(note, tools=True, apis=("openai", "anthropic"))
    path, body, _ = WAYS[way]
    field = {} if way == "messages" else {"cache_retention": "1h"}
    for header, more in (("", {}), ("", field), ("0", field), ("soon", {})):
        headers = {"x-cache-retention": header} if header else {}
        answer = httpx.post(f"{service.url}/v1/{path}", json={"model": "tiny"} | body | more, headers=headers)
        assert answer.status_code == (400 if header == "soon" else 200), answer.text
    assert "x-cache-retention" in answer.text
    assert seen == [None, 3600.0 if field else None, 0.0]
