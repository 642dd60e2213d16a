"""/tokenize and /detokenize, in the shapes that vLLM's clients know. Tokenizes as the pipeline does, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from flowinfer.engine.hub import resolve
from flowinfer.errors import FlowInferError, RequestError
from flowinfer.serve.openai.fields import in_range, invalid
from flowinfer.stages.recipe_tokenize import policy
from flowinfer.stages.recipe_tokenize.reply import Habits, habits_of
from flowinfer.stages.recipe_tokenize.told import told_by
from flowinfer.text.tokenizer import TextTokenizer, load_tokenizer


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Text, or a chat, to tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Ids to turn into text."""

    model: str | None = None
    tokens: list[int]


class Told(NamedTuple):
    """A model's tokenizer, and how the model is told to think."""

    tokenizer: TextTokenizer
    habits: Habits


class Tokens:
    """The two endpoints over one tokenizer, which is loaded on first use: most services never need it here."""

    def __init__(self, load: Callable[[], Told]) -> None:
        self._load = load
        self._lock = asyncio.Lock()
        self._told: Told | None = None

    async def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """{count, max_model_len, tokens, token_strs}. Raises RequestError naming the field at fault."""
        if (request.prompt is None) == (request.messages is None):
            raise invalid("prompt", "give either prompt or messages.")
        told = await self._get()
        tokenizer = told.tokenizer
        ids = await asyncio.to_thread(_encode, told, request)
        strings = [tokenizer.token_bytes(index).decode("utf-8", "replace") for index in ids]
        return {
            "count": len(ids),
            "max_model_len": tokenizer.context_length,
            "tokens": ids,
            "token_strs": strings if request.return_token_strs else None,
        }

    async def detokenize(self, request: DetokenizeRequest) -> dict[str, Any]:
        """{prompt}: the text, special tokens as they are written. Raises RequestError naming the field at fault."""
        tokenizer = (await self._get()).tokenizer
        for index in request.tokens:
            in_range("tokens", index, 0, tokenizer.vocab_size - 1)
        return {"prompt": b"".join(map(tokenizer.token_bytes, request.tokens)).decode("utf-8", "replace")}

    async def count(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, args: dict[str, Any]
    ) -> int:
        """Tokens that a chat has as a prompt. Raises RequestError."""
        told = await self._get()
        told.habits.check_tools(tools)
        return len(await asyncio.to_thread(_chat_ids, told, messages, tools, args))

    async def _get(self) -> Told:
        async with self._lock:
            if self._told is None:
                self._told = await asyncio.to_thread(self._load)
            return self._told


def _encode(told: Told, request: TokenizeRequest) -> list[int]:
    if request.messages is not None:
        messages, args = request.messages, dict(request.chat_template_kwargs or {})
        if taken := {"messages", "tools"} & args.keys():
            raise invalid(f"chat_template_kwargs.{min(taken)}", "is set by the service.")
        if request.add_generation_prompt is not None:
            args["add_generation_prompt"] = request.add_generation_prompt
        return _chat_ids(told, messages, request.tools, args)
    assert request.prompt is not None, "one of the two is there"
    if request.add_special_tokens is False:
        return [int(index) for index in told.tokenizer.encode_plain(request.prompt)]
    return [int(index) for index in told.tokenizer.encode_prompt(request.prompt)]


def _chat_ids(
    told: Told, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, args: dict[str, Any]
) -> list[int]:
    segments = told.tokenizer.render(policy.normalize(messages), tools, **told.habits.arguments(args))
    return [int(i) for i in told.tokenizer.encode_segments(segments)]


def load_for(models: tuple[str, ...], chat: Mapping[str, Any]) -> Told:
    """The service's model, told chats as the stage whose settings `chat` holds tells it.

    Raises RequestError 404 where it has no tokenizer that can be read here.
    """
    try:
        plain = load_tokenizer(resolve(models[0] if models else ""))
        tokenizer = told_by(plain, chat.get("template"), chat.get("recipe", "auto"))
        parsers = chat.get("tool_parser", "auto"), chat.get("reasoning_parser", "auto")
        return Told(tokenizer, habits_of(tokenizer, *parsers, chat.get("template_args")))
    except (FlowInferError, OSError) as error:
        message = f"No tokenizer is known for {', '.join(models) or 'this service'}."
        raise RequestError(404, message, code="no_tokenizer") from error
