"""Chat completions: checks a request, turns it into calls, writes the answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from flowinfer.message import Call, Piece
from flowinfer.serve.openai.encode import DONE, SPOT, chat_logprobs, encode, finish_of, finishes, halves, usage_of
from flowinfer.serve.openai.fields import (
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
    sampling_of,
    unsupported,
)
from flowinfer.serve.openai.grammar import grammar_of
from flowinfer.serve.openai.job import Job, Limits, seed_of_choice
from flowinfer.serve.openai.messages import ChatMessage, plain_messages

_OWN_ARGS = {"messages", "tools", "add_generation_prompt"}  # of the template, set by the service


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


# What each field may say without changing the answer. `metadata`, `user`, `safety_identifier` and `prompt_cache_key`
# only label a request, and are taken as they come.
_NEUTRAL: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("audio", ()),
    ("function_call", ("none",)),
    ("functions", ([],)),
    ("modalities", (["text"],)),
    ("moderation", ()),
    ("prediction", ()),
    ("prompt_cache_options", ()),
    ("prompt_cache_retention", ("in_memory", "in-memory")),
    ("reasoning_effort", ("none",)),
    ("service_tier", ("auto", "default")),
    ("store", (False,)),
    ("verbosity", ("medium",)),
    ("web_search_options", ()),
)


def chat_job(request: ChatRequest, id: str, limits: Limits) -> Job:
    """The calls of a chat request. Raises RequestError naming the field that is wrong or can't be honoured."""
    check_model(request.model, limits)
    refuse(request, _NEUTRAL)
    check_stream(request)
    check_cache(request)
    sampling = sampling_of(request, _max_tokens(request, limits), _logprobs(request), grammar_of(request))
    num_choices = check_choices(request, 1, limits)
    messages, tools = plain_messages(request.messages, tools=limits.tools), _tools(request, limits)
    call_id = id if num_choices == 1 else f"{id}#0"
    first = Call(
        id=call_id,
        sampling=sampling,
        messages=messages,
        tools=tools,
        cache_salt=request.cache_salt or "",
        cache_class=request.cache_class or "chat",
        template_args=_template_args(request),
    )
    calls = [first, *(_choice(first, id, k) for k in range(1, num_choices))]
    usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    return Job(id, calls, bool(request.stream), ChatWriter(id, request.model, usage, bool(request.logprobs)))


class ChatWriter:
    """Writes chat completions and their chunks."""

    def __init__(self, id: str, model: str, include_usage: bool, logprobs: bool) -> None:
        self._head = {"id": id, "created": int(time.time()), "model": model}
        self._usage = include_usage
        self._logprobs = logprobs
        self._halves: dict[int, tuple[bytes, bytes]] = {}
        self._opened: set[int] = set()

    def opening(self) -> bytes:
        return b""

    def event(self, index: int, piece: Piece) -> bytes:
        out = b""
        if index not in self._opened:
            self._opened.add(index)
            out = self._chunk(index, {"role": "assistant", "content": ""})
        if piece.logprobs and self._logprobs:
            out += self._chunk(index, {"content": piece.text}, logprobs=chat_logprobs(piece.logprobs))
        elif piece.text:
            before, after = self._halves.get(index) or self._split(index)
            out += before + encode(piece.text) + after
        if piece.finish is not None:
            out += self._chunk(index, {}, finish=piece.finish.reason)
        return out

    def closing(self, pieces: Sequence[Piece]) -> bytes:
        if not self._usage:
            return DONE
        usage = usage_of(finishes(pieces), len(pieces))
        return b"data: " + encode(self._frame([]) | {"usage": usage}) + b"\n\n" + DONE

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": piece.text, "refusal": None},
                "logprobs": chat_logprobs(piece.logprobs) if self._logprobs else None,
                "finish_reason": finish_of(piece).reason,
            }
            for index, piece in enumerate(pieces)
        ]
        usage = usage_of(finishes(pieces), len(pieces))
        return encode(self._head | {"object": "chat.completion", "choices": choices, "usage": usage})

    def _split(self, index: int) -> tuple[bytes, bytes]:
        choice = {"index": index, "delta": {"content": SPOT}, "logprobs": None, "finish_reason": None}
        self._halves[index] = halves(self._frame([choice]))
        return self._halves[index]

    def _chunk(self, index: int, delta: dict[str, Any], *, logprobs: Any = None, finish: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return b"data: " + encode(self._frame([choice])) + b"\n\n"

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        frame = self._head | {"object": "chat.completion.chunk", "choices": choices}
        return frame | {"usage": None} if self._usage else frame


def _choice(first: Call, id: str, k: int) -> Call:
    assert first.sampling.seed is not None, "sampling_of draws a seed where the request names none"
    seed = seed_of_choice(first.sampling.seed, k)
    return msgspec.structs.replace(first, id=f"{id}#{k}", sampling=msgspec.structs.replace(first.sampling, seed=seed))


def _max_tokens(request: ChatRequest, limits: Limits) -> int:
    old, new = request.max_tokens, request.max_completion_tokens
    in_range("max_tokens", old, 1, MAX_TOKEN_ID)
    in_range("max_completion_tokens", new, 1, MAX_TOKEN_ID)
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", f"says {old}, but max_completion_tokens says {new}; give one of them.")
    return new or old or limits.default_max_tokens


def _logprobs(request: ChatRequest) -> int | None:
    in_range("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true.")
    return (request.top_logprobs or 0) if request.logprobs else None


def _tools(request: ChatRequest, limits: Limits) -> list[dict[str, Any]] | None:
    if request.tools and not limits.tools:
        raise unsupported("tools")
    if request.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice")
    return request.tools or None if request.tool_choice != "none" else None


def _template_args(request: ChatRequest) -> dict[str, Any]:
    args = request.chat_template_kwargs or {}
    if taken := _OWN_ARGS & args.keys():
        raise invalid(f"chat_template_kwargs.{min(taken)}", "is set by the service.")
    return args
