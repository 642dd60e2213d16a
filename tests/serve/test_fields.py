"""Every field of a request is honoured or refused by its name."""

from __future__ import annotations

import inspect
import json
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.resources.chat.completions import Completions as ChatResource
from openai.resources.completions import Completions as CompletionResource

from flowinfer.errors import RequestError
from flowinfer.message import ToolChoice
from flowinfer.serve.openai.chat import ChatRequest, chat_job
from flowinfer.serve.openai.completions import CompletionRequest, completion_job
from flowinfer.serve.openai.decode import decode
from flowinfer.serve.openai.job import Job, Limits

LIMITS = Limits(models=("tiny",), max_requests=64, default_max_tokens=1000, tools=False)
USER = [{"role": "user", "content": "hi"}]
TRANSPORT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}


def chat(limits: Limits = LIMITS, **fields: Any) -> Job:
    body = {"model": "tiny", "messages": USER} | fields
    return chat_job(decode(ChatRequest, json.dumps(body).encode()), "chatcmpl-1", limits)


def complete(**fields: Any) -> Job:
    body = {"model": "tiny", "prompt": "hi"} | fields
    return completion_job(decode(CompletionRequest, json.dumps(body).encode()), "cmpl-1", LIMITS)


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.status in (400, 404)
    return caught.value


@pytest.mark.parametrize(
    ("create", "request_type"),
    [(ChatResource.create, ChatRequest), (CompletionResource.create, CompletionRequest)],
)
def test_every_field_of_the_official_client_is_known(create: Any, request_type: Any) -> None:
    sent = inspect.signature(create).parameters.keys() - TRANSPORT
    assert sent <= set(request_type.__struct_fields__)


@pytest.mark.parametrize("field", sorted(set(ChatRequest.__struct_fields__) - {"model", "messages"}))
def test_null_is_the_same_as_leaving_a_field_out(field: str) -> None:
    assert len(chat(**{field: None}).calls) == 1


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperature", 2.1, "temperature"),
        ("temperature", -0.1, "temperature"),
        ("top_p", 0, "top_p"),
        ("top_p", 1.5, "top_p"),
        ("top_k", -2, "top_k"),
        ("min_p", 1.1, "min_p"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("presence_penalty", 2.5, "presence_penalty"),
        ("frequency_penalty", -2.5, "frequency_penalty"),
        ("max_tokens", 0, "max_tokens"),
        ("max_completion_tokens", -1, "max_completion_tokens"),
        ("max_tokens", 10**30, "max_tokens"),
        ("n", 0, "n"),
        ("n", 65, "n"),
        ("stop", [""], "stop"),
        ("stop", ["x"] * 17, "stop"),
        ("stop_token_ids", [-1], "stop_token_ids"),
        ("logit_bias", {"one": 1}, "logit_bias"),
        ("logit_bias", {"1": 101}, "logit_bias.1"),
        ("logit_bias", {"9" * 5000: 1}, "logit_bias"),
        ("top_logprobs", 3, "top_logprobs"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("cache_salt", "x" * 300, "cache_salt"),
        ("cache_retention", "soon", "cache_retention"),
        ("cache_retention", 60, "cache_retention"),
        ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs.messages"),
        ("messages", [], "messages"),
        ("messages", [{"role": "pope", "content": "x"}], "messages[0].role"),
        ("messages", [{"role": "user"}], "messages[0].content"),
        ("messages", [{"role": "user", "content": 3}], "messages[0].content"),
        ("messages", [{"role": "user", "content": "x", "colour": 1}], "messages[0].colour"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ("messages", [{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages[0].role"),
        ("model", 3, "model"),
        ("max_tokens", "5", "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"),
        ("best_of", 2, "best_of"),
        ("colour", "red", "colour"),
        ("stream_options", {"colour": True}, "stream_options.colour"),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_of_its_field(field: str, value: Any, param: str) -> None:
    error = refused(**{field: value})
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("modalities", ["audio"]),
        ("audio", {"voice": "x"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("service_tier", "priority"),
        ("store", True),
        ("web_search_options", {}),
        ("verbosity", "low"),
        ("moderation", {}),
        ("prompt_cache_options", {"mode": "explicit"}),
        ("prompt_cache_retention", "48h"),
    ],
)
def test_what_the_pipeline_cannot_do_is_refused_by_name(field: str, value: Any) -> None:
    error = refused(**{field: value})
    assert error.code == "unsupported_parameter"
    assert error.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
        ("service_tier", "auto"),
        ("store", False),
        ("metadata", {"a": "b"}),
        ("user", "me"),
        ("safety_identifier", "me"),
        ("prompt_cache_key", "k"),
        ("parallel_tool_calls", True),
    ],
)
def test_what_changes_nothing_is_taken(field: str, value: Any) -> None:
    assert len(chat(**{field: value}).calls) == 1


def test_an_unknown_model_is_404() -> None:
    error = refused(model="gpt-5")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert "tiny" in error.message


def test_a_service_that_names_no_model_answers_to_any_name() -> None:
    limits = Limits(models=(), max_requests=64, default_max_tokens=1000, tools=False)
    assert len(chat(limits, model="whatever").calls) == 1


def test_sampling_arrives_as_asked() -> None:
    (call,) = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        seed=7,
        stop=["a", "b"],
        stop_token_ids=[2],
        ignore_eos=True,
        logit_bias={"5": -100},
        max_completion_tokens=9,
        min_tokens=3,
        logprobs=True,
        top_logprobs=4,
        cache_salt="tenant",
        cache_class="agent",
    ).calls
    s = call.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.repetition_penalty) == (0.5, 0.9, 40, 0.1, 1.1)
    assert (s.presence_penalty, s.frequency_penalty, s.seed, s.stop) == (0.2, -0.3, 7, ("a", "b"))
    assert (s.stop_token_ids, s.ignore_eos, s.logit_bias) == ((2,), True, {5: -100.0})
    assert (s.max_tokens, s.min_tokens, s.logprobs) == (9, 3, 4)
    assert (call.cache_salt, call.cache_class) == ("tenant", "agent")


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, None),
        ({"cache_retention": "3d"}, 259_200.0),
        ({"cache_retention": "0"}, 0.0),
        ({"cache_retention": 0}, 0.0),
        ({"prompt_cache_retention": "24h"}, 86_400.0),
        ({"prompt_cache_retention": "in_memory"}, None),
        ({"prompt_cache_retention": "24h", "cache_retention": 0}, 0.0),
    ],
)
def test_a_request_says_how_long_its_blocks_stay(fields: dict[str, Any], seconds: float | None) -> None:
    assert chat(**fields).calls[0].cache_keep_s == seconds


@pytest.mark.parametrize(
    ("written", "in_memory"), [("in_memory", True), ("in-memory", True), ("24h", False), (None, False)]
)
def test_a_request_says_that_its_blocks_stay_in_memory(written: str | None, in_memory: bool) -> None:
    assert chat(prompt_cache_retention=written).calls[0].cache_in_memory is in_memory


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json", {"type": "object"}, "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "json",
            SCHEMA,
            "response_format.json_schema.schema",
        ),
        ({"guided_json": SCHEMA}, "json", SCHEMA, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "json", SCHEMA, "guided_json"),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"], "guided_choice"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"], "structured_outputs.choice"),
    ],
)
def test_the_form_of_the_answer_arrives_as_a_grammar(fields: Any, kind: str, text: Any, param: str) -> None:
    for job in (chat(**fields), complete(**fields)):
        grammar = job.calls[0].sampling.grammar
        assert grammar is not None
        assert (grammar.kind, json.loads(grammar.text), grammar.param) == (kind, text, param)


def test_regex_and_grammar_are_taken_as_they_are() -> None:
    for name, kind in (("regex", "regex"), ("grammar", "lark")):
        grammar = chat(**{f"guided_{name}": "x"}).calls[0].sampling.grammar
        assert grammar is not None
        assert (grammar.kind, grammar.text, grammar.param) == (kind, "x", f"guided_{name}")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}, "guided_regex": "x"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "x", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "x" * 300_000}, "guided_regex"),
        ({"structured_outputs": {"colour": 1}}, "structured_outputs.colour"),
    ],
)
def test_a_wrong_form_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_a_chat_without_a_limit_gets_the_default() -> None:
    assert chat().calls[0].sampling.max_tokens == 1000
    assert complete().calls[0].sampling.max_tokens == 16


def test_two_limits_must_agree() -> None:
    assert chat(max_tokens=5, max_completion_tokens=5).calls[0].sampling.max_tokens == 5
    assert refused(max_tokens=5, max_completion_tokens=6).param == "max_tokens"


def test_choices_differ_in_id_and_seed() -> None:
    job = chat(n=3, seed=11)
    assert [call.id for call in job.calls] == ["chatcmpl-1#0", "chatcmpl-1#1", "chatcmpl-1#2"]
    seeds = [call.sampling.seed for call in job.calls]
    assert seeds[0] == 11
    assert len(set(seeds)) == 3
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)


def test_a_request_without_a_seed_draws_one() -> None:
    assert chat().calls[0].sampling.seed != chat().calls[0].sampling.seed


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (call,) = chat(messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]).calls
    assert call.messages == [{"role": "system", "content": "x"}, {"role": "user", "content": "ab"}]


def test_a_pipeline_with_tools_gets_them() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    limits = Limits(models=("tiny",), max_requests=64, default_max_tokens=1000, tools=True)
    assert chat(limits, tools=tools).calls[0].tools == tools
    assert chat(limits, tools=tools, tool_choice="none").calls[0].tools is None


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("required", ToolChoice(required=True)),
        (NAMED, ToolChoice(required=True, names=("f",))),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}, ToolChoice(names=("f",))),
    ],
)
def test_a_tool_choice_reaches_the_pipeline(choice: Any, wanted: ToolChoice) -> None:
    limits = Limits(models=("tiny",), max_requests=64, default_max_tokens=1000, tools=True)
    tools = [NAMED, {"type": "function", "function": {"name": "g", "strict": True}}]
    (call,) = chat(limits, tools=tools, tool_choice=choice).calls
    assert (call.tool_choice, call.tools) == (wanted, tools)
    (call,) = chat(limits, tools=tools, tool_choice=choice, parallel_tool_calls=False).calls
    assert call.tool_choice == msgspec.structs.replace(wanted, parallel=False)


def test_effort_reaches_the_template() -> None:
    assert chat(reasoning_effort="high").calls[0].template_args == {"reasoning_effort": "high"}
    own = chat(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False}).calls[0].template_args
    assert own == {"reasoning_effort": "high", "enable_thinking": False}


def test_a_begun_answer_reaches_the_template() -> None:
    begun = [*USER, {"role": "assistant", "content": "So"}]
    assert chat(messages=begun, continue_final_message=True).calls[0].template_args == {"continue_final_message": True}
    assert chat(messages=begun).calls[0].template_args == {}
    assert refused(continue_final_message=True).param == "continue_final_message"


TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "function", "function": {"name": ""}}]}, "tools[1].function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
        ({"messages": [*USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": 3}]}]}, "messages[0].tool_calls[0].id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}]},
         "messages[0].tool_calls[0].function"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_honoured_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(Limits(models=("tiny",), max_requests=64, default_max_tokens=1000, tools=True), **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_results_get_the_name_of_their_tool() -> None:
    limits = Limits(models=("tiny",), max_requests=64, default_max_tokens=1000, tools=True)
    history = [*USER, {"role": "assistant", "reasoning": "Hm.", "tool_calls": [CALL]}]
    (call,) = chat(limits, messages=[*history, {"role": "tool", "tool_call_id": "a", "content": "noon"}]).calls
    assert call.messages is not None
    assert call.messages[1] == {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]}
    assert call.messages[2] == {"role": "tool", "tool_call_id": "a", "content": "noon", "name": "f"}


def test_requests_with_tools_are_agents_unless_they_say_otherwise() -> None:
    limits = Limits(models=("tiny",), max_requests=64, default_max_tokens=1000, tools=True)
    assert chat().calls[0].cache_class == "chat"
    assert chat(limits, tools=[TOOL]).calls[0].cache_class == "agent"
    assert chat(limits, tools=[TOOL], cache_class="chat").calls[0].cache_class == "chat"


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"prompt": "a"}, None),
        ({"prompt": "a", "echo": True}, None),
        ({"prompt": "a", "echo": True, "logprobs": 2}, 2),
        ({"prompt": "a", "prompt_logprobs": 3, "echo": True, "logprobs": 2}, 3),
        ({"prompt": [5], "echo": True}, 0),
        ({"prompt": [5], "prompt_logprobs": 0}, 0),
    ],
)
def test_logprobs_of_a_prompt_are_asked_for_where_the_answer_needs_them(fields: dict[str, Any], asked: Any) -> None:
    assert [call.sampling.prompt_logprobs for call in complete(**fields).calls] == [asked]


def test_choices_of_a_chat_share_a_prompt_which_one_of_them_scores() -> None:
    calls = chat(n=3, prompt_logprobs=1).calls
    assert [call.sampling.prompt_logprobs for call in calls] == [1, None, None]


def test_prompts_come_in_four_shapes() -> None:
    assert [call.prompt for call in complete(prompt="a").calls] == ["a"]
    assert [call.prompt for call in complete(prompt=["a", "b"]).calls] == ["a", "b"]
    (call,) = complete(prompt=[1, 2]).calls
    assert call.prompt.dtype == "int32"
    assert call.prompt.tolist() == [1, 2]
    assert [call.prompt.tolist() for call in complete(prompt=[[1], [2, 3]], n=1).calls] == [[1], [2, 3]]


@pytest.mark.parametrize("prompt", [[], [[]], ["a", 1], [-1], [2**31], [[2**40]], None, 3, {}])
def test_a_wrong_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        complete(prompt=prompt)
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith("prompt")


@pytest.mark.parametrize("fields", [{"suffix": "x"}, {"best_of": 3}, {"logprobs": 6}, {"prompt_logprobs": 21}])
def test_what_completions_cannot_do_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        complete(**fields)
    assert caught.value.param in fields


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b'{"a":' * 50_000, b'"x"', b'{"model":"\\ud800"}']
)
def test_a_body_that_is_no_request_is_400(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        decode(ChatRequest, body)
    assert caught.value.status == 400


# ----------------------------------------------------------------------------------------------------------------- fuzz

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
known = st.sampled_from(sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}))
bodies = st.dictionaries(known | st.text(max_size=6), json_values, max_size=4)


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_bytes_break_the_reader(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        decode(ChatRequest, body)
    assert caught.value.status == 400


@settings(max_examples=300, deadline=None)
@given(bodies, st.booleans())
def test_no_body_breaks_the_reader(fields: dict[str, Any], whole: bool) -> None:
    for build in (chat, complete):
        try:
            job = build(**fields)
        except RequestError as error:
            assert 400 <= error.status < 500
        else:
            assert job.calls


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bodies, st.sampled_from(["/v1/chat/completions", "/v1/completions"]))
def test_no_body_breaks_the_server(echoing: Any, fields: dict[str, Any], path: str) -> None:
    body = {"model": "tiny", "messages" if "chat" in path else "prompt": USER if "chat" in path else "hi"} | fields
    response = httpx.post(echoing.url + path, content=json.dumps(body).encode())
    assert response.status_code == 200 or (400 <= response.status_code < 500 and response.json()["error"]["message"])
