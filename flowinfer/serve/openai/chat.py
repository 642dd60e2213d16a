"""Chat completions: checks a request, turns it into calls, writes the answer."""

from __future__ import annotations

from typing import Any

import msgspec

from flowinfer.message import Call
from flowinfer.serve.openai.chat_writer import ChatWriter
from flowinfer.serve.openai.fields import (
    DAY,
    IN_MEMORY,
    MAX_TOKEN_ID,
    MAX_TOP_LOGPROBS,
    Common,
    check_cache,
    check_choices,
    check_model,
    check_stream,
    in_range,
    invalid,
    refuse,
    retention_of,
    sampling_of,
)
from flowinfer.serve.openai.grammar import grammar_of
from flowinfer.serve.openai.job import Job, Limits, seed_of_choice
from flowinfer.serve.openai.messages import ChatMessage, plain_messages
from flowinfer.serve.openai.stream import StreamShape
from flowinfer.serve.openai.tools import choice_of, offered

_OWN_ARGS = {"messages", "tools", "add_generation_prompt", "continue_final_message"}  # set by the service


class ChatRequest(Common, forbid_unknown_fields=True, kw_only=True):
    """The body of /v1/chat/completions: every field that the official client sends, and the common extensions."""

    messages: list[ChatMessage]
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    logprobs: bool | None = None
    max_completion_tokens: int | None = None
    metadata: dict[str, str] | None = None
    modalities: list[str] | None = None
    moderation: Any = None
    parallel_tool_calls: bool | None = None
    prediction: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    reasoning_effort: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    tool_choice: Any = None
    tools: list[dict[str, Any]] | None = None
    top_logprobs: int | None = None
    verbosity: str | None = None
    web_search_options: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None


# What each field may say without changing the answer. `metadata`, `user`, `safety_identifier` and `prompt_cache_key`
# only label a request, and are taken as they come.
NEUTRAL: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("audio", ()),
    ("function_call", ("none",)),
    ("functions", ([],)),
    ("modalities", (["text"],)),
    ("moderation", ()),
    ("prediction", ()),
    ("prompt_cache_options", ()),
    ("prompt_cache_retention", (*IN_MEMORY, DAY)),
    ("service_tier", ("auto", "default")),
    ("store", (False,)),
    ("verbosity", ("medium",)),
    ("web_search_options", ()),
)


def chat_job(request: ChatRequest, id: str, limits: Limits) -> Job:
    """The calls of a chat request. Raises RequestError naming the field that is wrong or can't be honoured."""
    check_model(request.model, limits)
    refuse(request, NEUTRAL)
    check_stream(request)
    check_cache(request)
    defaults = limits.defaults.of(request.model)
    max_tokens = _max_tokens(request, int(defaults.get("max_tokens", limits.default_max_tokens)))
    sampling = sampling_of(request, max_tokens, _logprobs(request), grammar_of(request), defaults)
    num_choices = check_choices(request, 1, limits)
    messages = plain_messages(request.messages, tools=limits.tools)
    tools = offered(request.tools, request.tool_choice, limits)
    call_id = id if num_choices == 1 else f"{id}#0"
    first = Call(
        id=call_id,
        sampling=sampling,
        messages=messages,
        tools=tools,
        tool_choice=choice_of(tools, request.tool_choice, request.parallel_tool_calls),
        cache_salt=request.cache_salt or "",
        cache_class=request.cache_class or ("agent" if request.tools else "chat"),
        cache_keep_s=_keep_s(request),
        cache_in_memory=request.prompt_cache_retention in IN_MEMORY,
        template_args=_template_args(request),
        session=request.user or request.prompt_cache_key or "",
    )
    calls = [first, *(_choice(first, id, k) for k in range(1, num_choices))]
    writer = ChatWriter(
        id,
        request.model,
        StreamShape.of(request.stream_options),
        logprobs=bool(request.logprobs),
        parallel=request.parallel_tool_calls is not False,
        prompt_logprobs=request.prompt_logprobs is not None,
        more={} if request.service_tier is None else {"service_tier": "default"},
    )
    return Job(id, calls, bool(request.stream), writer)


def _choice(first: Call, id: str, k: int) -> Call:
    """The k-th choice: its prompt is the first one's, which alone tells the log-probabilities of that."""
    assert first.sampling.seed is not None, "sampling_of draws a seed where the request names none"
    seed = seed_of_choice(first.sampling.seed, k)
    sampling = msgspec.structs.replace(first.sampling, seed=seed, prompt_logprobs=None)
    return msgspec.structs.replace(first, id=f"{id}#{k}", sampling=sampling)


def _max_tokens(request: ChatRequest, default: int) -> int:
    old, new = request.max_tokens, request.max_completion_tokens
    in_range("max_tokens", old, 1, MAX_TOKEN_ID)
    in_range("max_completion_tokens", new, 1, MAX_TOKEN_ID)
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", f"says {old}, but max_completion_tokens says {new}; give one of them.")
    return new or old or default


def _logprobs(request: ChatRequest) -> int | None:
    in_range("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true.")
    return (request.top_logprobs or 0) if request.logprobs else None


def _keep_s(request: ChatRequest) -> float | None:
    """How long its blocks stay; OpenAI's own field is heard where ours says nothing."""
    if request.cache_retention is None and request.prompt_cache_retention == DAY:
        return retention_of(DAY)
    return retention_of(request.cache_retention)


def _template_args(request: ChatRequest) -> dict[str, Any]:
    args = request.chat_template_kwargs or {}
    if taken := _OWN_ARGS & args.keys():
        raise invalid(f"chat_template_kwargs.{min(taken)}", "is set by the service.")
    if request.continue_final_message:
        if request.messages[-1].role != "assistant":
            raise invalid("continue_final_message", "needs a last message of the assistant.")
        args = {"continue_final_message": True} | args
    return args if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort} | args
