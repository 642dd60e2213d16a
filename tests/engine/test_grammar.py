"""Grammars that can't be followed are refused with the reason, by the name of their field."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from flowinfer.engine.grammar import Grammars
from flowinfer.engine.grammar.after import AfterToken
from flowinfer.engine.grammar.guidance import GuidanceEngine, check
from flowinfer.errors import RequestError
from flowinfer.message import Grammar


def engine(missing: bytes = b"") -> GuidanceEngine:
    """Over single bytes, less those that are missing."""
    tokens = [b"" if byte in missing else bytes([byte]) for byte in range(256)]
    return GuidanceEngine(
        [*tokens, b"</s>"],
        control_ids=[256],
        eos_ids=[256],
        encode=lambda text: [byte for byte in text.encode() if byte not in missing],
    )


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "object", "not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "wat"}, "wat"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5)"),
        ({"type": "string", "pattern": "(("}, "unclosed group"),
        ({"type": "string", "format": "weird"}, "weird"),
        ({"$ref": "#/$defs/x"}, "/$defs/x"),
        ({"$ref": "http://127.0.0.1/schema"}, "http://127.0.0.1/schema"),
        (False, "object schema"),
    ],
)
def test_what_a_schema_cannot_have_is_named(schema: Any, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        check(Grammar("json", json.dumps(schema), "response_format.json_schema.schema"))
    assert (caught.value.status, caught.value.code) == (400, "invalid_grammar")
    assert caught.value.param == "response_format.json_schema.schema"
    assert says in caught.value.message


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json", "{", "guided_json"),
        Grammar("regex", "[a", "guided_regex"),
        Grammar("lark", "start: nothing", "guided_grammar"),
        Grammar("lark", "nonsense", "guided_grammar"),
        Grammar("lark", "root ::= (", "guided_grammar"),
    ],
)
def test_what_cannot_be_read_is_refused(grammar: Grammar) -> None:
    for attempt in (check, engine().compile):
        with pytest.raises(RequestError) as caught:
            attempt(grammar)
        assert (caught.value.status, caught.value.param) == (400, grammar.param)


def test_a_language_without_a_text_is_refused_where_the_tokens_are_known() -> None:
    with pytest.raises(RequestError, match="matches"):
        engine().compile(Grammar("regex", r"[^\s\S]", "guided_regex"))


def test_a_dead_end_allows_nothing_not_even_an_end() -> None:
    """llguidance itself would end the text here, so that half an answer would pass for a whole one."""
    matcher = engine(missing=b"x").compile(Grammar("regex", "a(bx|c)", "guided_regex")).start()
    assert matcher.advance(ord("a"))
    assert matcher.advance(ord("b"))
    assert not matcher.allowed().any()
    matcher.rollback(1)
    assert matcher.allowed().any()


def test_a_matcher_walks_and_comes_back() -> None:
    matcher = engine().compile(Grammar("regex", "ab|ac")).start()
    before = matcher.allowed().tobytes()
    assert matcher.advance(ord("a"))
    assert not matcher.advance(ord("x"))
    assert matcher.fitting(list(b"cc")) == 1
    assert matcher.advance(ord("c"))
    matcher.rollback(2)
    assert matcher.allowed().tobytes() == before
    assert not matcher.error


def test_a_grammar_that_waits_for_a_token_sleeps_again_when_that_is_undone() -> None:
    matcher = AfterToken(engine().compile(Grammar("regex", "ab")).start(), ord(">"), [256])
    anything = matcher.allowed().tobytes()
    assert not matcher.advance(256)
    assert matcher.fitting(list(b"zz>abc")) == 5
    assert matcher.allowed().tobytes() == anything
    for token in b"z>a":
        assert matcher.advance(token)
    assert not matcher.advance(ord("z"))
    matcher.rollback(2)
    assert matcher.allowed().tobytes() == anything
    for token in b">ab":
        assert matcher.advance(token)
    assert np.flatnonzero(np.unpackbits(matcher.allowed(), bitorder="little")).tolist() == [256]


def test_equal_grammars_are_compiled_once_and_the_oldest_are_forgotten() -> None:
    compiled: list[str] = []

    class Counting:
        def compile(self, grammar: Grammar) -> Any:
            compiled.append(grammar.text)
            return engine_once.compile(grammar)

    engine_once = engine()
    grammars = Grammars(Counting, capacity=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        grammars.start(Grammar("regex", text))
    assert compiled == ["a", "b", "c", "b"]
