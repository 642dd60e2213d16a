"""Tool calls and reasoning as the official OpenAI client reads them, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowinfer.message import Call, Finish, Piece

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "tools": TOOLS}
ANSWER = (
    '<think>So.</think>\nWell.\n<tool_call>{"name": "f", "arguments": {"city": "Köln"}}</tool_call>\n'
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
)


def test_an_answer_with_calls(start: Any, play: Any) -> None:
    answer = start(play(ANSWER), tools=True).client().chat.completions.create(**ASK)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Well.")
    assert choice.message.reasoning_content == choice.message.reasoning == "So."
    calls = choice.message.tool_calls
    assert [(call.type, call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("function", "f", {"city": "Köln"}),
        ("function", "f", {}),
    ]
    assert len({call.id for call in calls}) == 2
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2


def test_the_clients_accumulator_takes_the_stream(start: Any, play: Any) -> None:
    client = start(play(ANSWER), tools=True).client()
    whole = client.chat.completions.create(**ASK).choices[0].message
    reasoning, arguments = "", 0
    with client.chat.completions.stream(**ASK) as stream:
        for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                reasoning += getattr(event.chunk.choices[0].delta, "reasoning", "")
            arguments += event.type == "tool_calls.function.arguments.delta"
        final = stream.get_final_completion().choices[0]
    assert (final.finish_reason, final.message.content, reasoning) == ("tool_calls", "Well.", "So.")
    assert arguments > 3  # they come as they are written
    shown = [(call.function.name, call.function.arguments) for call in final.message.tool_calls]
    assert shown == [(call.function.name, call.function.arguments) for call in whole.tool_calls]


def test_one_call_at_a_time_where_asked(start: Any, play: Any) -> None:
    client = start(play(ANSWER), tools=True).client()
    message = client.chat.completions.create(**ASK, parallel_tool_calls=False).choices[0].message
    assert len(message.tool_calls) == 1
    chunks = client.chat.completions.create(**ASK, parallel_tool_calls=False, stream=True)
    assert {part.index for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()} == {0}


@pytest.mark.parametrize(
    ("finish", "reason"), [(Finish(reason="length"), "length"), (Finish(reason="stop", stop="x"), "stop")]
)
def test_a_call_that_was_cut_is_not_one_to_act_on(start: Any, play: Any, finish: Finish, reason: str) -> None:
    client = start(play(ANSWER[:-30], finish=finish), tools=True).client()
    assert client.chat.completions.create(**ASK).choices[0].finish_reason == reason


def test_a_tool_loop_brings_the_results_to_the_template(start: Any, play: Any) -> None:
    seen: list[Call] = []

    def pipeline(call: Call) -> Any:
        seen.append(call)
        said = ANSWER if len(seen) == 1 else "It is noon."
        yield from play(said)(call)

    client = start(pipeline, tools=True).client()
    first = client.chat.completions.create(**ASK).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "noon"} for call in first.tool_calls]
    history = [*ASK["messages"], first.model_dump(exclude_none=True), *results]
    second = client.chat.completions.create(**(ASK | {"messages": history})).choices[0]
    assert (second.finish_reason, second.message.content) == ("stop", "It is noon.")
    assert seen[1].messages is not None
    assert [message["role"] for message in seen[1].messages] == ["user", "assistant", "tool", "tool"]
    assert seen[1].messages[1]["reasoning_content"] == "So."
    assert {message["name"] for message in seen[1].messages[2:]} == {"f"}


def test_a_slow_reader_gets_whole_calls(start: Any, play: Any) -> None:
    """Pieces that wait are joined: what was said doesn't change."""
    client = start(play(ANSWER), tools=True, reader_buffer="1KiB").client()
    chunks = client.chat.completions.create(**ASK, stream=True)
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    joined = ["".join(part.function.arguments for part in parts if part.index == index) for index in (0, 1)]
    assert [json.loads(text) for text in joined] == [{"city": "Köln"}, {}]
    assert [part.index for part in parts if part.id] == [0, 1]


def test_text_without_tools_is_untouched(start: Any) -> None:
    def plain(call: Call) -> Any:
        yield Piece(id=call.id, text=ANSWER, tokens=[1])
        yield Piece(id=call.id, finish=Finish(reason="stop"))

    message = start(plain).client().chat.completions.create(**(ASK | {"tools": []})).choices[0].message
    assert (message.content, message.tool_calls) == (ANSWER, None)
