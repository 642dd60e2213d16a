"""Answers as the models' own documentation and users' reports show them, with what a client has to get."""

from __future__ import annotations

import json

import pytest

from flowinfer.message import ReplyFormat
from flowinfer.text.reply import open_parser

STRINGS = {"ls": ("path",), "write": ("text",)}
D = "｜DSML｜"
# format, answer, reasoning, text, calls
CASES: dict[str, tuple[str, str, str, str, list[tuple[str, object]]]] = {
    "hermes: newlines around the object": (
        "hermes", 'I look.\n<tool_call>\n{"name": "ls", "arguments": {"path": "a"}}\n</tool_call>', "", "I look.",
        [("ls", {"path": "a"})],
    ),
    "hermes: arguments first": (
        "hermes", '<tool_call>{"arguments": {"path": "a"}, "name": "ls"}</tool_call>', "", "", [("ls", {"path": "a"})],
    ),
    "hermes: arguments as a string of JSON": (
        "hermes", '<tool_call>{"name": "ls", "arguments": "{\\"path\\": \\"a\\"}"}</tool_call>', "", "",
        [("ls", {"path": "a"})],
    ),
    "hermes: the end is cut off": (
        "hermes", '<tool_call>\n{"name": "ls", "arguments": {"path": "a"}}', "", "", [("ls", {"path": "a"})],
    ),
    "qwen3: thinks first": (
        "hermes", '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>', "Hm.", "",
        [("ls", {})],
    ),
    "qwen3-coder: without the outer tag, several lines": (
        "qwen3-coder", "<function=write>\n<parameter=text>\na = 1\n\nif a < 2:\n    b\n</parameter>\n"
        "<parameter=mode>\n0o7\n</parameter>\n</function>\n</tool_call>", "", "",
        [("write", {"text": "a = 1\n\nif a < 2:\n    b", "mode": "0o7"})],
    ),
    "qwen3-coder: values of all types": (
        "qwen3-coder", "<tool_call>\n<function=ls>\n<parameter=path>\n12\n</parameter>\n"
        "<parameter=n>\n12\n</parameter>\n"
        '<parameter=o>\n{"a": [true]}\n</parameter>\n</function>\n</tool_call>', "", "",
        [("ls", {"path": "12", "n": 12, "o": {"a": [True]}})],
    ),
    "llama 3: type first": (
        "llama3-json", '{"type": "function", "name": "ls", "parameters": {"path": "a"}}', "", "",
        [("ls", {"path": "a"})],
    ),
    "llama 3: behind the python tag, two calls": (
        "llama3-json", '<|python_tag|>{"name": "ls", "parameters": {}}; {"name": "ls", "parameters": {"path": "b"}}',
        "", "", [("ls", {}), ("ls", {"path": "b"})],
    ),
    "mistral: a list of calls behind text": (
        "mistral", 'Sure. [TOOL_CALLS] [{"name": "ls", "arguments": {"path": "a"}}]', "", "Sure.",
        [("ls", {"path": "a"})],
    ),
    "mistral: a name, then the arguments": (
        "mistral-args", '[TOOL_CALLS]ls{"path": "a"}[TOOL_CALLS]ls{"path": "{"}', "", "",
        [("ls", {"path": "a"}), ("ls", {"path": "{"})],
    ),
    "mistral: a name, its own id, the arguments": (
        "mistral-args", '[TOOL_CALLS]ls[CALL_ID]abc123def[ARGS]{"path": "a"}', "", "", [("ls", {"path": "a"})],
    ),
    "glm 4.5: lines": (
        "glm", "I look.\n<tool_call>ls\n<arg_key>path</arg_key>\n<arg_value>7</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>7</arg_value>\n</tool_call>\nThe", "", "I look.", [("ls", {"path": "7", "n": 7})],
    ),
    "glm 4.5: blanks in place of lines": (
        "glm", "So: <tool_call>ls <arg_key>path</arg_key> <arg_value>back end</arg_value> </tool_call>", "", "So:",
        [("ls", {"path": "back end"})],
    ),
    "glm 4.7: nothing in between": (
        "glm", "<think>Hm.</think><tool_call>ls<arg_key>path</arg_key><arg_value>a</arg_value></tool_call>", "Hm.", "",
        [("ls", {"path": "a"})],
    ),
    "glm: no parameters": ("glm", "<tool_call>ls</tool_call>", "", "", [("ls", {})]),
    "deepseek v3.1": (
        "deepseek-v3.1", "<think>Hm.</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ls<｜tool▁sep｜>"
        '{"path": "a"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>ls<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>", "Hm.", "I look.", [("ls", {"path": "a"}), ("ls", {})],
    ),
    "deepseek v4: quotes and tags in a text": (
        "deepseek-v4", f'I look.\n\n<{D}tool_calls>\n<{D}invoke name="ls">\n'
        f'<{D}parameter name="path" string="true">va"l<b>\n</{D}parameter>\n'
        f'<{D}parameter name="n" string="false">[1]</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>', "", "I look.",
        [("ls", {"path": 'va"l<b>\n', "n": [1]})],
    ),
    "gpt-oss: analysis, then a call": (
        "harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.ls "
        '<|constrain|>json<|message|>{"path": "a"}<|call|>', "Hm.", "", [("ls", {"path": "a"})],
    ),
    "gpt-oss: the recipient before the channel": (
        "harmony", ' to=functions.ls<|channel|>commentary json<|message|>{"path": "a"}<|call|>', "", "",
        [("ls", {"path": "a"})],
    ),
    "gpt-oss: a preamble to the user": (
        "harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.ls<|constrain|>json<|message|>{}<|call|>", "", "I look.", [("ls", {})],
    ),
    "gpt-oss: analysis and an answer": (
        "harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Yes.<|return|>", "Hm.", "Yes.", [],
    ),
}  # fmt: skip


def form_of(name: str) -> ReplyFormat:
    return ReplyFormat(reasoning="harmony" if name == "harmony" else "think", tools=name, strings=STRINGS)


def read(name: str, pieces: list[str]) -> tuple[str, str, list[tuple[str, object]]]:
    parser = open_parser(form_of(name), call_prefix="x")
    for piece in pieces:
        parser.push(piece)
    parser.finish()
    delta, calls = parser.delta, dict[int, list[str]]()
    for part in delta.calls:
        calls.setdefault(part.index, [part.name, ""])[1] += part.arguments
    found = [(called, json.loads(arguments)) for called, arguments in calls.values()]
    return "".join(delta.reasoning), "".join(delta.text), found


@pytest.mark.parametrize("case", CASES)
def test_an_answer_is_taken_apart_whole_and_by_characters(case: str) -> None:
    name, answer, *expected = CASES[case]
    for pieces in ([answer], list(answer)):
        assert list(read(name, pieces)) == expected
