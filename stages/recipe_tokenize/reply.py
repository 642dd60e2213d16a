"""Decides how a model's answers are to be taken apart, and how it is told to think: from its chat template. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowinfer.errors import RequestError
from flowinfer.message import ReplyFormat
from flowinfer.text.reply.formats import THINK_CLOSE, THINK_OPEN
from flowinfer.text.template import EFFORT, FLAGS

if TYPE_CHECKING:
    from flowinfer.text.tokenizer import TextTokenizer
    from flowinfer.text.traced import Segment

_OFF = "none"


@dataclass(frozen=True)
class Habits:
    """How a model writes. tools, reasoning: names of formats, "" for none. switches: the template's, for thinking.

    defaults: arguments of the template where a request doesn't say.
    """

    tools: str
    reasoning: str
    switches: frozenset[str]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def check_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Raises RequestError (400) for tools that the model knows no format for."""
        if tools and not self.tools:
            message = "'tools' is not supported: this model's chat template takes none that tool_parser can read."
            raise RequestError(400, message, code="unsupported_parameter", param="tools")

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Template arguments, with a reasoning_effort told in the template's own way. Raises RequestError (400)."""
        effort = given.get(EFFORT)
        if effort is None:
            return {**self.defaults, **given}
        if not self.switches and effort != _OFF:
            message = f"{EFFORT!r} is not supported: this model's chat template has no switch for reasoning."
            raise RequestError(400, message, code="unsupported_parameter", param=EFFORT)
        told = {name: effort != _OFF for name in FLAGS if name in self.switches}
        told |= {EFFORT: effort} if EFFORT in self.switches else {}
        told = {**self.defaults, **told}
        return told | {name: value for name, value in given.items() if name != EFFORT}

    def format_of(self, tools: Sequence[Mapping[str, Any]] | None, prompt: Sequence[Segment]) -> ReplyFormat | None:
        """How to take the answer to this prompt apart; None if all of it is text."""
        called = self.tools if tools else ""
        if not called and not self.reasoning:
            return None
        end = _end_of(prompt) if self.reasoning else ""
        return ReplyFormat(
            reasoning=self.reasoning,
            tools=called,
            thinking=end.endswith(THINK_OPEN),
            thought=end.endswith(THINK_CLOSE),
            strings={} if called not in ("glm", "qwen3-coder") else dict(map(_strings, tools or ())),
        )


def habits_of(
    tokenizer: TextTokenizer, tool_parser: str, reasoning_parser: str, defaults: Mapping[str, Any] | None = None
) -> Habits:
    """What a model's templates tell, where the settings say `auto`."""
    formats = tokenizer.templates.values()
    return Habits(
        tools=_chosen(tool_parser, next((form.tools for form in formats if form.tools), "")),
        reasoning=_chosen(reasoning_parser, next((form.reasoning for form in formats if form.reasoning), "")),
        switches=frozenset().union(*(form.switches for form in formats)),
        defaults=defaults or {},
    )


def _chosen(setting: str, found: str) -> str:
    return found if setting == "auto" else "" if setting == _OFF else setting


def _end_of(prompt: Sequence[Segment]) -> str:
    """The last characters of a prompt that the template's author wrote: a user's `<think>` opens nothing."""
    end = ""
    for segment in reversed(prompt):
        if not segment.control or len(end) > 2 * len(THINK_OPEN):
            break
        end = segment.text + end
    return end.rstrip()


def _strings(tool: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Name of a tool, and its parameters that are text."""
    function = tool.get("function")
    function = function if isinstance(function, Mapping) else {}
    schema = function.get("parameters")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    found = properties.items() if isinstance(properties, Mapping) else ()
    texts = tuple(str(name) for name, kind in found if isinstance(kind, Mapping) and kind.get("type") == "string")
    return str(function.get("name", "")), texts
