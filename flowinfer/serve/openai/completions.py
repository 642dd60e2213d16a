"""Plain completions: checks a request, turns its prompts into calls, writes the answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np

from flowinfer.message import Call, Ids, Piece, Sampling
from flowinfer.serve.openai.encode import (
    DONE,
    SPOT,
    completion_logprobs,
    echoed_logprobs,
    encode,
    finish_of,
    finishes,
    halves,
    prompt_logprobs,
    usage_of,
)
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
    retention_of,
    sampling_of,
)
from flowinfer.serve.openai.grammar import grammar_of
from flowinfer.serve.openai.job import Job, Limits, seed_of_choice
from flowinfer.serve.openai.stream import Chunks, StreamShape, opened_of

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
    defaults = limits.defaults.of(request.model)
    max_tokens = request.max_tokens or int(defaults.get("max_tokens", DEFAULT_MAX_TOKENS))
    sampling = sampling_of(request, max_tokens, request.logprobs, grammar_of(request), defaults)
    prompts = _prompts(request.prompt)
    sampling = _with_prompt_logprobs(request, sampling)
    num_choices = check_choices(request, len(prompts), limits)
    calls = [
        _call(request, _id(id, len(prompts) * num_choices, p * num_choices + k), prompt, sampling, k)
        for p, prompt in enumerate(prompts)
        for k in range(num_choices)
    ]
    writer = CompletionWriter(
        id,
        request.model,
        StreamShape.of(request.stream_options),
        logprobs=request.logprobs is not None,
        prompt_logprobs=request.prompt_logprobs is not None,
        num_choices=num_choices,
        prefixes=_echo(request, calls),
    )
    return Job(id, calls, bool(request.stream), writer)


class CompletionWriter(Chunks):
    """Writes completions and their chunks. prefixes[i]: the text echoed before choice i, None to read it from tokens.

    echo: the prompt comes first, with its log-probabilities where logprobs asks for those of the answer.
    """

    def __init__(
        self,
        id: str,
        model: str,
        shape: StreamShape,
        *,
        logprobs: bool,
        prompt_logprobs: bool,
        num_choices: int,
        prefixes: Sequence[str | None],
    ) -> None:
        self._head = {"id": id, "object": "text_completion", "created": int(time.time()), "model": model}
        super().__init__(self._head, shape)
        self._logprobs, self._prompt_logprobs = logprobs, prompt_logprobs
        self._num_choices = num_choices
        self._prefixes = prefixes
        self._halves: dict[int, tuple[bytes, bytes]] = {}
        self._lengths: dict[int, int] = {}

    def opening(self) -> bytes:
        return b""

    def event(self, index: int, piece: Piece) -> bytes:
        if not self._plain:
            self.note(index, piece)
        out = b"" if index in self._lengths else self._echo(index, piece)
        if piece.logprobs and self._logprobs:
            logprobs = completion_logprobs(piece.logprobs, self._lengths[index])
            out += self._chunk(index, piece.text, logprobs=logprobs)
        elif piece.text and not self._plain:
            out += self._chunk(index, piece.text)
        elif piece.text:
            before, after = self._halves.get(index) or self._split(index)
            out += before + encode(piece.text) + after
        self._lengths[index] += len(piece.text)
        if piece.finish is not None:
            out += self._chunk(index, "", finish=piece.finish.reason)
        return out

    def closing(self, pieces: Sequence[Piece]) -> bytes:
        if not self._shape.usage:
            return DONE
        return self.data(self.frame([], usage_of(finishes(pieces), self._num_choices))) + DONE

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        choices = [self._choice(index, piece) for index, piece in enumerate(pieces)]
        return encode(self._head | {"choices": choices, "usage": usage_of(finishes(pieces), self._num_choices)})

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        prefix, echoed = self._prefix(index, piece)
        logprobs = completion_logprobs(piece.logprobs, len(prefix)) if self._logprobs else None
        if logprobs is not None and echoed is not None:
            logprobs = {key: values + logprobs[key] for key, values in echoed.items()}
        choice = {
            "index": index,
            "text": prefix + piece.text,
            "logprobs": logprobs,
            "finish_reason": finish_of(piece).reason,
        }
        if self._prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(opened_of(piece).prompt)
        return choice

    def _echo(self, index: int, piece: Piece) -> bytes:
        prefix, logprobs = self._prefix(index, piece)
        self._lengths[index] = len(prefix)
        return self._chunk(index, prefix, logprobs=logprobs) if prefix else b""

    def _prefix(self, index: int, piece: Piece) -> tuple[str, dict[str, Any] | None]:
        """The text echoed before a choice and its `logprobs`, where they are asked for."""
        given, tokens = self._prefixes[index], opened_of(piece).prompt
        text = b"".join(token.data for token in tokens).decode("utf-8", "replace") if given is None else given
        return text, echoed_logprobs(tokens, text) if text and self._logprobs else None

    def _split(self, index: int) -> tuple[bytes, bytes]:
        choice = {"index": index, "text": SPOT, "logprobs": None, "finish_reason": None}
        self._halves[index] = halves(self.frame([choice]))
        return self._halves[index]

    def _chunk(self, index: int, text: str, *, logprobs: Any = None, finish: str | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return self.data(self.frame([choice]))


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
        cache_keep_s=retention_of(request.cache_retention),
        session=request.user or "",
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


def _echo(request: CompletionRequest, calls: Sequence[Call]) -> list[str | None]:
    """Texts to echo; None where they are read from the tokens of the prompt, since that came as ids."""
    if not request.echo:
        return [""] * len(calls)
    return [call.prompt if isinstance(call.prompt, str) else None for call in calls]


def _with_prompt_logprobs(request: CompletionRequest, sampling: Sampling) -> Sampling:
    """An echo with logprobs tells those of the prompt too; one of ids is spelled by the same way."""
    asked = [number for number in (request.prompt_logprobs, request.logprobs if request.echo else None) if number]
    ids = not isinstance(request.prompt, str) and not isinstance(request.prompt[0], str)
    if request.prompt_logprobs is None and not (request.echo and (ids or request.logprobs is not None)):
        return sampling
    return msgspec.structs.replace(sampling, prompt_logprobs=max(asked, default=0))
