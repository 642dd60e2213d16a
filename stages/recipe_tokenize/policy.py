"""Decides what of a request the model gets: messages as templates expect them, limits, where to tokenize. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from flowinfer.errors import RequestError
from flowinfer.message import Grammar, ReplyFormat, Sampling
from flowinfer.text.jsonobject import JsonObject

# Tokenizing runs at about 2 million characters a second, so 20,000 hold the loop for 10 ms; more goes to the pool.
INLINE_CHARS = 20_000


def normalize(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with text content and parsed tool arguments. Raises RequestError (400) naming the field at fault."""
    if not messages:
        raise _bad("messages", "`messages` is empty: a chat needs at least one message.")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _bad(where, f"{where} must be an object with a string `role`.")
    clean = {**message, "content": _content(message.get("content"), f"{where}.content")}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise _bad(f"{where}.tool_calls", f"{where}.tool_calls must be a list.")
        clean["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
    return clean


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(where, f"{where} must be a string or a list of parts.")
    return "\n".join(_part(part, f"{where}[{place}]") for place, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise _bad(where, f"{where}: this model takes parts of type 'text' only, not {kind!r}.")
    if not isinstance(part.get("text"), str):
        raise _bad(f"{where}.text", f"{where}.text must be a string.")
    return str(part["text"])


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object, as templates expect; clients send them as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise _bad(where, f"{where} must be an object with a `function`.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = JsonObject(parsed, arguments) if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def fit(
    sampling: Sampling,
    *,
    prompt_tokens: int,
    context: int,
    eos_ids: Iterable[int],
    reply: ReplyFormat | None = None,
) -> Sampling:
    """Sampling with max_tokens cut to what the context leaves, the model's ends among the stop tokens, and `reply`."""
    ends = () if sampling.ignore_eos else eos_ids
    return msgspec.structs.replace(
        sampling,
        max_tokens=min(sampling.max_tokens, context - prompt_tokens),
        stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *ends))),
        reply=reply,
    )


def check_ends(sampling: Sampling, grammar: Grammar) -> None:
    """Raises RequestError (400) where a bound answer is told not to end: it ends where its grammar does."""
    if sampling.ignore_eos:
        raise _bad(
            "ignore_eos", f"`ignore_eos` can't be combined with {grammar.param}: its text ends with its grammar."
        )


def check_hopeless(min_tokens: int, *, context: int, param: str) -> None:
    """Raises RequestError (400) for text that is too long whatever tokens it may give."""
    if min_tokens > context - 1:
        message = f"The prompt has at least {min_tokens} tokens; the model's context of {context} leaves room for less."
        raise RequestError(400, message, code="context_length_exceeded", param=param)


def check_ids(sampling: Sampling, vocab_size: int) -> None:
    """Raises RequestError (400) for a setting about a token that the model hasn't got, which would never act."""
    for param, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        for id in ids:
            if not 0 <= id < vocab_size:
                raise _bad(param, f"`{param}` names token id {id}; the model's ids are 0 to {vocab_size - 1}.")


def check_length(prompt_tokens: int, *, context: int, limit: int | None, param: str) -> None:
    """Raises RequestError (400) for a prompt that is empty, leaves no room for an answer, or exceeds `limit`."""
    if not prompt_tokens:
        raise _bad(param, f"`{param}` gives no token at all.")
    if prompt_tokens > context - 1:
        message = (
            f"The prompt has {prompt_tokens} tokens; the model's context of {context} leaves room for {context - 1}."
        )
        raise RequestError(400, message, code="context_length_exceeded", param=param)
    if limit is not None and prompt_tokens > limit:
        message = f"The prompt has {prompt_tokens} tokens; this service takes {limit}."
        raise RequestError(400, message, code="context_length_exceeded", param=param)


def num_chars(value: Any) -> int:
    """Characters of all strings in a JSON value, however deep: what tokenizing it will cost."""
    total, rest = 0, [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            rest += item
    return total


def _bad(param: str, message: str) -> RequestError:
    return RequestError(400, message, code="invalid_value", param=param)
