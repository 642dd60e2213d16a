"""Answers whose calls are bound: whatever a model picks of what the grammar allows, its parser reads as valid calls."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.engine.grammar.after import AfterToken
from flowinfer.engine.grammar.base import Matcher
from flowinfer.engine.grammar.guidance import GuidanceEngine, check
from flowinfer.engine.grammar.reply import AnswerGrammars, Wanted, answer_grammar
from flowinfer.errors import RequestError
from flowinfer.message import Grammar, ReplyFormat, ToolChoice
from flowinfer.text.reply import open_parser
from flowinfer.text.reply.formats import TOOL_FORMATS

MARKERS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "｜DSML｜",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|python_tag|>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>",
)  # fmt: skip
EOS = 256
# Where markers are text: pieces of several bytes, as vocabularies have them, so that chance finds the end of a value.
PHRASES = [text for form in TOOL_FORMATS.values() for text in (form.written.before, (form.written.text or " ")[1:])]
PHRASES = [*{word for text in PHRASES for word in ([text] if isinstance(text, str) else text) if len(word) > 1}]
PHRASES += ["<|end|><|start|>assistant", "</think>"]
FORMATS = [*TOOL_FORMATS, "harmony"]
# gpt-oss's markers are control tokens in every vocabulary that has learned them.
KINDS = [(name, special) for name in FORMATS for special in (True, False) if special or name != "harmony"]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "code": {"type": "string", "pattern": "^[a-c]{2,4}$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "unit", "code", "place"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False}},
}
CLOCK: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name: str, schema: Any, *, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


TOOLS = [tool("weather", WEATHER, strict=True), tool("clock", CLOCK, strict=True)]
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}


class World(NamedTuple):
    """A vocabulary of single bytes, and of the markers if they are control tokens."""

    engine: GuidanceEngine
    tokens: list[bytes]
    special: dict[str, int]

    def mark(self, text: str) -> Sequence[int | str]:
        """A literal cut at its control tokens."""
        parts: list[int | str] = []
        while text:
            at, marker = min(((text.find(m), m) for m in self.special if m in text), default=(len(text), ""))
            parts += [text[:at]] if at else []
            parts += [self.special[marker]] if marker else []
            text = text[at + len(marker) :]
        return parts

    def ids(self, text: str) -> list[int]:
        return [i for part in self.mark(text) for i in ([part] if isinstance(part, int) else part.encode())]

    def start(self, grammar: Grammar) -> Matcher:
        matcher: Matcher = self.engine.compile(grammar).start()
        return matcher if grammar.after is None else AfterToken(matcher, grammar.after, [EOS], grammar.opens)


@cache
def world(special: bool) -> World:
    spelled = [p for p in PHRASES if not special or not any(m in p for m in MARKERS)]
    words = [m.encode() for m in [*(MARKERS if special else ()), *spelled]]
    tokens = [*(bytes([byte]) for byte in range(256)), b"</s>", *words]
    ids = {marker: 257 + n for n, marker in enumerate(MARKERS)} if special else {}
    encode = lambda text: list(text.encode())  # noqa: E731 - the canonical spelling by bytes
    return World(GuidanceEngine(tokens, control_ids=[*ids.values()], eos_ids=[EOS], encode=encode), tokens, ids)


def form_of(name: str, *, thinking: bool = False) -> ReplyFormat:
    strings = {"weather": ("city", "unit", "code")} if name in ("glm", "qwen3-coder") else {}
    reasoning = "harmony" if name == "harmony" else "think" if thinking else ""
    return ReplyFormat(reasoning=reasoning, tools=name, thinking=thinking, strings=strings)


LIKED = frozenset(b'"}]<\n/>abC1:')


def walk(place: World, grammar: Grammar, seed: int) -> str | None:
    """An answer by chance, None if it came to no end."""
    matcher, rng, out = place.start(grammar), random.Random(seed), b""
    for _ in range(3000):
        allowed = np.flatnonzero(np.unpackbits(matcher.allowed(), bitorder="little")).tolist()
        assert allowed, f"dead end behind {out!r}: {matcher.error}"
        keen = [i for i in allowed if i >= EOS or i in LIKED]
        ends = [i for i in allowed if i >= EOS]
        token = rng.choice(ends if ends and rng.random() < 0.3 else keen if keen and rng.random() < 0.8 else allowed)
        if token == EOS:
            return out.decode()
        assert matcher.advance(token)
        out += place.tokens[token]
    return None


def is_whole(place: World, grammar: Grammar, ids: Sequence[int]) -> bool:
    """Whether these tokens are an answer that may end there."""
    matcher = place.start(grammar)
    return all(map(matcher.advance, ids)) and bool(np.unpackbits(matcher.allowed(), bitorder="little")[EOS])


def parsed(form: ReplyFormat, text: str) -> tuple[str, list[tuple[str, Any]]]:
    parser = open_parser(form, call_prefix="x")
    parser.push(text)
    parser.finish()
    calls: dict[int, list[str]] = {}
    for part in parser.delta.calls:
        calls.setdefault(part.index, [part.name, ""])[1] += part.arguments
    return "".join(parser.delta.text), [(name, json.loads(arguments)) for name, arguments in calls.values()]


def bound(place: World, name: str, choice: ToolChoice, tools: Sequence[Any] = TOOLS, **more: Any) -> Grammar:
    grammar = answer_grammar(form_of(name, **more), Wanted(None, tools, choice), place.mark)
    assert grammar is not None
    check(grammar)
    return grammar


@pytest.mark.parametrize(("name", "special"), KINDS)
def test_a_required_call_is_a_valid_one_whatever_the_model_picks(name: str, special: bool) -> None:
    place = world(special)
    grammar = bound(place, name, ToolChoice(required=True))
    ended = [text for seed in range(12) if (text := walk(place, grammar, seed)) is not None]
    assert len(ended) >= 6
    for text in ended:
        said, calls = parsed(form_of(name), text)
        assert calls and not said.strip(), text
        for called, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[called])


@pytest.mark.parametrize(("name", "special"), KINDS)
def test_a_strict_tool_holds_in_any_answer(name: str, special: bool) -> None:
    place = world(special)
    grammar = bound(place, name, ToolChoice())
    for seed in range(8):
        if (text := walk(place, grammar, seed)) is not None:
            for called, arguments in parsed(form_of(name), text)[1]:
                jsonschema.validate(arguments, SCHEMAS[called])


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_tool_is_called_once_where_calls_are_not_parallel(name: str) -> None:
    place = world(True)
    grammar = bound(place, name, ToolChoice(required=True, names=("clock",), parallel=False))
    for seed in range(6):
        text = walk(place, grammar, seed)
        assert text is not None and parsed(form_of(name), text)[1] == [("clock", {})]


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_has_one_call_at_most_where_calls_are_not_parallel(name: str) -> None:
    place, tools = world(True), [tool("clock", CLOCK)]
    grammar = bound(place, name, ToolChoice(parallel=False), tools)
    texts = [text for seed in range(12) if (text := walk(place, grammar, seed)) is not None]
    counts = {len(parsed(form_of(name), text)[1]) for text in texts}
    assert counts <= {0, 1} and (1 in counts or name in ("llama3-json", "harmony"))  # chance seldom calls there


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_tool_without_strict_takes_is_its_own_affair(name: str) -> None:
    tools = [tool("weather", {"not": {"type": "string"}}), tool("clock", None)]
    assert answer_grammar(form_of(name), Wanted(None, tools, ToolChoice()), world(True).mark) is None
    grammar = bound(world(True), name, ToolChoice(required=True), tools)
    walked = [text for seed in range(8) if (text := walk(world(True), grammar, seed)) is not None]
    assert {called for text in walked for called, _ in parsed(form_of(name), text)[1]} <= {"weather", "clock"}


TAGGED = [name for name in FORMATS if name != "harmony" and TOOL_FORMATS[name].written.text]


@pytest.mark.parametrize(
    ("name", "schema", "says"),
    [(name, {"not": {"type": "string"}}, "followed") for name in FORMATS]
    + [(name, {"anyOf": [{"type": "object"}]}, "anyOf") for name in TAGGED]
    + [(name, {"properties": {"a": {"type": "string", "format": "date"}}}, "format") for name in TAGGED]
    + [(name, {"properties": {"a<": {"type": "string"}}}, "a<") for name in TAGGED]
    + [(name, {"properties": {}, "required": ["b"]}, "b") for name in TAGGED],
)
def test_a_strict_schema_that_cannot_be_bound_is_refused_by_name(name: str, schema: Any, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        bound(world(True), name, ToolChoice(), [tool("clock", CLOCK), tool("f", schema, strict=True)])
    assert (caught.value.status, caught.value.param) == (400, "tools[1].function.parameters")
    assert says in caught.value.message


@pytest.mark.parametrize("name", [name for name in TAGGED if "DSML" in TOOL_FORMATS[name].open])
def test_a_text_value_cannot_spell_its_own_end(name: str) -> None:
    place, written = world(True), TOOL_FORMATS[name].written
    assert written.text is not None
    schema = {"properties": {"city": {"type": "string"}}, "required": ["city"]}
    grammar = bound(place, name, ToolChoice(required=True), [tool("f", schema, strict=True)])
    head = written.before + written.head.replace("{name}", "f") + written.text[0].replace("{key}", "city")
    ids = [*place.ids(head), *b"Paris <b>"]
    spelled = list(written.text[1].strip().encode())
    assert place.start(grammar).fitting([*ids, *spelled]) == len(ids) + len(spelled) - 1
    assert is_whole(place, grammar, [*ids, *place.ids(written.text[1] + written.tail + written.after)])


def test_what_binds_the_same_tools_is_made_once() -> None:
    marked: list[str] = []

    def mark(text: str) -> Sequence[int | str]:
        marked.append(text)
        return world(True).mark(text)

    grammars = AnswerGrammars(mark, capacity=1)
    once = grammars.of(form_of("hermes"), Wanted(None, TOOLS, ToolChoice()))
    count = len(marked)
    assert grammars.of(form_of("hermes"), Wanted(None, TOOLS, ToolChoice())) == once and len(marked) == count
    assert grammars.of(form_of("hermes"), Wanted(None, TOOLS, ToolChoice(required=True))) != once
    assert grammars.of(form_of("hermes"), Wanted(None, TOOLS, ToolChoice())) == once and len(marked) > count


def test_a_name_that_would_end_itself_is_refused() -> None:
    with pytest.raises(RequestError, match=r"tools\[0\].function.name"):
        bound(world(True), "hermes", ToolChoice(required=True), [tool('f"}', CLOCK)])


ANSWER = Grammar("json", json.dumps({"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"]}))
WAYS = {
    "regex": Grammar("regex", r"ab+", "guided_regex"),
    "choice": Grammar("choice", '["yes", "no"]', "guided_choice"),
    "lark": Grammar("lark", "start: rest\nrest: /[ab]+/", "guided_grammar"),
}
FITS = {"regex": "abb", "choice": "no", "lark": "ba"}


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_of_a_given_form_may_be_a_call_instead(name: str) -> None:
    place, form = world(True), form_of(name)
    grammar = answer_grammar(form, Wanted(ANSWER, TOOLS[1:], ToolChoice()), place.mark)
    assert grammar is not None and grammar.param == "response_format"
    text = '<|channel|>final<|message|>{"q": 3}' if name == "harmony" else '{"q": 3}'
    ids = place.ids(text)
    assert is_whole(place, grammar, ids)
    assert place.start(grammar).fitting(place.ids(text.replace("3", '"x"'))) < len(ids)
    calls = [parsed(form, text)[1] for seed in range(30) if (text := walk(place, grammar, seed)) is not None]
    assert [("clock", {})] in calls and [] in calls


@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_grammar_can_stand_beside_calls(way: str) -> None:
    place = world(True)
    grammar = answer_grammar(form_of("hermes"), Wanted(WAYS[way], TOOLS, ToolChoice()), place.mark)
    assert grammar is not None
    check(grammar)
    assert is_whole(place, grammar, place.ids(FITS[way]))
    assert place.start(grammar).fitting(place.ids("<tool_call>\n{")) == 3


def test_bare_json_calls_beside_a_form_need_a_token_to_tell_them_apart() -> None:
    with pytest.raises(RequestError, match="'tools'"):
        answer_grammar(form_of("llama3-json"), Wanted(ANSWER, TOOLS, ToolChoice()), world(False).mark)


@pytest.mark.parametrize("special", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("thinking", [True, False], ids=["prompted", "of its own"])
def test_a_form_binds_behind_reasoning(special: bool, thinking: bool) -> None:
    place, form = world(special), ReplyFormat(reasoning="think", thinking=thinking)
    grammar = answer_grammar(form, Wanted(ANSWER, (), ToolChoice()), place.mark)
    assert grammar is not None
    thought = place.ids(("" if thinking else "<think>") + "So {it} is.</think>")
    answer = place.ids('{"q": 3}')
    assert is_whole(place, grammar, [*thought, *answer]) and not is_whole(place, grammar, thought)
    assert place.start(grammar).fitting([*thought, ord("x")]) == len(thought)
    assert place.start(grammar).fitting([*thought[:-1], EOS]) <= len(thought) - 1
    assert thinking or is_whole(place, grammar, answer)


def test_no_reasoning_comes_where_the_prompt_has_closed_it() -> None:
    place, form = world(True), ReplyFormat(reasoning="think", thought=True)
    grammar = answer_grammar(form, Wanted(ANSWER, (), ToolChoice()), place.mark)
    assert grammar is not None
    assert place.start(grammar).fitting([place.special["<think>"]]) == 0
    assert is_whole(place, grammar, place.ids('{"q": 3}'))


def test_harmony_binds_the_final_channel_alone() -> None:
    place = world(True)
    grammar = answer_grammar(ReplyFormat(reasoning="harmony"), Wanted(ANSWER, (), ToolChoice()), place.mark)
    assert grammar is not None
    thought = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
    assert is_whole(place, grammar, place.ids(thought + '<|channel|>final<|message|>{"q": 3}'))
    assert not is_whole(place, grammar, place.ids(thought + "<|channel|>final<|message|>So."))


def test_a_matcher_that_may_think_first_walks_and_comes_back() -> None:
    place = world(True)
    opens, closes = place.special["<think>"], place.special["</think>"]
    matcher = AfterToken(place.engine.compile(Grammar("regex", "ab")).start(), closes, [EOS], opens)
    steps = [opens, ord("z"), opens, closes, ord("a"), ord("b")]
    seen = []
    for token in steps:
        seen.append(matcher.allowed().tobytes())
        assert matcher.advance(token)
    assert np.flatnonzero(np.unpackbits(matcher.allowed(), bitorder="little")).tolist() == [EOS]
    for before in range(len(steps)):  # undone to every place, and walked again from there
        matcher.rollback(len(steps) - before)
        assert matcher.allowed().tobytes() == seen[before]
        assert matcher.fitting(steps[before:]) == len(steps) - before
        for token in steps[before:]:
            assert matcher.advance(token)
    matcher.rollback(len(steps))
    assert matcher.advance(ord("a")) and not matcher.advance(opens)


ODD_KEYS = ["type", "a", "enum", "const", "pattern", "minLength", "maxLength", "$ref", "items"]


def odd(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists and objects of JSON values, some with a type as schemas have it."""
    objects = st.dictionaries(st.sampled_from(ODD_KEYS), inner, max_size=3)
    typed = st.builds(lambda kind, rest: {**rest, "type": kind}, st.sampled_from(["string", "object"]), objects)
    return st.lists(inner, max_size=3) | objects | typed


SCALARS = st.none() | st.booleans() | st.integers(-3, 9) | st.text('ab<>"{}^$(/\\\n', max_size=5)
JSON_VALUES = st.recursive(SCALARS, odd, max_leaves=8)
SCHEMA_KEYS = ["type", "properties", "required", "additionalProperties", "$defs", "anyOf", "x-guidance", "description"]


@pytest.mark.parametrize("name", ["hermes", "deepseek-v4", "qwen3-coder", "harmony"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_odd_schemas_are_followed_or_refused(name: str, data: st.DataObject) -> None:
    keyed = st.dictionaries(st.sampled_from(["city", "a<", "n"]), JSON_VALUES, max_size=3)
    schema = data.draw(st.dictionaries(st.sampled_from(SCHEMA_KEYS), JSON_VALUES | keyed, max_size=4))
    for strict in (True, False):
        tools = [tool("f", schema, strict=strict)]
        try:
            grammar = bound(world(True), name, ToolChoice(required=True), tools)
            world(True).start(grammar)
        except RequestError as error:
            assert (error.status, strict) == (400, True), f"{error.message}: {schema}"
