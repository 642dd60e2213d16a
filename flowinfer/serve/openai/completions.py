"""Plain completions: checks a request, turns its prompts into calls, writes the answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np

from flowinfer.message import Call, Ids, Piece, Sampling
from flowinfer.serve.openai.encode import DONE, SPOT, completion_logprobs, encode, finish_of, finishes, halves, usage_of
from flowinfer.serve.openai.fields import (
    MAX_TOKEN_ID,
    Common,
    check_cache,
    check_choices,
    check_model,
    check_stream,
    in_range,
    invalid,
    refuse,
    sampling_of,
)
from flowinfer.serve.openai.grammar import grammar_of
from flowinfer.serve.openai.job import Job, Limits, OpenAIEvents, seed_of_choice

DEFAULT_MAX_TOKENS = 16  # as in the OpenAI API
MAX_LOGPROBS = 5


class CompletionRequest(Common, forbid_unknown_fields=True, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None


NEUTRAL: tuple[tuple[str, tuple[Any, ...]], ...] = (("suffix", ("",)),)  # and best_of as n


def completion_job(request: CompletionRequest, id: str, limits: Limits) -> Job:
    """The calls of a completion request: prompts times choices. Raises RequestError naming the field at fault."""
    check_model(request.model, limits)
    refuse(request, [*NEUTRAL, ("best_of", (request.n or 1,))])
    check_stream(request)
    check_cache(request)
    in_range("max_tokens", request.max_tokens, 1, MAX_TOKEN_ID)
    in_range("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    sampling = sampling_of(request, request.max_tokens or DEFAULT_MAX_TOKENS, request.logprobs, grammar_of(request))
    prompts = _prompts(request.prompt)
    num_choices = check_choices(request, len(prompts), limits)
    calls = [
        _call(request, _id(id, len(prompts) * num_choices, p * num_choices + k), prompt, sampling, k)
        for p, prompt in enumerate(prompts)
        for k in range(num_choices)
    ]
    usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    writer = CompletionWriter(
        id, request.model, usage, request.logprobs is not None, num_choices, _echo(request, calls)
    )
    return Job(id, calls, bool(request.stream), writer)


class CompletionWriter(OpenAIEvents):
    """Writes completions and their chunks. prefixes[i] is what is echoed before choice i."""

    def __init__(
        self, id: str, model: str, include_usage: bool, logprobs: bool, num_choices: int, prefixes: Sequence[str]
    ) -> None:
        self._head = {"id": id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._usage = include_usage
        self._logprobs = logprobs
        self._num_choices = num_choices
        self._prefixes = prefixes
        self._halves: dict[int, tuple[bytes, bytes]] = {}
        self._lengths = [len(prefix) for prefix in prefixes]

    def opening(self) -> bytes:
        return b"".join(self._chunk(i, prefix) for i, prefix in enumerate(self._prefixes) if prefix)

    def event(self, index: int, piece: Piece) -> bytes:
        out = b""
        if piece.logprobs and self._logprobs:
            logprobs = completion_logprobs(piece.logprobs, self._lengths[index])
            out = self._chunk(index, piece.text, logprobs=logprobs)
        elif piece.text:
            before, after = self._halves.get(index) or self._split(index)
            out = before + encode(piece.text) + after
        self._lengths[index] += len(piece.text)
        if piece.finish is not None:
            out += self._chunk(index, "", finish=piece.finish.reason)
        return out

    def closing(self, pieces: Sequence[Piece]) -> bytes:
        if not self._usage:
            return DONE
        usage = usage_of(finishes(pieces), self._num_choices)
        return b"data: " + encode(self._frame([]) | {"usage": usage}) + b"\n\n" + DONE

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        choices = [
            {
                "index": index,
                "text": prefix + piece.text,
                "logprobs": completion_logprobs(piece.logprobs, len(prefix)) if self._logprobs else None,
                "finish_reason": finish_of(piece).reason,
            }
            for index, (prefix, piece) in enumerate(zip(self._prefixes, pieces, strict=True))
        ]
        usage = usage_of(finishes(pieces), self._num_choices)
        return encode(self._head | {"choices": choices, "usage": usage})

    def _split(self, index: int) -> tuple[bytes, bytes]:
        choice = {"index": index, "text": SPOT, "logprobs": None, "finish_reason": None}
        self._halves[index] = halves(self._frame([choice]))
        return self._halves[index]

    def _chunk(self, index: int, text: str, *, logprobs: Any = None, finish: str | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return b"data: " + encode(self._frame([choice])) + b"\n\n"

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        frame = self._head | {"choices": choices}
        return frame | {"usage": None} if self._usage else frame


def _id(id: str, num_calls: int, index: int) -> str:
    return id if num_calls == 1 else f"{id}#{index}"


def _call(request: CompletionRequest, id: str, prompt: str | Ids, sampling: Sampling, choice: int) -> Call:
    assert sampling.seed is not None, "sampling_of draws a seed where the request names none"
    return Call(
        id=id,
        sampling=msgspec.structs.replace(sampling, seed=seed_of_choice(sampling.seed, choice)),
        prompt=prompt,
        cache_salt=request.cache_salt or "",
        cache_class=request.cache_class or "chat",
    )


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | Ids]:
    if isinstance(prompt, str):
        prompt = [prompt]
    if not prompt:
        raise invalid("prompt", "must not be empty.")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise invalid("prompt", "must be a string, a list of strings, a list of token ids, or a list of such lists.")
    if kinds == {str}:
        return cast(list[str | Ids], prompt)
    lists = [cast(list[int], prompt)] if kinds == {int} else cast(list[list[int]], prompt)
    return [_ids(ids) for ids in lists]


def _ids(ids: list[int]) -> Ids:
    if not ids:
        raise invalid("prompt", "a list of token ids must not be empty.")
    for id in (min(ids), max(ids)):
        in_range("prompt", id, 0, MAX_TOKEN_ID)
    return np.asarray(ids, dtype=np.int32)


def _echo(request: CompletionRequest, calls: Sequence[Call]) -> list[str]:
    if not request.echo:
        return [""] * len(calls)
    if request.logprobs is not None:
        raise invalid("echo", "can't be combined with logprobs: this pipeline gives none for the prompt.")
    texts = [call.prompt for call in calls]
    if not all(isinstance(text, str) for text in texts):
        raise invalid("echo", "needs the prompt as text.")
    return cast(list[str], texts)
