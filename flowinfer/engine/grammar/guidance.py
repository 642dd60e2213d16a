"""Grammars by llguidance: JSON Schema, regular expressions, choices, Lark and GBNF. Knows one vocabulary.

Tokens are matched by their bytes as the detokenizer writes them, so what a client reads is what the grammar saw.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from

from flowinfer.engine.grammar.base import Bits, grammar_error
from flowinfer.engine.grammar.lark import JSON_SPACE
from flowinfer.errors import RequestError
from flowinfer.message import Grammar
from flowinfer.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_JSON_DEFAULTS: JsonCompileOptions = {"whitespace_pattern": JSON_SPACE}


class GuidanceEngine:
    """Compiles for one vocabulary; the tables take 0.4 s for 49,152 tokens."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        *,
        control_ids: Collection[int],
        eos_ids: Collection[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        """token_bytes: of every id of the model.  encode: text to ids, for canonical forced tokens."""
        table = _Table(token_bytes, control_ids, eos_ids, encode)
        self.vocab_size = len(token_bytes)
        self._tokenizer = LLTokenizer(TokenizerWrapper(table), n_vocab=len(token_bytes), eos_token=sorted(eos_ids))

    @classmethod
    def of(cls, tokenizer: TextTokenizer, vocab_size: int, eos_ids: Collection[int]) -> GuidanceEngine:
        """The engine of a model of `vocab_size` ids, whose tokenizer may know fewer."""
        return cls(
            [tokenizer.token_bytes(index) for index in range(vocab_size)],
            control_ids=tokenizer.control_ids,
            eos_ids={*eos_ids, *tokenizer.eos_ids},
            encode=lambda text: [int(index) for index in tokenizer.encode_plain(text)],
        )

    def compile(self, grammar: Grammar) -> GuidanceGrammar:
        """1 to 6 ms for a schema. Raises RequestError 400 naming the field."""
        matcher = self.matcher(grammar)
        if not GuidanceMatcher(matcher).allowed().any():
            raise grammar_error(grammar, "no text of this model's tokens matches it.")
        return GuidanceGrammar(matcher)

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """llguidance's own matcher at the beginning. Raises RequestError 400."""
        matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0)
        if matcher.is_error():
            raise grammar_error(grammar, matcher.get_error())
        return matcher


class GuidanceGrammar:
    """A compiled grammar: a matcher that nobody advances."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> GuidanceMatcher:
        """A matcher at the beginning."""
        return GuidanceMatcher(self._matcher)


class GuidanceMatcher:
    """Matcher over a copy of llguidance's, which stands at the beginning."""

    def __init__(self, beginning: LLMatcher) -> None:
        self._beginning, self._matcher = beginning, beginning.deep_copy()
        self._tokens: list[int] = []
        self._dead = False

    def allowed(self) -> Bits:
        may_end = self._matcher.is_accepting()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        # In a dead end llguidance would let the text just end, and half an answer would pass for a whole one.
        self._dead = not may_end and self._matcher.is_stopped()
        return np.zeros_like(bits) if self._dead else bits

    def advance(self, token: int) -> bool:
        if self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._tokens.append(token)
        return True

    def rollback(self, count: int) -> None:
        if count == 0:
            return
        del self._tokens[-count:]
        if self._dead:  # llguidance doesn't come back from there
            self._matcher, self._dead = self._beginning.deep_copy(), False
            self._matcher.try_consume_tokens(self._tokens)
        else:
            self._matcher.rollback(count)

    def fitting(self, tokens: Sequence[int]) -> int:
        return self._matcher.validate_tokens(list(tokens))

    @property
    def error(self) -> str:
        return self._matcher.get_error() if self._matcher.is_error() else ""


def check(grammar: Grammar) -> None:
    """Raises RequestError 400 for a grammar that no vocabulary could follow. Needs no vocabulary, takes 0.1 ms."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(_source(grammar))
    if failed:
        raise grammar_error(grammar, messages[0])


def accepts(schema: Any) -> bool:
    """Whether a JSON Schema can be followed."""
    try:
        check(Grammar("json", json.dumps(schema)))
    except RequestError:
        return False
    return True


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form. Raises RequestError."""
    try:
        if grammar.kind == "nested":
            return _nested(grammar)
        if grammar.kind == "json":
            return LLMatcher.grammar_from_json_schema(grammar.text, defaults=_JSON_DEFAULTS)
        if grammar.kind == "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        if grammar.kind == "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(grammar.text))))
        return grammar_from("grammar", grammar.text)
    except ValueError as error:
        raise grammar_error(grammar, str(error)) from None


def _nested(grammar: Grammar) -> str:
    outer, kind, text = json.loads(grammar.text)
    body = _source(msgspec.structs.replace(grammar, kind=kind, text=text))
    inner = json.loads(body)["grammars"][0] if body.startswith("{") else {"lark_grammar": body}
    return json.dumps({"grammars": [{"lark_grammar": outer}, {**inner, "name": "body"}]})


class _Table:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        control_ids: Collection[int],
        eos_ids: Collection[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        self.eos_token_id = min(eos_ids)
        self.tokens = list(token_bytes)
        self.special_token_ids = sorted({*control_ids, *eos_ids})
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))
