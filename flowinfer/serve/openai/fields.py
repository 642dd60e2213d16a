"""Fields that chat and completions share, with their ranges. A field that can't be honoured is refused by its name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from flowinfer.errors import RequestError
from flowinfer.message import Grammar, Sampling
from flowinfer.serve.openai.formats import ResponseFormat, StructuredOutputs
from flowinfer.serve.openai.job import SEED_BITS, Limits, draw_seed
from flowinfer.units import parse_duration

MAX_STOP = 16
MAX_TOKEN_ID = 2**31 - 1
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
MAX_CACHE_WORD = 256
DAY = "24h"  # as prompt_cache_retention
IN_MEMORY = ("in_memory", "in-memory")  # the same in both of OpenAI's spellings: nothing on disk or in an object store


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # extension: usage so far in every chunk


class Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of requests take: OpenAI's sampling fields and the extensions that LLM servers agree on."""

    model: str
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    # extensions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    cache_class: str | None = None
    cache_retention: str | int | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None


def invalid(param: str, message: str, code: str = "invalid_value", status: int = 400) -> RequestError:
    """A refusal that names the field."""
    return RequestError(status, f"{param}: {message}", code=code, param=param)


def unsupported(param: str, what: str = "is not supported by this pipeline; leave it out") -> RequestError:
    """A refusal of a known field that can't be honoured here."""
    return RequestError(400, f"'{param}' {what}.", code="unsupported_parameter", param=param)


def refuse(request: msgspec.Struct, allowed: Iterable[tuple[str, tuple[Any, ...]]], where: str = "") -> None:
    """Raises for the first field whose value is none of those that change nothing. null is always one of them."""
    for name, values in allowed:
        value = getattr(request, name)
        if value is not None and value not in values:
            raise unsupported(where + name)


def only(
    given: Mapping[str, Any], where: str, fields: Collection[str], neutral: Mapping[str, tuple[Any, ...]] | None = None
) -> None:
    """Raises for a field of an object that isn't one of these. Those in `neutral` may say what asks for nothing."""
    for name, value in given.items():
        if name in fields:
            continue
        if neutral is None or name not in neutral:
            raise invalid(f"{where}.{name}", "is not a field here.", "unknown_parameter")
        if value is not None and value not in neutral[name]:
            raise unsupported(f"{where}.{name}")


def in_range(param: str, value: float | None, low: float, high: float, *, open_low: bool = False) -> None:
    """Raises RequestError unless value is None or within [low, high] (or (low, high])."""
    if value is not None and not ((low < value if open_low else low <= value) and value <= high):
        bounds = f"above {low} and at most {high}" if open_low else f"from {low} to {high}"
        got = f", not {value}" if abs(value) < 1e18 else ""
        raise invalid(param, f"must be {bounds}{got}.", "out_of_range")


def check_model(model: str, limits: Limits) -> None:
    """Raises 404 for a model that isn't served; a service that names none answers to any name."""
    if limits.models and model not in limits.models:
        served = ", ".join(limits.models)
        message = f"The model {model!r} does not exist here. Served: {served}."
        raise RequestError(404, message, code="model_not_found", param="model")


def sampling_of(
    request: Common,
    max_tokens: int,
    logprobs: int | None,
    grammar: Grammar | None = None,
    defaults: Mapping[str, float] | None = None,
) -> Sampling:
    """The checked sampling settings of a request. Raises RequestError naming the field at fault.

    defaults: what a field is where the request doesn't say, by its name; else it is as in the OpenAI API.
    """
    _check_ranges(request, max_tokens)
    default = defaults or {}

    def value(name: str, otherwise: float) -> float:
        given = getattr(request, name)
        return float(default.get(name, otherwise) if given is None else given)

    seed = default.get("seed") if request.seed is None else request.seed
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        temperature=value("temperature", 1.0),
        top_k=max(0, int(value("top_k", 0))),
        top_p=value("top_p", 1.0),
        min_p=value("min_p", 0.0),
        repetition_penalty=value("repetition_penalty", 1.0),
        presence_penalty=value("presence_penalty", 0.0),
        frequency_penalty=value("frequency_penalty", 0.0),
        seed=draw_seed() if seed is None else int(seed) % (1 << SEED_BITS),
        stop=_stops(request.stop),
        stop_token_ids=_token_ids("stop_token_ids", request.stop_token_ids or []),
        ignore_eos=bool(request.ignore_eos),
        logit_bias=_bias(request.logit_bias or {}),
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        grammar=grammar,
    )


def check_stream(request: Common) -> None:
    """Raises for stream options without a stream, and for what can't be streamed."""
    options = request.stream_options
    if options is not None and not request.stream:
        raise invalid("stream_options", "is only allowed when stream is true.")
    in_range("prompt_logprobs", request.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
    if request.stream and request.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "can't be streamed")


def check_choices(request: Common, prompts: int, limits: Limits) -> int:
    """The number of choices a prompt. Raises when all of them never fit into the service at once."""
    num_choices = 1 if request.n is None else request.n
    in_range("n", num_choices, 1, MAX_CHOICES)
    if num_choices * prompts > limits.max_requests:
        asked = f"{num_choices} choices of {prompts} prompts" if prompts > 1 else f"{num_choices} choices"
        raise invalid("n", f"{asked} are more than the {limits.max_requests} requests that fit here.", "out_of_range")
    return num_choices


def _check_ranges(request: Common, max_tokens: int) -> None:
    in_range("frequency_penalty", request.frequency_penalty, -2, 2)
    in_range("presence_penalty", request.presence_penalty, -2, 2)
    in_range("temperature", request.temperature, 0, 2)
    in_range("top_p", request.top_p, 0, 1, open_low=True)
    in_range("top_k", request.top_k, -1, MAX_TOKEN_ID)
    in_range("min_p", request.min_p, 0, 1)
    in_range("repetition_penalty", request.repetition_penalty, 0, 10, open_low=True)
    in_range("min_tokens", request.min_tokens, 0, max_tokens)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP:
        raise invalid("stop", f"takes up to {MAX_STOP} strings, not {len(stops)}.", "out_of_range")
    if "" in stops:
        raise invalid("stop", "an empty string would stop every answer.")
    return stops


def _token_ids(param: str, ids: list[int]) -> tuple[int, ...]:
    for id in ids:
        in_range(param, id, 0, MAX_TOKEN_ID)
    return tuple(ids)


def _bias(bias: dict[str, float]) -> dict[int, float]:
    checked = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID):
            raise invalid("logit_bias", f"its keys are token ids, not {key[:20]!r}.")
        in_range(f"logit_bias.{key}", value, -100, 100)
        checked[int(key)] = float(value)
    return checked


def check_cache(request: Common) -> None:
    """Raises unless the cache words are short: they are part of every block's name, and of every message."""
    for param in ("cache_salt", "cache_class"):
        value = getattr(request, param)
        if value is not None and len(value) > MAX_CACHE_WORD:
            raise invalid(param, f"takes up to {MAX_CACHE_WORD} characters, not {len(value)}.", "out_of_range")
    retention_of(request.cache_retention)


def retention_of(written: str | int | None, *, param: str = "cache_retention") -> float | None:
    """Seconds that blocks of a request stay cached after their last use, as 3d, 12h, 0. Raises RequestError."""
    if written is None:
        return None
    try:
        return parse_duration(written)
    except ValueError as error:
        raise invalid(param, f"{error}.") from error
