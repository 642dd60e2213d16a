"""What a chat template tells about answers: formats of tools and reasoning, the switch for thinking."""

from __future__ import annotations

from typing import Any

import pytest

from flowinfer.errors import RequestError
from flowinfer.message import ReplyFormat
from flowinfer.stages.recipe_tokenize.reply import Habits, habits_of
from flowinfer.text.reply.formats import reasoning_format_of, tool_format_of
from flowinfer.text.template import switches_of
from flowinfer.text.traced import Segment

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"properties": {"city": {"type": "string"}, "n": {"type": "integer"}, "odd": True}},
    },
}
SIGNS = {
    "hermes": "tools <tool_call>",
    "qwen3-coder": "tools <tool_call> <function= <parameter=",
    "glm": "tools <tool_call> <arg_key>",
    "llama3-json": 'tools <|start_header_id|> {"name": .., "parameters": ..} tool_calls',
    "mistral": "tools [TOOL_CALLS]",
    "mistral-args": "tools [TOOL_CALLS] [ARGS]",
    "deepseek-v3": "tools <｜tool▁sep｜> ```json",
    "deepseek-v3.1": "tools <｜tool▁sep｜>",
    "deepseek-v4": "tools <｜DSML｜tool_calls>",
    "deepseek-v4.1": "tools <｜DSML｜ calls>",
    "harmony": "tools <|channel|>",
    "": "{{ messages }} <tool_call>",
}


class Template:
    def __init__(self, source: str) -> None:
        self.tools, self.reasoning = tool_format_of(source), reasoning_format_of(source)
        self.switches = switches_of(source)


class Tokenizer:
    def __init__(self, source: str) -> None:
        self.templates = {"default": Template(source)}


def habits(source: str, tools: str = "auto", reasoning: str = "auto") -> Habits:
    tokenizer: Any = Tokenizer(source)
    return habits_of(tokenizer, tools, reasoning)


@pytest.mark.parametrize("name", SIGNS)
def test_a_template_shows_the_format_of_its_calls(name: str) -> None:
    assert tool_format_of(SIGNS[name]) == name


def test_a_template_shows_the_format_of_reasoning() -> None:
    assert [reasoning_format_of(text) for text in ("a </think>", "<|channel|>", "a")] == ["think", "harmony", ""]


def test_settings_win_over_the_template() -> None:
    assert habits("tools <tool_call> </think>", "glm", "none") == Habits("glm", "", frozenset())


def test_tools_that_no_parser_reads_are_refused_by_name() -> None:
    with pytest.raises(RequestError) as caught:
        habits("{{ messages }}").check_tools([TOOL])
    assert (caught.value.status, caught.value.param) == (400, "tools")
    habits("{{ messages }}").check_tools(None)


@pytest.mark.parametrize(
    ("source", "effort", "told"),
    [
        ("{% if enable_thinking %}", "high", {"enable_thinking": True}),
        ("{% if enable_thinking %}", "none", {"enable_thinking": False}),
        ("{{ reasoning_effort }}", "low", {"reasoning_effort": "low"}),
        ("{% if thinking %}", "low", {"thinking": True}),
        ("", "none", {}),
    ],
)
def test_effort_becomes_the_templates_own_switch(source: str, effort: str, told: dict[str, Any]) -> None:
    assert habits(source).arguments({"reasoning_effort": effort, "x": 1}) == told | {"x": 1}


def test_what_is_asked_for_by_the_templates_name_wins() -> None:
    given = {"reasoning_effort": "high", "enable_thinking": False}
    assert habits("{% if enable_thinking %}").arguments(given) == {"enable_thinking": False}


def test_effort_that_nothing_can_follow_is_refused() -> None:
    with pytest.raises(RequestError, match="reasoning_effort"):
        habits("").arguments({"reasoning_effort": "high"})


@pytest.mark.parametrize(
    ("end", "thinking", "thought"),
    [
        ([Segment(True, "assistant\n<think>\n")], True, False),
        ([Segment(True, "assistant\n"), Segment(True, "<think>"), Segment(True, "\n")], True, False),
        ([Segment(True, "assistant\n<think>\n\n</think>\n\n")], False, True),
        ([Segment(True, "assistant\n")], False, False),
        ([Segment(False, "<think>")], False, False),  # a user wrote it
        ([Segment(False, "</think>")], False, False),
        ([Segment(False, "<th"), Segment(True, "ink>")], False, False),
    ],
)
def test_only_the_template_opens_and_closes_reasoning(end: list[Segment], thinking: bool, thought: bool) -> None:
    form = habits("</think>").format_of(None, [Segment(False, "Hello"), *end])
    assert form == ReplyFormat(reasoning="think", thinking=thinking, thought=thought)


def test_untyped_formats_are_told_which_parameters_are_text() -> None:
    assert habits("", "glm", "none").format_of([TOOL], []) == ReplyFormat(tools="glm", strings={"f": ("city",)})
    assert habits("", "hermes", "none").format_of([TOOL], []) == ReplyFormat(tools="hermes")
    assert habits("", "hermes", "none").format_of(None, []) is None
