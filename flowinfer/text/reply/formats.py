"""The formats in which models write tool calls and reasoning, as data, and how a chat template shows which it is.

Names of markers are facts of the formats, from the models' own chat templates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HARMONY = "harmony"  # gpt-oss: read by harmony.py, as it has channels instead of brackets
THINK = "think"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ToolParser = Literal[
    "auto", "none", "hermes", "qwen3-coder", "llama3-json", "mistral", "mistral-args",
    "deepseek-v3", "deepseek-v3.1", "deepseek-v3.2", "deepseek-v4", "deepseek-v4.1", "glm", "harmony",
]  # fmt: skip
ReasoningParser = Literal["auto", "none", "think", "harmony"]


@dataclass(frozen=True)
class JsonObjects:
    """Calls are JSON objects with name and arguments. again: what another call begins with, after the first."""

    again: str


@dataclass(frozen=True)
class NamedJson:
    """The name, `name_end`, and the arguments as a JSON object. bare: name_end may be missing before the object."""

    name_end: str
    bare: bool = False


@dataclass(frozen=True)
class Tagged:
    """The name, `name_end`, then parameters: key_open KEY key_end [attributes] value_open VALUE value_close, and close.

    attributes: between key_end and value_open stands whether the value is text (string="true") or JSON.
    Without them, a value is text if the tool's schema says so, else JSON where it is that, else text.
    """

    name_end: str
    key_open: str
    key_end: str
    value_open: str
    value_close: tuple[str, ...]
    close: str
    trim: str = ""  # one of these before a value doesn't belong to it
    attributes: bool = False


@dataclass(frozen=True)
class Written:
    """How a model writes its calls, for grammars: before, call, between, call, …, after.

    A call is head with {name}, its arguments as JSON, and tail. Where text and other: head, one of the two around each
    parameter (with {key}), and tail: text for a value that stands there as it is, other for one that is JSON.
    """

    head: str
    tail: str
    before: str = ""
    between: str = ""
    after: str = ""
    text: tuple[str, str] | None = None
    other: tuple[str, str] | None = None


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls. signs: a chat template that holds all of one group writes this format.

    wrappers: text behind which calls are looked for.  open: what a call begins with, with or without a wrapper.
    """

    signs: tuple[tuple[str, ...], ...]
    open: str
    syntax: JsonObjects | NamedJson | Tagged
    written: Written
    wrappers: tuple[str, ...] = ()
    at_start: bool = False  # `open` counts only where the answer begins, as it may occur in any text

    @property
    def starts(self) -> tuple[str, ...]:
        """What ends text and begins calls."""
        return self.wrappers if self.at_start else (*self.wrappers, self.open)

    @property
    def markers(self) -> tuple[str, ...]:
        """All text that a tokenizer may hold as one special token, which then has to be shown."""
        syntax = self.syntax
        parts: tuple[str, ...] = ()
        if isinstance(syntax, NamedJson):
            parts = (syntax.name_end,)
        elif isinstance(syntax, Tagged):
            parts = (syntax.name_end, syntax.key_open, syntax.key_end, syntax.value_open, syntax.close)
            parts += syntax.value_close
        return tuple(part for part in (self.open, *self.wrappers, *parts) if part)


_D = "｜DSML｜"
_OBJECT = '{"name": "{name}", "arguments": '


def _dsml(calls: str, tag: str) -> ToolFormat:
    return ToolFormat(
        signs=((f"{_D}{calls}",),),
        wrappers=(f"<{_D}{calls}>",),
        open=f'<{_D}{tag}invoke name="',
        syntax=Tagged(
            name_end='">',
            key_open=f'<{_D}{tag}parameter name="',
            key_end='"',
            value_open=">",
            value_close=(f"</{_D}{tag}parameter>",),
            close=f"</{_D}{tag}invoke>",
            attributes=True,
        ),
        written=Written(
            before=f"<{_D}{calls}>\n",
            head=f'<{_D}{tag}invoke name="{{name}}">\n',
            text=(f'<{_D}{tag}parameter name="{{key}}" string="true">', f"</{_D}{tag}parameter>\n"),
            other=(f'<{_D}{tag}parameter name="{{key}}" string="false">', f"</{_D}{tag}parameter>\n"),
            tail=f"</{_D}{tag}invoke>\n",
            after=f"</{_D}{calls}>",
        ),
    )


# In the order in which templates are asked for their signs: the more particular first.
TOOL_FORMATS: dict[str, ToolFormat] = {
    "deepseek-v3.2": _dsml("function_calls", ""),
    "deepseek-v4": _dsml("tool_calls", ""),
    "deepseek-v4.1": _dsml(" calls", " "),
    "deepseek-v3": ToolFormat(
        signs=(("<｜tool▁sep｜>", "```json"),),
        wrappers=("<｜tool▁calls▁begin｜>",),
        open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        syntax=NamedJson(name_end="\n```json\n"),
        written=Written(
            before="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            head="{name}\n```json\n",
            tail="\n```<｜tool▁call▁end｜>",
            between="\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            after="<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek-v3.1": ToolFormat(
        signs=(("<｜tool▁sep｜>",),),
        wrappers=("<｜tool▁calls▁begin｜>",),
        open="<｜tool▁call▁begin｜>",
        syntax=NamedJson(name_end="<｜tool▁sep｜>"),
        written=Written(
            before="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
            head="{name}<｜tool▁sep｜>",
            tail="<｜tool▁call▁end｜>",
            between="<｜tool▁call▁begin｜>",
            after="<｜tool▁calls▁end｜>",
        ),
    ),
    "glm": ToolFormat(
        signs=(("<arg_key>",),),
        open="<tool_call>",
        syntax=Tagged(
            name_end="\n",
            key_open="<arg_key>",
            key_end="</arg_key>",
            value_open="<arg_value>",
            value_close=("</arg_value>",),
            close="</tool_call>",
        ),
        written=Written(
            before="<tool_call>",
            head="{name}\n",
            text=("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
            other=("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
            tail="",
            between="</tool_call>\n<tool_call>",
            after="</tool_call>",
        ),
    ),
    "qwen3-coder": ToolFormat(
        signs=(("<function=", "<parameter="),),
        wrappers=("<tool_call>",),
        open="<function=",
        syntax=Tagged(
            name_end=">",
            key_open="<parameter=",
            key_end=">",
            value_open="",
            value_close=("\n</parameter>", "</parameter>"),
            close="</function>",
            trim="\n",
        ),
        written=Written(
            before="<tool_call>\n",
            head="<function={name}>\n",
            text=("<parameter={key}>\n", "\n</parameter>\n"),
            other=("<parameter={key}>\n", "\n</parameter>\n"),
            tail="</function>",
            between="\n</tool_call>\n<tool_call>\n",
            after="\n</tool_call>",
        ),
    ),
    "mistral-args": ToolFormat(
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
        open="[TOOL_CALLS]",
        syntax=NamedJson(name_end="[ARGS]", bare=True),
        written=Written(before="[TOOL_CALLS]", head="{name}[ARGS]", tail="", between="[TOOL_CALLS]"),
    ),
    "mistral": ToolFormat(
        signs=(("[TOOL_CALLS]",),),
        open="[TOOL_CALLS]",
        syntax=JsonObjects(again="{"),
        written=Written(before="[TOOL_CALLS] [", head=_OBJECT, tail="}", between=", ", after="]"),
    ),
    "hermes": ToolFormat(
        signs=(("<tool_call>",),),
        open="<tool_call>",
        syntax=JsonObjects(again="<tool_call>"),
        written=Written(
            before="<tool_call>\n",
            head=_OBJECT,
            tail="}",
            between="\n</tool_call>\n<tool_call>\n",
            after="\n</tool_call>",
        ),
    ),
    "llama3-json": ToolFormat(
        signs=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"'), ("<|start_header_id|>", "tool_calls")),
        wrappers=("<|python_tag|>",),
        open="{",
        syntax=JsonObjects(again="{"),
        written=Written(head='{"name": "{name}", "parameters": ', tail="}", between="; "),
        at_start=True,
    ),
}


def tool_format_of(template: str) -> str:
    """Name of the format that a chat template writes calls in, "" if it knows no tools."""
    if "tools" not in template:
        return ""
    if "<|channel|>" in template:
        return HARMONY
    found = (
        name for name, form in TOOL_FORMATS.items() if any(all(s in template for s in group) for group in form.signs)
    )
    return next(found, "")


def reasoning_format_of(template: str) -> str:
    """Name of the format that a chat template writes reasoning in, "" if none."""
    if "<|channel|>" in template:
        return HARMONY
    return THINK if THINK_CLOSE in template else ""
