"""No field of a request is ignored: an unknown one is refused by its place, and the official clients' are all known."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

import pytest
from anthropic.types import message_create_params as messages_params
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from typing_extensions import is_typeddict

from flowinfer.errors import RequestError
from flowinfer.serve.anthropic.messages import MessageRequest, message_job
from flowinfer.serve.openai.chat import ChatRequest, chat_job
from flowinfer.serve.openai.completions import CompletionRequest, completion_job
from flowinfer.serve.openai.decode import decode
from flowinfer.serve.openai.job import Limits
from flowinfer.serve.openai.response_input import messages_of
from flowinfer.serve.openai.responses import ResponsesRequest, response_job
from flowinfer.serve.support import standing

LIMITS = Limits(models=(), max_requests=256, default_max_tokens=16, tools=True)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": False}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FREE = {"metadata", "logit_bias", "parameters", "schema", "input_schema", "chat_template_kwargs", "tool_input"}


def respond(request: ResponsesRequest) -> Any:
    return response_job(request, "r", LIMITS, messages_of(request.input), lambda response: None)


READERS: dict[str, tuple[type[Any], Callable[[Any], Any]]] = {
    "chat": (ChatRequest, lambda request: chat_job(request, "r", LIMITS)),
    "completions": (CompletionRequest, lambda request: completion_job(request, "r", LIMITS)),
    "responses": (ResponsesRequest, respond),
    "messages": (MessageRequest, lambda request: message_job(request, "r", LIMITS)),
}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "model": "m",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": [{"type": "text", "text": "u"}], "name": "n"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "stream": True,
        "stream_options": {"include_usage": True},
        "metadata": {"a": "b"},
        "logit_bias": {"7": 1},
    },
    "completions": {"model": "m", "prompt": "p", "stream": True, "stream_options": {"include_usage": True}},
    "responses": {
        "model": "m",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
        ],
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        "reasoning": {"effort": "low"},
        "stream": True,
        "stream_options": {"include_obfuscation": False},
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
    },
    "messages": {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "u", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"tool_input": {}}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}]}],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "u"},
    },
}


def read(api: str, body: Any) -> Any:
    kind, make = READERS[api]
    return make(decode(kind, json.dumps(body).encode()))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all objects in a body whose fields have a meaning."""
    if isinstance(value, dict):
        yield path
        for key, inner in value.items():
            if key not in FREE and not (key == "input" and isinstance(inner, dict)):
                yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from places(inner, (*path, place))


@pytest.mark.parametrize("api", READERS)
def test_the_bodies_are_honoured(api: str) -> None:
    assert read(api, BODIES[api]).calls


@pytest.mark.parametrize(
    ("api", "path"),
    [(api, path) for api, body in BODIES.items() for path in places(body)],
    ids=lambda value: "" if isinstance(value, str) else ".".join(map(str, value)) or "top",
)
def test_an_unknown_field_is_refused_wherever_it_stands(api: str, path: tuple[Any, ...]) -> None:
    body = copy.deepcopy(BODIES[api])
    at = body
    for step in path:
        at = at[step]
    at["unheard_of"] = 1
    with pytest.raises(RequestError) as caught:
        read(api, body)
    assert caught.value.status == 400
    assert "unheard_of" in (caught.value.param or "")


JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    2.5,
    10**30,
    "",
    "junk",
    [],
    ["junk"],
    [[]],
    [{}],
    {},
    {"junk": 1},
    {"type": []},
)


def spots(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a body."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*path, key)
        yield from spots(inner, (*path, key))


@pytest.mark.parametrize("api", BODIES)
def test_no_value_anywhere_breaks_the_reader(api: str) -> None:
    for path in spots(BODIES[api]):
        for junk in JUNK:
            body = copy.deepcopy(BODIES[api])
            at = body
            for step in path[:-1]:
                at = at[step]
            at[path[-1]] = junk
            try:
                read(api, body)
            except RequestError as error:
                assert error.status == 400, (path, junk)
            except Exception as error:
                raise AssertionError(f"{path} = {junk!r}") from error


LEAST: dict[str, Any] = {"responses": {"model": "m", "input": "x"}}  # where the client requires less than the API
OFFICIAL: dict[str, Any] = {
    "chat": chat_params.CompletionCreateParamsNonStreaming,
    "completions": completion_params.CompletionCreateParamsNonStreaming,
    "responses": response_params.ResponseCreateParamsNonStreaming,
    "messages": messages_params.MessageCreateParamsNonStreaming,
}


def sample(hint: Any, rng: random.Random, depth: int = 0) -> Any:
    """A value of a type as the official clients declare it. Their types are recursive: hypothesis drowns in them."""
    origin, args = get_origin(hint), get_args(hint)
    if is_typeddict(hint):
        return _object(hint, rng, depth)
    if origin in (Required, NotRequired, Annotated):
        return sample(args[0], rng, depth)
    if origin in (Union, UnionType):
        return sample(rng.choice(args), rng, depth)
    if origin is Literal:
        return rng.choice(args)
    if origin in (list, tuple, Iterable, Sequence):
        return [sample(args[0], rng, depth + 1) for _ in range(rng.randrange(3) if depth < 6 else 0)]
    if origin is dict:
        return {"7": sample(args[1], rng, depth + 1)}
    plain = {str: "x", int: 1, float: 1.0, bool: rng.random() < 0.5, type(None): None}
    return plain.get(hint, {"x": 1})


def _object(hint: Any, rng: random.Random, depth: int) -> dict[str, Any]:
    hints = get_type_hints(hint)
    names = [name for name in hints if name in needed(hint) or (depth < 6 and rng.random() < 0.5)]
    return {name: sample(hints[name], rng, depth + 1) for name in names}


def needed(hint: Any) -> set[str]:
    """Required fields, also those whose annotation is a string, which `__required_keys__` doesn't see."""
    marked = get_type_hints(hint, include_extras=True)
    return hint.__required_keys__ | {name for name, kind in marked.items() if get_origin(kind) is Required}


def request(api: str, rng: random.Random) -> dict[str, Any]:
    """A request of the official client with a few fields; with many, none would get past its first refusal."""
    hints = get_type_hints(OFFICIAL[api])
    fields = rng.sample(sorted(hints), rng.randrange(1, 4))
    least = {name: BODIES[api][name] for name in needed(OFFICIAL[api]) & BODIES[api].keys()} | LEAST.get(api, {})
    return least | {name: sample(hints[name], rng) for name in fields}


@pytest.mark.parametrize("api", OFFICIAL)
def test_what_the_official_clients_may_send_is_honoured_or_refused_by_name(api: str) -> None:
    honoured = 0
    for seed in range(400):
        body = request(api, random.Random(seed))
        try:
            read(api, body)
            honoured += 1
        except RequestError as error:
            assert error.status == 400
            assert error.param, (error.message, body)
            assert error.code != "unknown_parameter", (error.message, body)
    assert honoured


@pytest.mark.parametrize("api", OFFICIAL)
def test_the_table_has_every_field_of_the_official_client(api: str) -> None:
    assert all(standing(api, field) for field in get_type_hints(OFFICIAL[api]))
