"""The Responses API, by the official client."""

from __future__ import annotations

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.resources.responses import Responses

from flowinfer.errors import FlowInferError, RequestError
from flowinfer.message import Call, CallPart, Cancel, Failure, Finish, Piece, TextLogprob
from flowinfer.serve.access import digest_of
from flowinfer.serve.openai.response_store import ResponseStore
from flowinfer.serve.openai.responses import ResponsesRequest
from flowinfer.serve.state import State

TOOL: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}


def pieces(call: Call) -> list[Piece]:
    """An answer with all that there can be: reasoning, text, two calls."""
    end = Finish(reason="stop", prompt_tokens=5, completion_tokens=7, cached_tokens=2, reasoning_tokens=3)
    if not call.tools:
        return [Piece(id=call.id, text="Hel"), Piece(id=call.id, text="lo"), Piece(id=call.id, finish=end)]
    return [
        Piece(id=call.id, reasoning="hm"),
        Piece(id=call.id, reasoning="m", text="I "),
        Piece(id=call.id, text="look", calls=[CallPart(index=0, id="c0", name="look", arguments='{"a"')]),
        Piece(id=call.id, calls=[CallPart(index=0, arguments=": 1}"), CallPart(index=1, id="c1", name="look")]),
        Piece(id=call.id, calls=[CallPart(index=1, arguments="{}")], finish=end),
    ]


def test_every_field_of_the_official_client_is_known() -> None:
    sent = inspect.signature(Responses.create).parameters.keys()
    transport = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert sent - transport <= set(ResponsesRequest.__struct_fields__)


def test_create_retrieve_go_on_and_delete(start: Any) -> None:
    seen: list[Call] = []
    service = start(lambda call: [seen.append(call)] and pieces(call))
    client = service.client()
    first = client.responses.create(model="tiny", input="hi", instructions="Be brief.", max_output_tokens=9)
    assert (first.output_text, first.status) == ("Hello", "completed")
    assert first.usage is not None
    assert (first.usage.input_tokens, first.usage.output_tokens, first.usage.total_tokens) == (5, 7, 12)
    assert first.usage.input_tokens_details.cached_tokens == 2
    assert client.responses.retrieve(first.id).output_text == "Hello"
    client.responses.create(model="tiny", input=[{"role": "user", "content": "more"}], previous_response_id=first.id)
    assert [(m["role"], m["content"]) for m in seen[0].messages or []] == [("system", "Be brief."), ("user", "hi")]
    assert [(m["role"], m["content"]) for m in seen[1].messages or []] == [
        ("user", "hi"),
        ("assistant", "Hello"),
        ("user", "more"),
    ]
    assert seen[0].sampling.max_tokens == 9
    client.responses.delete(first.id)
    for attempt in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            attempt(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="tiny", input="x", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"


def test_the_events_of_a_stream_come_in_order_and_build_the_response(start: Any) -> None:
    client = start(pieces, tools=True).client()
    events = list(client.responses.create(model="tiny", input="hi", tools=[TOOL], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = ["output_item.added", "content_part.added"]
    end = ["content_part.done", "output_item.done"]
    calls = "function_call_arguments"
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *(*text, "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", *end),
        *(*text, "output_text.delta", "output_text.delta", "output_text.done", *end),
        *("output_item.added", f"{calls}.delta", f"{calls}.delta", f"{calls}.done", "output_item.done"),
        *("output_item.added", f"{calls}.delta", f"{calls}.done", "output_item.done"),
        "completed",
    ]
    last = events[-1].response
    kept = client.responses.retrieve(last.id)
    assert kept.output == last.output
    assert [item.type for item in last.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [item.arguments for item in last.output[2:]] == ['{"a": 1}', "{}"]
    assert last.output_text == "I look"


def test_the_clients_own_accumulator_takes_the_stream(start: Any) -> None:
    client = start(pieces, tools=True).client()
    with client.responses.stream(model="tiny", input="hi", tools=[TOOL]) as stream:
        final = stream.until_done().get_final_response()
    assert final.output_text == "I look"


def test_a_tool_loop(start: Any) -> None:
    seen: list[Call] = []
    client = start(lambda call: [seen.append(call)] and pieces(call), tools=True).client()
    first = client.responses.create(model="tiny", input="hi", tools=[TOOL])
    result: Any = {"type": "function_call_output", "call_id": "c0", "output": "42"}
    client.responses.create(model="tiny", input=[result], previous_response_id=first.id, tools=[TOOL])
    again: Any = [{"role": "user", "content": "hi"}, *first.output, result]
    client.responses.create(model="tiny", input=again, tools=[TOOL])
    for call in seen[1:]:
        roles = [message["role"] for message in call.messages or []]
        assert roles == ["user", "assistant", "tool"]
        assistant = (call.messages or [])[1]
        assert [c["id"] for c in assistant["tool_calls"]] == ["c0", "c1"]
        assert assistant["reasoning_content"] == "hmm"
    assert seen[0].tools is not None
    assert seen[0].tools[0]["function"]["name"] == "look"


def test_the_form_of_the_text(start: Any) -> None:
    seen: list[Call] = []
    client = start(lambda call: [seen.append(call)] and pieces(call)).client()
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    client.responses.create(model="tiny", input="hi", text=form)
    grammar = seen[0].sampling.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == ("json", '{"type":"object"}')


def test_background_runs_are_fetched_or_cancelled(service: Any) -> None:
    client = service.client()
    made = client.responses.create(model="tiny", input="hi", background=True)
    assert made.status == "queued"
    call = service.calls.get(timeout=10)
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"
    with service.ctx.news:
        assert service.ctx.news.wait_for(lambda: any(call.id in getattr(e, "ids", ()) for e in service.ctx.sent), 10)
    other = client.responses.create(model="tiny", input="hi", background=True)
    service.say(service.calls.get(timeout=10).id, "done", finish="stop")
    while client.responses.retrieve(other.id).status == "queued":
        threading.Event().wait(0.01)
    assert client.responses.retrieve(other.id).output_text == "done"
    whole = client.responses.cancel(other.id)
    assert (whole.status, whole.output_text) == ("completed", "done")


def test_an_answer_that_is_cut_is_incomplete(start: Any) -> None:
    client = start(lambda call: [Piece(id=call.id, text="a", finish=Finish(reason="length"))]).client()
    response = client.responses.create(model="tiny", input="hi")
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    events = [event.type for event in client.responses.create(model="tiny", input="hi", stream=True)]
    assert events[-1] == "response.incomplete"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"colour": 1}, "colour"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"background": True, "store": False}, "store"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "pope", "content": "x"}]}, "input[0].role"),
        ({"input": []}, "input"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(service: Any, fields: dict[str, Any], param: str) -> None:
    response = httpx.post(f"{service.url}/v1/responses", json={"model": "tiny", "input": "hi"} | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_stream_that_breaks_says_so_at_its_end(service: Any) -> None:
    client, calls = service.client(), []

    def answer() -> None:
        calls.append(service.calls.get(timeout=10))
        service.say(calls[0].id, "some")

    threading.Thread(target=answer).start()
    events = iter(client.responses.create(model="tiny", input="hi", stream=True))
    while next(events).type != "response.output_text.delta":
        pass
    service.put(Failure(id=calls[0].id, status=503, message="The worker died."))
    last = list(events)[-1]
    assert (last.type, last.response.error.message) == ("response.failed", "The worker died.")
    assert client.responses.retrieve(last.response.id).status == "failed"


def test_what_isnt_to_be_stored_isnt(start: Any) -> None:
    client = start(pieces).client()
    response = client.responses.create(model="tiny", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_no_tenant_sees_anothers_responses(start: Any) -> None:
    service = start(pieces, keys={"ann": digest_of("a"), "bob": digest_of("b")})
    ann, bob = (openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0) for key in "ab")
    response = ann.responses.create(model="tiny", input="hi")
    assert ann.responses.retrieve(response.id).id == response.id
    with pytest.raises(openai.NotFoundError):
        bob.responses.retrieve(response.id)


def test_what_is_stored_expires_and_makes_room() -> None:
    store = ResponseStore(State(), ttl_s=10, capacity=405)
    store.put("", {"id": "a", "status": "completed"}, [], 0.0)
    store.put("", {"id": "b", "status": "completed"}, [], 5.0)
    assert store.get("", "a", 9.0).response["id"] == "a"
    with pytest.raises(RequestError):
        store.get("", "a", 10.0)
    assert store.get("", "b", 10.0).response["id"] == "b"
    store.put("", {"id": "big", "status": "completed", "x": "x" * 340}, [], 11.0)
    assert len(store) == 1


def test_the_items_that_led_to_a_response_are_listed(start: Any) -> None:
    client = start(pieces, tools=True).client()
    first = client.responses.create(model="tiny", input="hi", tools=[TOOL])
    result: Any = {"type": "function_call_output", "call_id": "c0", "output": "42"}
    second = client.responses.create(model="tiny", input=[result], previous_response_id=first.id, tools=[TOOL])
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))  # by pages
    kinds = ["message", "reasoning", "message", "function_call", "function_call", "function_call_output"]
    assert [item.type for item in items] == kinds
    assert items[0].content[0].text == "hi"  # type: ignore[union-attr]
    assert len({item.id for item in items}) == 6
    latest = client.responses.input_items.list(second.id, limit=1)
    assert (latest.data[0].type, latest.has_more) == ("function_call_output", True)
    again: Any = [item.to_dict() for item in items]
    assert client.responses.create(model="tiny", input=again, tools=[TOOL]).status == "completed"


def said(logprob: float) -> list[TextLogprob]:
    return [TextLogprob("Hi", logprob, b"Hi", [("Hi", logprob, b"Hi"), ("Yo", -2.0, b"Yo")])]


@pytest.mark.parametrize("fields", [{"top_logprobs": 1}, {"include": ["message.output_text.logprobs"]}])
def test_log_probabilities_go_with_the_text(start: Any, fields: dict[str, Any]) -> None:
    def answer(call: Call) -> Any:
        yield Piece(id=call.id, text="Hi", logprobs=said(-0.5))
        yield Piece(id=call.id, text="Hi", logprobs=said(-0.25), finish=Finish(reason="stop"))

    client = start(answer).client()
    whole = client.responses.create(model="tiny", input="x", **fields).output[0].content[0].logprobs
    events = list(client.responses.create(model="tiny", input="x", stream=True, **fields))
    deltas = [event.logprobs[0].logprob for event in events if event.type == "response.output_text.delta"]
    assert [entry.logprob for entry in whole] == deltas == [-0.5, -0.25]
    assert [top.token for top in whole[0].top_logprobs] == ["Hi", "Yo"]
    bare = client.responses.create(model="tiny", input="x")
    assert bare.output[0].content[0].logprobs == []


def test_extensions_of_chats_are_honoured_here_too(service: Any) -> None:
    extensions = {"ignore_eos": True, "stop": ["END"], "top_k": 5, "seed": 3, "min_tokens": 2, "logit_bias": {"7": 1}}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(service.client().responses.create, model="tiny", input="x", extra_body=extensions)
        call = service.next_call()
        service.say(call.id, "y", finish="stop")
        assert asked.result().output_text == "y"
    sampling = call.sampling
    assert (sampling.ignore_eos, sampling.stop, sampling.top_k, sampling.seed) == (True, ("END",), 5, 3)
    assert (sampling.min_tokens, sampling.logit_bias) == (2, {7: 1.0})


def test_deltas_are_padded_where_that_is_asked_for(start: Any) -> None:
    client = start(pieces).client()
    options: Any = {"include_obfuscation": True}
    events = list(client.responses.create(model="tiny", input="x", stream=True, stream_options=options))
    padded = [event.type for event in events if getattr(event, "obfuscation", None)]
    assert padded == ["response.output_text.delta"] * 2


def test_of_several_calls_the_first_is_told_where_one_is_asked_for(start: Any) -> None:
    client = start(pieces, tools=True).client()
    response = client.responses.create(model="tiny", input="hi", tools=[TOOL], parallel_tool_calls=False)
    assert [item.call_id for item in response.output if item.type == "function_call"] == ["c0"]


def test_a_stream_in_the_background_outlives_its_reader_and_is_read_from_any_event_on(service: Any) -> None:
    client = service.client()
    reader = client.responses.create(model="tiny", input="hi", background=True, stream=True)
    events = iter(reader)
    id = next(events).response.id  # is sent at once: nothing has been computed yet
    call = service.next_call()
    service.say(call.id, "one ")
    while next(events).type != "response.output_text.delta":
        pass
    reader.close()  # and the work goes on
    service.say(call.id, "two", finish="stop")
    rest = list(client.responses.retrieve(id, stream=True, starting_after=1))
    assert [event.sequence_number for event in rest] == list(range(2, 2 + len(rest)))
    assert rest[-1].type == "response.completed"
    assert rest[-1].response.output_text == "one two"
    assert [event.type for event in client.responses.retrieve(id, stream=True, starting_after=1)] == [
        event.type for event in rest
    ]
    assert client.responses.retrieve(id).status == "completed"


def test_a_cancelled_stream_ends_with_an_error(service: Any) -> None:
    client = service.client()
    events = iter(client.responses.create(model="tiny", input="hi", background=True, stream=True))
    id = next(events).response.id
    call = service.next_call()
    assert client.responses.cancel(id).status == "cancelled"
    assert [event.type for event in events][-1] == "error"
    service.wait_sent(Cancel, call.id)
    assert [event.type for event in client.responses.retrieve(id, stream=True)][-1] == "error"


def test_a_background_stream_that_is_not_let_in_fails(service: Any) -> None:
    service.ctx.is_full = True
    client = service.client()
    events = list(client.responses.create(model="tiny", input="hi", background=True, stream=True))
    assert [event.type for event in events] == ["response.created", "response.queued", "response.failed"]
    assert client.responses.retrieve(events[0].response.id).status == "failed"


def test_only_streams_in_the_background_are_read_again(start: Any) -> None:
    client = start(pieces).client()
    made = client.responses.create(model="tiny", input="hi")
    with pytest.raises(openai.BadRequestError, match="background and stream"):
        client.responses.retrieve(made.id, stream=True)


def test_a_restart_keeps_responses_and_fails_what_it_cut(start: Any, tmp_path: Path) -> None:
    before = start(None, state_path=str(tmp_path))
    client = before.client()
    cut = client.responses.create(model="tiny", input="hi", background=True)
    before.next_call()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.responses.create, model="tiny", input="Name a color.")
        before.say(before.next_call().id, "Red.", finish="stop")
        kept = asked.result()
    before.close()
    seen: list[Call] = []
    client = start(lambda call: [seen.append(call)] and pieces(call), state_path=str(tmp_path)).client()
    assert client.responses.retrieve(kept.id).output_text == "Red."
    assert client.responses.retrieve(cut.id).status == "failed"
    client.responses.create(model="tiny", input="Another.", previous_response_id=kept.id)
    assert [message["content"] for message in seen[0].messages or []] == ["Name a color.", "Red.", "Another."]


def test_two_services_cant_share_a_folder(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowinfer.serve.state.LOCK_WAIT_S", 0.0)
    start(None, state_path=str(tmp_path))
    with pytest.raises(FlowInferError, match="another service uses"):
        start(None, state_path=str(tmp_path))


def test_the_tokens_of_a_request_are_counted(start: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="tokenizer"):
        start(pieces).client().responses.input_tokens.count(model="tiny", input="hi")
