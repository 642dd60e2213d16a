"""Agents as they are: the tool runners of the clients, and what coding agents send beside their chats."""

from __future__ import annotations

import inspect
from typing import Any

import anthropic
import pytest
from anthropic.resources.beta.messages import Messages

from flowinfer.message import Call
from flowinfer.serve.anthropic.messages import MessageRequest

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'


@pytest.fixture
def service(start: Any, play: Any) -> Any:
    """Calls its tool once, then says what came of it."""

    def answer(call: Call) -> Any:
        last = (call.messages or [])[-1]
        return play(f"It's {last['content']}." if last["role"] == "tool" else CALL)(call)

    return start(answer, apis=("openai", "anthropic"), tools=True)


def client_of(service: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=service.url, api_key="none", max_retries=0, timeout=10)


@pytest.mark.parametrize("stream", [True, False])
def test_the_tool_runner_of_anthropics_client_runs_its_loop(service: Any, stream: bool) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather.

        Args:
            city: Where.
        """
        asked.append(city)
        return "rain"

    runner: Any = client_of(service).beta.messages.tool_runner(
        model="tiny", max_tokens=50, tools=[weather], messages=[{"role": "user", "content": "Weather?"}], stream=stream
    )
    final = runner.until_done()
    assert asked == ["Köln"]
    assert final.content[0].text == "It's rain."
    assert final.stop_reason == "end_turn"


def test_what_a_coding_agent_sends_is_honoured(service: Any) -> None:
    mark: Any = {"type": "ephemeral"}
    stream: Any = client_of(service).beta.messages.create(
        model="tiny",
        max_tokens=32_000,
        system=[
            {"type": "text", "text": "You are an agent.", "cache_control": mark},
            {"type": "text", "text": "Be brief.", "cache_control": {**mark, "ttl": "1h"}},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": mark}]},
        ],
        tools=[{"name": "weather", "input_schema": {"type": "object"}, "eager_input_streaming": True}],
        metadata={"user_id": "someone"},
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        betas=["interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
        stream=True,
    )
    kinds = [event.type for event in stream]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    counted = client_of(service).beta.messages
    with pytest.raises(anthropic.BadRequestError, match="context_management"):
        counted.create(
            model="tiny",
            max_tokens=9,
            messages=[{"role": "user", "content": "x"}],
            context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        )


def test_every_field_of_the_beta_client_is_known() -> None:
    sent = inspect.signature(Messages.create).parameters.keys()
    transport = {"self", "betas", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert sent - transport <= set(MessageRequest.__struct_fields__)
