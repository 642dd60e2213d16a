"""Every format: what an answer is taken apart into, over every way of cutting its text, and that nothing waits."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.message import ReplyFormat
from flowinfer.text.reply import open_parser
from flowinfer.text.reply.formats import TOOL_FORMATS

Answer = tuple[str, str, list[tuple[str, str]]]
STRINGS = {"f": ("city", "code"), "g": ()}
D = "｜DSML｜"
HERMES = '<tool_call>\n{"name": "f", "arguments": {"city": "Paris \\"}{", "n": [1, {"a": "]"}]}}\n</tool_call>'
ARGUMENTS = {"city": 'Paris "}{', "n": [1, {"a": "]"}]}
TWO = [("f", ARGUMENTS), ("g", {})]
# format -> an answer with the calls TWO
ANSWERS: dict[str, str] = {
    "hermes": f'{HERMES}\n<tool_call>{{"arguments": {{}}, "name": "g"}}</tool_call>',
    "llama3-json": '{"name": "f", "parameters": {"city": "Paris \\"}{", "n": [1, {"a": "]"}]}}; '
    '{"name": "g", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"city": "Paris \\"}{", "n": [1, {"a": "]"}]}}, '
    '{"name": "g", "arguments": {}, "id": "123456789"}]',
    "mistral-args": '[TOOL_CALLS]f[ARGS]{"city": "Paris \\"}{", "n": [1, {"a": "]"}]}[TOOL_CALLS]g[CALL_ID]1[ARGS]{}',
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    '{"city": "Paris \\"}{", "n": [1, {"a": "]"}]}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"city": "Paris \\"}{", "n": [1, {"a": "]"}]}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-v3.2": f'<{D}function_calls>\n<{D}invoke name="f">\n'
    f'<{D}parameter name="city" string="true">Paris "}}{{</{D}parameter>\n'
    f'<{D}parameter name="n" string="false">[1, {{"a": "]"}}]</{D}parameter>\n</{D}invoke>\n'
    f'<{D}invoke name="g">\n</{D}invoke>\n</{D}function_calls>',
    "deepseek-v4": f'<{D}tool_calls>\n<{D}invoke name="f">\n'
    f'<{D}parameter name="city" string="true">Paris "}}{{</{D}parameter>\n'
    f'<{D}parameter name="n" string="false">[1, {{"a": "]"}}]</{D}parameter>\n</{D}invoke>\n'
    f'<{D}invoke name="g">\n</{D}invoke>\n</{D}tool_calls>',
    "deepseek-v4.1": f'<{D} calls>\n<{D} invoke name="f">\n'
    f'<{D} parameter name="city" string="true">Paris "}}{{</{D} parameter>\n'
    f'<{D} parameter name="n" string="false">[1, {{"a": "]"}}]</{D} parameter>\n</{D} invoke>\n'
    f'<{D} invoke name="g">\n</{D} invoke>\n</{D} calls>',
    "glm": '<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Paris "}{</arg_value>\n<arg_key>n</arg_key>\n'
    '<arg_value>[1, {"a": "]"}]</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>',
    "qwen3-coder": '<tool_call>\n<function=f>\n<parameter=city>\nParis "}{\n</parameter>\n'
    '<parameter=n>\n[1, {"a": "]"}]\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=g>\n</function>\n</tool_call>",
    "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Paris \\"}{", '
    '"n": [1, {"a": "]"}]}<|call|><|start|>assistant<|channel|>commentary to=functions.g<|message|>{}',
}
TEXTS = {  # before calls
    "harmony": "<|channel|>final<|message|>Let me see.<|end|><|start|>assistant",
    "llama3-json": "Let me see. <|python_tag|>",
}
THOUGHTS = {"harmony": "<|channel|>analysis<|message|>The user <b> asks.<|end|><|start|>assistant"}


def form_of(tools: str, *, thinking: bool = False) -> ReplyFormat:
    reasoning = "harmony" if tools == "harmony" else "think"
    return ReplyFormat(reasoning=reasoning, tools=tools, thinking=thinking, strings=STRINGS)


def read(form: ReplyFormat, pieces: list[str]) -> Answer:
    """What the pieces come to, joined as a client joins deltas."""
    parser = open_parser(form, call_prefix="x")
    reasoning, text, calls = "", "", dict[int, list[str]]()
    for number, piece in enumerate([*pieces, None]):
        parser.finish() if piece is None else parser.push(piece)
        delta = parser.delta
        reasoning += "".join(delta.reasoning)
        text += "".join(delta.text)
        for part in delta.calls:
            assert bool(part.name) == bool(part.id) == (part.index not in calls), f"piece {number}"
            calls.setdefault(part.index, [part.name, ""])[1] += part.arguments
        delta.clear()
    return reasoning, text, [(name, arguments) for name, arguments in calls.values()]


def cut(text: str, places: set[int]) -> list[str]:
    bounds = [0, *sorted(places), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


def loaded(answer: Answer) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in answer[2]]


def whole(name: str) -> str:
    thoughts = THOUGHTS.get(name, "<think>\nThe user <b> asks.\n</think>\n\n")
    return thoughts + TEXTS.get(name, "Let me see.\n") + ANSWERS[name]


def test_every_format_has_an_answer_here() -> None:
    assert ANSWERS.keys() == {*TOOL_FORMATS, "harmony"}


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_are_read(name: str) -> None:
    answer = read(form_of(name), [ANSWERS[name]])
    assert (answer[0], answer[1]) == ("", "")
    assert loaded(answer) == TWO


@pytest.mark.parametrize("name", ANSWERS)
def test_reasoning_text_and_calls_come_apart_at_every_cut(name: str) -> None:
    text = whole(name)
    expected = read(form_of(name), [text])
    assert (expected[0], expected[1]) == ("The user <b> asks.", "Let me see.")
    assert loaded(expected) == TWO
    for place in range(len(text) + 1):
        assert read(form_of(name), [text[:place], text[place:]]) == expected, f"cut at {place}"
    assert read(form_of(name), list(text)) == expected


ALPHABET = {name: [*{*form.markers}] for name, form in TOOL_FORMATS.items()}
WORDS = ["<think>", "</think>", "{", "}", '"', "\\", "[", "]", ",", ":", '"name"', '"arguments"', " ", "\n", "<", "f"]
WORDS += ['{"name": "f", "arguments": {', "<|channel|>", "<|message|>", "analysis", "<|end|>", "to=f", "é", "｜"]


@pytest.mark.parametrize("name", ANSWERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_text_cut_in_any_way_gives_the_same(name: str, data: st.DataObject) -> None:
    words = st.sampled_from(WORDS + ALPHABET.get(name, []))
    text = "".join(data.draw(st.lists(words, max_size=25)))
    text = data.draw(st.sampled_from([text, ANSWERS[name] + text, whole(name)[: len(text) * 3] + text]))
    form = form_of(name, thinking=data.draw(st.booleans()))
    places = data.draw(st.sets(st.integers(0, len(text)), max_size=8))
    expected = read(form, [text])
    assert read(form, cut(text, places)) == expected
    assert read(form, list(text)) == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="abc <>{}\n\"'é", max_size=60), name=st.sampled_from(sorted(TOOL_FORMATS)))
def test_text_without_markers_is_text(text: str, name: str) -> None:
    assert read(form_of(name), list(text)) == ("", text, [])


@pytest.mark.parametrize("name", [name for name in ANSWERS if name not in ("llama3-json", "harmony")])
def test_a_marker_without_a_call_is_text(name: str) -> None:
    text = TOOL_FORMATS[name].open + " is how a call begins. So there."
    assert read(form_of(name), list(text)) == ("", text, [])


def test_a_json_answer_is_text_for_llama() -> None:
    parser = open_parser(form_of("llama3-json"), call_prefix="x")
    parser.push('{"answer": ')
    assert "".join(parser.delta.text) == '{"answer": '[:-1]  # at once, but for white space, which a call may follow
    assert read(form_of("llama3-json"), ['{"answer": 3}']) == ("", '{"answer": 3}', [])


@pytest.mark.parametrize("name", ANSWERS)
def test_arguments_stream_as_they_come(name: str) -> None:
    """A long text argument goes out a character at a time, but for what may still become a marker."""
    head, _, tail = ANSWERS[name].partition("Paris")
    parser = open_parser(form_of(name), call_prefix="x")
    parser.push(head)
    (part,) = parser.delta.calls
    assert part.name == "f"
    for _ in range(50):
        parser.delta.clear()
        parser.push("x")
        assert "".join(part.arguments for part in parser.delta.calls).lstrip('"') == "x"
    parser.push(tail)


@pytest.mark.parametrize("thinking", [True, False])
def test_a_prompt_that_opened_reasoning(thinking: bool) -> None:
    form = ReplyFormat(reasoning="think", thinking=thinking)
    answer = "\nSo.\n</think>\n\nParis.\n"
    expected = ("So.", "Paris.\n", []) if thinking else ("", answer, [])
    assert read(form, list(answer)) == read(form, [answer]) == expected
    assert read(form, [f"<think>{answer}"]) == ("So.", "Paris.\n", [])


def test_reasoning_that_was_cut_off_is_reasoning() -> None:
    assert read(ReplyFormat(reasoning="think", thinking=True), ["So </thi"]) == ("So </thi", "", [])


def test_a_call_that_was_cut_off_keeps_what_came() -> None:
    assert read(form_of("hermes"), [HERMES[:60]])[2] == [("f", HERMES[39:60])]


def test_untyped_values_are_json_if_they_can_be() -> None:
    values = {"a": "1", "b": "true", "c": "True", "d": "two words", "e": "NaN", "code": "1"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    (call,) = loaded(read(form_of("qwen3-coder"), [f"<function=f>\n{body}</function>"]))
    assert call == ("f", {"a": 1, "b": True, "c": True, "d": "two words", "e": "NaN", "code": "1"})


def test_ids_are_unique_and_mistrals_have_nine_characters() -> None:
    ids = {}
    for name in ("hermes", "mistral"):
        parser = open_parser(form_of(name), call_prefix="x")
        parser.push(ANSWERS[name])
        ids[name] = {part.id for part in parser.delta.calls}
        assert len(ids[name]) == 2
    assert all(len(id) == 9 and id.isalnum() for id in ids["mistral"])


LOOPS = ["a", "<", "{", "[", " ", "\n", "</t", '"\\']


@pytest.mark.parametrize("name", ANSWERS)
def test_a_model_that_loops_within_a_marker_or_header_comes_to_an_end(name: str) -> None:
    if name == "harmony":
        heads = ["", "<|channel|>", "<|channel|>analysis<|message|>x<|end|>"]
    else:
        written = TOOL_FORMATS[name].written
        start = written.before + written.head.replace("{name}", "f")
        heads = ["", written.before, start, f'{written.before}{{"', TOOL_FORMATS[name].open]
        heads += [start + written.text[0].partition("{key}")[0]] if written.text else []
    for head in heads:
        for loop in LOOPS:
            text = head + loop * (3000 // len(loop))
            expected = read(form_of(name), [text])
            assert read(form_of(name), [text[at : at + 7] for at in range(0, len(text), 7)]) == expected, head + loop
