"""Turns a request's messages, text or ids into a prompt. What the model may be told is decided in policy."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from pydantic import Field, model_validator

from flowinfer.errors import RequestError
from flowinfer.message import Call, Grammar, Ids, Prompt, ReplyFormat
from flowinfer.stage import Contract, ModelUse, Stage, StageConfig, setting
from flowinfer.stages.recipe_tokenize import policy, reply
from flowinfer.stages.recipe_tokenize.told import Recipe, told_by
from flowinfer.text.reply.formats import ReasoningParser, ToolParser
from flowinfer.units import TokenCount

if TYPE_CHECKING:
    from flowinfer.engine.grammar.reply import AnswerGrammars
    from flowinfer.text.tokenizer import TextTokenizer
    from flowinfer.text.traced import Segment

log = logging.getLogger(__name__)


class RecipeTokenize(Stage):
    """Renders chats by the model's template and tokenizes them; text of users can't become a control token."""

    class Config(StageConfig):
        model: str = setting("", change="cold")
        max_prompt_tokens: TokenCount | None = None
        template: str | None = None
        recipe: Recipe = "auto"
        template_args: dict[str, Any] = Field(default={})
        tool_parser: ToolParser = "auto"
        reasoning_parser: ReasoningParser = "auto"

        @model_validator(mode="after")
        def _one_format(self) -> RecipeTokenize.Config:
            if self.template and self.recipe not in ("auto", "template"):
                raise ValueError(f"both template and recipe ({self.recipe}) say how chats are told; give one of them")
            return self

        def contract(self) -> Contract:
            return Contract(model=ModelUse(self.model))

    config: Config
    tokenizer: TextTokenizer

    def open(self) -> None:
        from flowinfer.engine.hub import resolve
        from flowinfer.text.tokenizer import load_tokenizer

        folder = resolve(self.config.model)
        self.use(self.ctx.shared(("tokenizer", str(folder)), lambda: load_tokenizer(folder), arms=True))

    def use(self, tokenizer: TextTokenizer) -> None:
        """Works with this tokenizer. Raises ModelError where its templates can't be followed or read."""
        tokenizer = told_by(tokenizer, self.config.template, self.config.recipe)
        tokenizer.check_templates()
        self.tokenizer = tokenizer
        config = self.config
        self._habits = reply.habits_of(tokenizer, config.tool_parser, config.reasoning_parser, config.template_args)
        self._grammars: AnswerGrammars | None = None  # made on first use: most services never load llguidance here
        self._pooled: set[str] = set()

    def step(self, calls: list[Call]) -> Iterable[Prompt]:
        prompts: list[Prompt] = []
        for call in calls:
            grammar = call.sampling.grammar.text if call.sampling.grammar else None
            if policy.num_chars([call.messages, call.tools, call.prompt, grammar]) > policy.INLINE_CHARS:
                self._pooled.add(call.id)
                self.ctx.submit(partial(self._prompt, call), partial(self._finish, call.id), request=call.id)
            else:
                prompts += self._try(call)
        return prompts

    def cancel(self, requests: Collection[str]) -> None:
        self._pooled.difference_update(requests)

    def _try(self, call: Call) -> list[Prompt]:
        try:
            return [self._prompt(call)]
        except RequestError as error:
            self.ctx.fail(call.id, error)
            return []

    def _finish(self, request: str, result: Prompt | BaseException) -> list[Prompt]:
        if request not in self._pooled:
            return []  # cancelled meanwhile
        self._pooled.discard(request)
        if isinstance(result, Prompt):
            return [result]
        if not isinstance(result, RequestError):
            log.error("%s: tokenizing broke", self.ctx.stage, exc_info=result)
            result = RequestError(500, f"Stage {self.ctx.stage!r} failed: {result}", code="stage_failed")
        self.ctx.fail(request, result)
        return []

    def _prompt(self, call: Call) -> Prompt:
        """The call as a prompt. Raises RequestError. Runs in the loop or in the pool, so it changes nothing here."""
        policy.check_ids(call.sampling, self.tokenizer.vocab_size)
        context = self.tokenizer.context_length
        tokens, form = self._chat(call) if call.messages is not None else (self._plain(call), None)
        grammar = self._grammar(call, form)
        param = "prompt" if call.messages is None else "messages"
        policy.check_length(len(tokens), context=context, limit=self.config.max_prompt_tokens, param=param)
        sampling = policy.fit(
            call.sampling, prompt_tokens=len(tokens), context=context, eos_ids=self.tokenizer.eos_ids, reply=form
        )
        return Prompt(
            id=call.id,
            tokens=tokens,
            sampling=msgspec.structs.replace(sampling, grammar=grammar),
            cache_salt=call.cache_salt,
            cache_class=call.cache_class,
            cache_keep_s=call.cache_keep_s,
            cache_in_memory=call.cache_in_memory,
            deadline=call.deadline,
        )

    def _chat(self, call: Call) -> tuple[Ids, ReplyFormat | None]:
        segments = self.segments(call)
        self._check_chars(sum(len(segment.text) for segment in segments), "messages")
        return self.tokenizer.encode_segments(segments), self._habits.format_of(call.tools, segments)

    def _grammar(self, call: Call, form: ReplyFormat | None) -> Grammar | None:
        """What binds the answer: its form, calls, or both. Checked here, so that a bad one costs no prefill."""
        if call.sampling.grammar is None and not call.tools:
            return None
        from flowinfer.engine.grammar.reply import AnswerGrammars, Wanted

        if self._grammars is None:
            self._grammars = AnswerGrammars(self.tokenizer.marked)
        grammar = self._grammars.of(form, Wanted(call.sampling.grammar, call.tools or (), call.tool_choice))
        if grammar is not None:
            policy.check_ends(call.sampling, grammar)
        return grammar

    def segments(self, call: Call) -> list[Segment]:
        """A chat in the model's format. Raises RequestError."""
        messages = policy.normalize(call.messages or ())
        self._habits.check_tools(call.tools)
        arguments = self._habits.arguments(call.template_args)
        if (grammar := call.sampling.grammar) is not None and self.tokenizer.shows_form:
            arguments["form"] = (grammar.kind, grammar.text)
        return self.tokenizer.render(messages, call.tools, **arguments)

    def _plain(self, call: Call) -> Ids:
        if isinstance(call.prompt, str):
            self._check_chars(len(call.prompt), "prompt")
            return self.tokenizer.encode_prompt(call.prompt)
        if call.prompt is None:
            raise RequestError(
                400, "The request has neither `messages` nor `prompt`.", code="missing", param="messages"
            )
        return self._checked(np.asarray(call.prompt))

    def _check_chars(self, num_chars: int, param: str) -> None:
        least = self.tokenizer.min_tokens(num_chars)
        policy.check_hopeless(least, context=self.tokenizer.context_length, param=param)

    def _checked(self, ids: np.ndarray) -> Ids:
        bad = ids[(ids < 0) | (ids >= self.tokenizer.vocab_size)]
        if len(bad):
            message = f"`prompt` holds token id {bad[0]}; the model's ids are 0 to {self.tokenizer.vocab_size - 1}."
            raise RequestError(400, message, code="invalid_value", param="prompt")
        return ids.astype(np.int32)
