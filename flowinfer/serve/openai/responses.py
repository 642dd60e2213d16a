"""The Responses API: checks a request and turns it into a chat, whose rules it follows. Keeps nothing itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from flowinfer.errors import RequestError
from flowinfer.serve.openai.chat import ChatRequest, chat_job
from flowinfer.serve.openai.decode import decode
from flowinfer.serve.openai.fields import DAY, IN_MEMORY, MAX_TOKEN_ID, in_range, invalid, only, refuse, unsupported
from flowinfer.serve.openai.job import Job, Limits
from flowinfer.serve.openai.response_writer import ResponseWriter

Messages = list[dict[str, Any]]


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`text.format`: text, json_object, or json_schema with its schema beside it."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`text` of a request."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    """`reasoning` of a request."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options` of a request."""

    include_obfuscation: bool | None = None
    include_usage: bool | None = None  # extension: the last event tells the usage in any case


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/responses: every field that the official client sends."""

    model: str
    input: str | list[dict[str, Any]]
    access_programs: Any = None
    background: bool | None = None
    background_options: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    include: list[str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    moderation: Any = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    prompt: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    reasoning: Reasoning | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    temperature: float | None = None
    text: TextConfig | None = None
    tool_choice: Any = None
    tools: list[dict[str, Any]] | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    truncation: str | None = None
    user: str | None = None
    cache_salt: str | None = None  # extensions, as in chats, from here on
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    top_k: int | None = None
    cache_class: str | None = None
    cache_retention: str | int | None = None


NEUTRAL: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("access_programs", ()),
    ("background_options", ()),
    ("context_management", ([],)),
    ("conversation", ()),
    ("image", ()),
    ("moderation", ()),
    ("prompt", ()),
    ("prompt_cache_options", ()),
    ("prompt_cache_retention", (*IN_MEMORY, DAY)),
    ("truncation", ("disabled",)),
)
_AS_IN_CHATS = (
    "cache_salt",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "top_k",
)
_FUNCTION = ("name", "description", "parameters", "strict")
_TOOL_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "async": (False,),
    "output_schema": (),
}
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")  # nothing here is encrypted: reasoning comes as it is
_CHAT_NAMES = {"max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"}


@dataclass(frozen=True)
class ResponseJob(Job):
    """A job whose answer is a response."""

    writer: ResponseWriter


def response_job(
    request: ResponsesRequest, id: str, limits: Limits, messages: Messages, on_end: Callable[[dict[str, Any]], None]
) -> ResponseJob:
    """The call of a request whose conversation is `messages`. Raises RequestError naming the field at fault."""
    refuse(request, NEUTRAL)
    if request.reasoning is not None and (request.reasoning.summary or request.reasoning.generate_summary):
        raise unsupported("reasoning.summary")
    if request.reasoning is not None:
        refuse(request.reasoning, (("context", ("auto",)), ("mode", ("standard",))), "reasoning.")
    for place, asked in enumerate(request.include or ()):
        if asked not in INCLUDABLE:
            raise unsupported(f"include[{place}]", f"{asked[:60]!r} is not supported by this pipeline")
    in_range("max_tool_calls", request.max_tool_calls, 1, MAX_TOKEN_ID)  # of built-in tools, and there are none
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "is only allowed when stream is true.")
    if request.background and request.store is False:
        raise invalid("store", "must not be false with background: nobody could fetch the response.")
    try:
        job = chat_job(decode(ChatRequest, msgspec.json.encode(_chat(request, messages))), id, limits)
    except RequestError as error:
        raise _renamed(error) from None
    obfuscated = request.stream_options is not None and bool(request.stream_options.include_obfuscation)
    writer = ResponseWriter(
        _head(request, id),
        on_end,
        logprobs=_wants_logprobs(request),
        obfuscated=obfuscated,
        parallel=request.parallel_tool_calls is not False,
    )
    return ResponseJob(job.id, job.calls, bool(request.stream), writer)


def _wants_logprobs(request: ResponsesRequest) -> bool:
    return LOGPROBS in (request.include or ()) or bool(request.top_logprobs)


def _chat(request: ResponsesRequest, messages: Messages) -> dict[str, Any]:
    text = request.text or TextConfig()
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    body = {
        "model": request.model,
        "messages": system + messages,
        "max_completion_tokens": request.max_output_tokens,
        "metadata": request.metadata,
        "parallel_tool_calls": request.parallel_tool_calls if request.tools else None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "response_format": _format(text.format),
        "safety_identifier": request.safety_identifier,
        "service_tier": request.service_tier,
        "temperature": request.temperature,
        "tool_choice": _choice(request.tool_choice) if request.tools else None,
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or [])] or None,
        "logprobs": _wants_logprobs(request),
        "top_logprobs": request.top_logprobs,
        "top_p": request.top_p,
        "user": request.user,
        "verbosity": text.verbosity,
        **{name: getattr(request, name) for name in _AS_IN_CHATS},
        "cache_class": request.cache_class,
        "cache_retention": request.cache_retention,
        "prompt_cache_retention": request.prompt_cache_retention,
    }
    return {name: value for name, value in body.items() if value is not None}


def _format(given: TextFormat | None) -> dict[str, Any] | None:
    if given is None or given.type != "json_schema":
        return {"type": given.type} if given else None
    if given.schema is None:
        raise invalid("text.format.schema", "is required with type json_schema.", "missing_required_parameter")
    return {"type": "json_schema", "json_schema": {"name": given.name, "schema": given.schema}}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(f"{where}.type", f"{str(tool.get('type'))[:40]!r} is not supported by this pipeline")
    only(tool, where, ("type", *_FUNCTION), _TOOL_NEUTRAL)
    function = {key: tool[key] for key in _FUNCTION if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        only(choice, "tool_choice", ("type", "name"))
        return {"type": "function", "function": {"name": choice["name"]}}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        only(choice, "tool_choice", ("type", "mode", "tools"))
        tools = [_choice(tool) for tool in choice["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return choice


def _renamed(error: RequestError) -> RequestError:
    """The error with this API's names of fields."""
    param, message = error.param or "", error.message
    names = {"response_format.json_schema": "text.format", "response_format": "text.format", "messages": "input"}
    for theirs, ours in (_CHAT_NAMES | names).items():
        if param == theirs or param.startswith((f"{theirs}.", f"{theirs}[")):
            return RequestError(
                error.status, message.replace(theirs, ours), code=error.code, param=ours + param[len(theirs) :]
            )
    return error


def _head(request: ResponsesRequest, id: str) -> dict[str, Any]:
    given = request.text.format if request.text else None
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model,
        "background": bool(request.background),
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": msgspec.to_builtins(given) if given else {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
