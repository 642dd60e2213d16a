"""Anthropic's Messages API through the official client: whole and streamed answers, blocks, stop reasons, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from flowinfer.message import Call, Cancel, Failure, Finish, Opened, Piece, ToolChoice
from flowinfer.text.tokenizer import load_tokenizer

ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "a"}]}
TOOLS = [{"name": "f", "description": "Does f.", "input_schema": {"type": "object", "properties": {}}}]
ANSWER = (
    '<think>So.</think>\nWell.\n<tool_call>{"name": "f", "arguments": {"city": "Köln"}}</tool_call>\n'
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
)


def client_of(service: Any, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=service.url, api_key="none", max_retries=0, timeout=10, **options)


def started(start: Any, pipeline: Any = None, **settings: Any) -> Any:
    return start(pipeline, apis=("openai", "anthropic"), tools=True, **settings)


@contextmanager
def asked(service: Any, headers: dict[str, str] | None = None, **fields: Any) -> Iterator[tuple[Call, Any]]:
    """A request for a stream, and its call; the response is there once the pipeline has said something."""
    with ThreadPoolExecutor(1) as pool:
        posted = pool.submit(
            httpx.post,
            f"{service.url}/v1/messages",
            json={**ASK, "stream": True, **fields},
            headers=headers,
            timeout=10,
        )
        yield service.next_call(), posted


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message(start: Any, play: Any) -> None:
    answer = client_of(started(start, play(ANSWER))).messages.create(**ASK, tools=TOOLS)
    thought, text, first, second = answer.content
    assert (thought.type, thought.thinking, bool(thought.signature)) == ("thinking", "So.", True)
    assert (text.type, text.text) == ("text", "Well.")
    assert (first.type, first.name, first.input) == ("tool_use", "f", {"city": "Köln"})
    assert (second.input, second.id != first.id) == ({}, True)
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("tool_use", None, "assistant")
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens, answer.usage.output_tokens) == (5, 4, 5)


def test_the_clients_accumulator_takes_the_stream(start: Any, play: Any) -> None:
    client = client_of(started(start, play(ANSWER)))
    whole = client.messages.create(**ASK, tools=TOOLS)
    with client.messages.stream(**ASK, tools=TOOLS) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == "Well."
    assert [block.model_dump(exclude={"id"}) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    assert (final.stop_reason, final.usage.input_tokens, final.usage.output_tokens) == ("tool_use", 5, 5)
    assert final.usage.cache_read_input_tokens == 4


def test_events_come_in_order_and_each_delta_fits_its_block(start: Any, play: Any) -> None:
    events = list(client_of(started(start, play(ANSWER))).messages.create(**ASK, tools=TOOLS, stream=True))
    assert (events[0].type, events[-2].type, events[-1].type) == ("message_start", "message_delta", "message_stop")
    kinds: dict[int, str] = {}
    fits = {
        "thinking": ("thinking_delta", "signature_delta"),
        "text": ("text_delta",),
        "tool_use": ("input_json_delta",),
    }
    open_block = None
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert (open_block, event.index) == (None, len(kinds))
            open_block = kinds[event.index] = event.content_block.type
        elif event.type == "content_block_delta":
            assert event.delta.type in fits[kinds[event.index]]
        elif event.type == "content_block_stop":
            assert event.index == len(kinds) - 1
            open_block = None
    assert list(kinds.values()) == ["thinking", "text", "tool_use", "tool_use"]
    assert open_block is None


def test_a_stream_begins_with_the_tokens_of_its_prompt(start: Any, play: Any) -> None:
    client = client_of(started(start, play("Hi.")))
    first, *_ = client.messages.create(**ASK, stream=True)
    usage = first.message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (5, 4, 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["request", "system", "tools", "message"])
def test_what_the_prompt_put_into_the_cache_is_told_where_it_was_marked(
    start: Any, play: Any, where: str, stream: bool
) -> None:
    client, mark = client_of(started(start, play("Hi."))), {"cache_control": {"type": "ephemeral"}}
    text = {"type": "text", "text": "Hello", **mark}
    marked: dict[str, dict[str, Any]] = {
        "request": {"extra_body": mark},
        "system": {"system": [text]},
        "tools": {"tools": [{**TOOLS[0], **mark}]},
        "message": {"messages": [{"role": "user", "content": [text]}]},
    }
    ask = {**ASK, **marked[where]}
    if stream:
        with client.messages.stream(**ask) as events:
            usage = events.get_final_message().usage
    else:
        usage = client.messages.create(**ask).usage
    told = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    assert told == (2, 4, 3)


def test_the_form_and_the_effort_that_are_asked_for(start: Any, play: Any) -> None:
    seen: list[Call] = []

    def answer(call: Call) -> Any:
        seen.append(call)
        return play('{"a": 1}')(call)

    client = client_of(started(start, answer))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    client.messages.create(**ASK, output_config=form, thinking={"type": "adaptive"})
    client.messages.create(**ASK, output_config=form)
    assert seen[0].sampling.grammar is not None
    assert json.loads(seen[0].sampling.grammar.text) == schema
    assert [call.template_args["reasoning_effort"] for call in seen] == ["low", "none"]


def test_signs_of_life_before_the_first_token_are_no_events(start: Any) -> None:
    service = started(start, None, keepalive="50ms")
    with httpx.stream("POST", f"{service.url}/v1/messages", json={**ASK, "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines) == ": keep-alive"
        call = service.next_call()
        service.say(call.id, "Hi.", opened=Opened(prompt_tokens=9))
        assert next(line for line in lines if line and line[0] != ":") == "event: message_start"
        assert json.loads(next(lines)[6:])["message"]["usage"]["input_tokens"] == 9
        service.say(call.id, finish="stop")


def test_arguments_stream_in_many_deltas(start: Any, play: Any) -> None:
    long = '<tool_call>{"name": "f", "arguments": {"code": "' + "x" * 400 + '"}}</tool_call>'
    events = client_of(started(start, play(long))).messages.create(**ASK, tools=TOOLS, stream=True)
    deltas = [e.delta.partial_json for e in events if e.type == "content_block_delta"]
    assert len(deltas) > 3  # pieces that wait for the reader are joined
    assert json.loads("".join(deltas)) == {"code": "x" * 400}


def test_a_stream_opens_with_a_ping(start: Any, play: Any) -> None:
    service = started(start, play("Hi."))
    body = httpx.post(f"{service.url}/v1/messages", json={**ASK, "stream": True}).text
    names = [line[7:] for line in body.splitlines() if line.startswith("event: ")]
    assert names[:2] == ["message_start", "ping"]
    assert "[DONE]" not in body


@pytest.mark.parametrize(
    ("answer", "finish", "reason", "stop"),
    [
        ("Hi.", Finish(reason="stop", stop=2), "end_turn", None),
        ("Hi.", Finish(reason="stop", stop="END"), "stop_sequence", "END"),
        ("Hi.", Finish(reason="length"), "max_tokens", None),
        (ANSWER, Finish(reason="stop", stop=2), "tool_use", None),
        (ANSWER, Finish(reason="length"), "max_tokens", None),
        (ANSWER[:-30], Finish(reason="stop", stop="x"), "stop_sequence", "x"),
        ("", Finish(reason="stop", stop=2), "end_turn", None),
    ],
)
def test_the_stop_reason_is_right(
    start: Any, play: Any, answer: str, finish: Finish, reason: str, stop: str | None
) -> None:
    client = client_of(started(start, play(answer, finish=finish)))
    whole = client.messages.create(**ASK, tools=TOOLS)
    with client.messages.stream(**ASK, tools=TOOLS) as stream:
        streamed = stream.get_final_message()
    assert (whole.stop_reason, whole.stop_sequence) == (streamed.stop_reason, streamed.stop_sequence) == (reason, stop)


def test_what_the_request_says_reaches_the_pipeline(start: Any) -> None:
    service = started(start)
    body = ASK | {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "temperature": 0.5,
        "top_k": 3,
        "stop_sequences": ["END"],
        "metadata": {"user_id": "u"},
        "tools": TOOLS,
        "cache_control": {"type": "ephemeral"},
    }
    with asked(service, **body) as (call, _):
        service.say(call.id, "Hi.", finish="stop")
    assert call.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_k, sampling.stop, sampling.max_tokens) == (0.5, 3, ("END",), 50)
    assert call.tools == [
        {
            "type": "function",
            "function": {"name": "f", "parameters": TOOLS[0]["input_schema"], "description": "Does f."},
        }
    ]
    assert (call.cache_class, call.template_args) == ("agent", {"reasoning_effort": "none"})


def test_a_tool_loop(start: Any, play: Any) -> None:
    seen: list[Call] = []

    def pipeline(call: Call) -> Any:
        seen.append(call)
        yield from play(ANSWER if len(seen) == 1 else "It is noon.")(call)

    client = client_of(started(start, pipeline))
    first = client.messages.create(**ASK, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024})
    uses = [block for block in first.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "noon"} for use in uses]
    results[1]["is_error"] = True
    turns = [*ASK["messages"], {"role": "assistant", "content": first.content}]
    turns.append({"role": "user", "content": [*results, {"type": "text", "text": "And?"}]})
    second = client.messages.create(**(ASK | {"messages": turns}), tools=TOOLS)
    assert (text_of(second), second.stop_reason) == ("It is noon.", "end_turn")
    assert seen[0].template_args == {"reasoning_effort": "high"}
    messages = seen[1].messages
    assert messages is not None
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user"]
    assert (messages[1]["content"], messages[1]["reasoning_content"]) == ("Well.", "So.")
    assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"city":"Köln"}'}
    assert messages[2] == {"role": "tool", "tool_call_id": uses[0].id, "content": "noon", "name": "f"}
    assert (messages[3]["content"], messages[4]["content"]) == ("Error: noon", "And?")


def test_the_async_client(start: Any, play: Any) -> None:
    service = started(start, play(ANSWER))

    async def ask() -> Any:
        client = anthropic.AsyncAnthropic(base_url=service.url, api_key="none", timeout=10)
        async with client, client.messages.stream(**ASK, tools=TOOLS) as stream:
            return await stream.get_final_message()

    assert [block.type for block in asyncio.run(ask()).content] == ["thinking", "text", "tool_use", "tool_use"]


def test_one_call_at_a_time_where_asked(start: Any, play: Any) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer = client_of(started(start, play(ANSWER))).messages.create(**ASK, tools=TOOLS, tool_choice=choice)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any"}, ToolChoice(required=True)),
        ({"type": "tool", "name": "f", "disable_parallel_tool_use": True},
         ToolChoice(required=True, names=("f",), parallel=False)),
    ],
)  # fmt: skip
def test_a_tool_choice_reaches_the_pipeline(start: Any, choice: Any, wanted: ToolChoice) -> None:
    def tell(call: Call) -> Any:
        told = (call.tool_choice == wanted, [tool["function"].get("strict") for tool in call.tools or ()])
        yield Piece(id=call.id, text=str(told), finish=Finish(reason="stop"))

    tools = [*TOOLS, {"name": "g", "input_schema": {"type": "object"}, "strict": True}]
    answer = client_of(started(start, tell)).messages.create(**ASK, tools=tools, tool_choice=choice)
    assert text_of(answer) == "(True, [None, True])"


def test_turns_of_a_user_that_follow_each_other_are_one(start: Any) -> None:
    def echo(call: Call) -> Any:
        yield Piece(id=call.id, text=str(call.messages), finish=Finish(reason="stop"))

    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    answer = client_of(started(start, echo)).messages.create(**(ASK | {"messages": turns}))
    assert text_of(answer) == "[{'role': 'user', 'content': 'a\\nb'}]"


def test_a_begun_answer_is_gone_on_with(start: Any) -> None:
    def tell(call: Call) -> Any:
        yield Piece(id=call.id, text=str(call.template_args), finish=Finish(reason="stop"))

    turns = [*ASK["messages"], {"role": "assistant", "content": "So"}]
    answer = client_of(started(start, tell)).messages.create(**(ASK | {"messages": turns}))
    assert "'continue_final_message': True" in text_of(answer)


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]}, "assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}, "content[0].x"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "content[0].tool_use_id"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nobody"}}, "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"container": "x"}, "container"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(start: Any, fields: dict[str, Any], word: str) -> None:
    response = httpx.post(f"{started(start).url}/v1/messages", json=ASK | fields)
    error = response.json()
    assert (response.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert word in error["error"]["message"]


def test_a_missing_max_tokens_is_named(start: Any) -> None:
    body = {key: value for key, value in ASK.items() if key != "max_tokens"}
    response = httpx.post(f"{started(start).url}/v1/messages", json=body)
    assert (response.status_code, "max_tokens" in response.json()["error"]["message"]) == (400, True)


def test_an_unknown_model_and_path(start: Any) -> None:
    service = started(start)
    with pytest.raises(anthropic.NotFoundError):
        client_of(service).messages.create(**(ASK | {"model": "other"}))
    response = httpx.get(f"{service.url}/v1/messages/none")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    assert response.headers["request-id"]


def test_a_full_service_is_overloaded(start: Any) -> None:
    service = started(start, max_requests=1)
    with asked(service) as (call, _):
        with pytest.raises(anthropic.APIStatusError) as caught:
            client_of(service).messages.create(**ASK)
        service.say(call.id, "Hi.", finish="stop")
    error: Any = caught.value
    assert (error.status_code, error.body["error"]["type"]) == (529, "overloaded_error")
    assert error.response.headers["retry-after"]


def test_a_stream_that_breaks_ends_in_an_error_event(start: Any) -> None:
    def broken(call: Call) -> Any:
        yield Piece(id=call.id, text="Hi", tokens=[1])
        yield Failure(id=call.id, message="It went wrong.", code="stage_failed")

    service = started(start, broken)
    with (
        pytest.raises(anthropic.APIStatusError, match="went wrong"),
        client_of(service).messages.stream(**ASK) as stream,
    ):
        stream.get_final_message()


def test_a_client_that_goes_away_stops_the_work(start: Any) -> None:
    seen: list[str] = []

    def endless(call: Call) -> Any:
        seen.append(call.id)
        yield Piece(id=call.id, text="Hi", tokens=[1])

    service = started(start, endless)
    with httpx.stream("POST", f"{service.url}/v1/messages", json={**ASK, "stream": True}) as response:
        next(response.iter_raw())
    service.wait_sent(Cancel, seen[0])


def test_the_models_list_reads_in_both_clients(start: Any) -> None:
    service = started(start)
    assert [model.id for model in client_of(service).models.list()] == ["tiny"]
    assert [model.id for model in service.client().models.list()] == ["tiny"]


def test_without_the_api_there_is_no_route(start: Any) -> None:
    assert httpx.post(f"{start().url}/v1/messages", json=ASK).status_code == 404


def test_a_header_names_the_cache_class(start: Any) -> None:
    service = started(start)
    with asked(service, {"x-cache-class": "nightly"}) as (call, _):
        service.say(call.id, "Hi.", finish="stop")
    assert call.cache_class == "nightly"
    refused = httpx.post(f"{service.url}/v1/messages", json=ASK, headers={"x-cache-class": "no spaces"})
    assert refused.status_code == 400


def test_count_tokens_counts_what_the_pipeline_tokenizes(start: Any) -> None:
    tiny = Path(__file__).parents[1] / "data" / "tiny_chat"
    tokenizer = load_tokenizer(tiny)
    client = client_of(start(models=(str(tiny),), apis=("anthropic",)))
    turns = [{"role": "user", "content": "What is <|im_end|>?"}]
    counted = client.messages.count_tokens(model=str(tiny), system="Be brief.", messages=turns)
    rendered = tokenizer.render([{"role": "system", "content": "Be brief."}, *turns])
    assert counted.input_tokens == len(tokenizer.encode_segments(rendered))
