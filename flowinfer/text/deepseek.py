"""DeepSeek V4's and V4.1's own encoding of chats, by DeepSeek's package `deepseek-recipe`, as segments.

The package tells which ranges of its prompt are special tokens; all between them is plain text, whatever it looks like.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from flowinfer.errors import ModelError, RequestError
from flowinfer.text.encoding import SURROGATES, Encoder
from flowinfer.text.jsonobject import JsonObject
from flowinfer.text.reply.formats import THINK
from flowinfer.text.template import Messages, Tools
from flowinfer.text.traced import Segment

RecipeName = Literal["deepseek-v4", "deepseek-v4.1"]
# model_type of a model's configuration -> its recipe, where the model brings no chat template.
RECIPE_OF: Mapping[str, RecipeName] = {
    "deepseek_v4": "deepseek-v4",
    "deepseek_v41": "deepseek-v4.1",
    "deepseek_v4_1": "deepseek-v4.1",
}
_EFFORTS = {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "xhigh", "max": "max"}
_ARGUMENTS = frozenset({"thinking", "enable_thinking", "reasoning_effort", "continue_final_message"})
_ANY_OBJECT = {"type": "object"}


class DeepSeekRecipe:
    """A chat format like ChatTemplate. It thinks unless told otherwise, as DeepSeek's own service does."""

    reasoning = THINK
    switches = frozenset({"reasoning_effort", "thinking"})

    def __init__(self, name: RecipeName) -> None:
        self.tools: str = name

    def render(
        self,
        messages: Messages,
        tools: Tools | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        form: tuple[str, str] | None = None,
        **arguments: Any,
    ) -> list[Segment]:
        """The conversation as segments. Raises RequestError (400) where it can't be told in this format.

        form: kind and text of the grammar that binds the answer; the model is told a JSON Schema or a pattern.
        """
        unknown = arguments.keys() - _ARGUMENTS
        if form is not None and not isinstance(form, tuple):  # from a client, whose JSON knows no tuples
            unknown.add("form")
        if unknown:
            message = f"{min(unknown)!r} is no argument of {self.tools}'s encoding."
            raise RequestError(400, message, code="invalid_value", param="chat_template_kwargs")
        continued = bool(arguments.get("continue_final_message"))
        arguments["form"] = _told(*form) if form else {}
        rendered = self._render(_clean(list(messages)), _clean(list(tools or ())), arguments, continued)
        segments = _segments(rendered.prompt, rendered.special_ranges)
        return segments if add_generation_prompt or continued else _without_prompt(segments)

    def check(self, encoder: Encoder) -> None:
        """Raises ModelError for a vocabulary that lacks one of the format's special tokens."""
        call = {"id": "a", "function": {"name": "clock", "arguments": "{}"}}
        tool = {"type": "function", "function": {"name": "clock", "parameters": {}}}
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What time is it?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "noon"},
        ]
        for segment in self.render(messages, [tool]):
            if segment.control and not all(isinstance(part, int) for part in encoder.markers(segment.text)):
                raise ModelError(
                    f"The tokenizer has no token {segment.text!r}, which {self.tools}'s encoding needs.",
                    help="Set `recipe: template` of recipe-tokenize, or another recipe.",
                )

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], arguments: Mapping[str, Any], continued: bool
    ) -> Any:
        package = load_package()
        effort = arguments.get("reasoning_effort")
        if effort is not None and effort != "none" and effort not in _EFFORTS:
            message = f"reasoning_effort must be none, {', '.join(_EFFORTS)}, not {str(effort)[:40]!r}."
            raise RequestError(400, message, code="invalid_value", param="reasoning_effort")
        asked = arguments.get("thinking", arguments.get("enable_thinking"))
        thinks = effort != "none" if asked is None else bool(asked)
        encoding = package.DeepseekV41Encoding() if self.tools == "deepseek-v4.1" else package.DeepseekV4Encoding()
        try:
            conversation = package.Conversation(
                [
                    _message(package, message, continued and place == len(messages) - 1)
                    for place, message in enumerate(messages)
                ],
                thinking_mode=thinks,
                tools=[_tool(package, tool) for tool in tools],
                reasoning_effort=_EFFORTS.get(effort) if effort else None,
                **arguments["form"],
            )
            return encoding.render_conversation(conversation)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            message = f"{self.tools}'s encoding can't tell this conversation: {error}"
            raise RequestError(400, message, code="chat_template", param="messages") from error


def load_package() -> Any:
    """The package, which is an extra as it brings OpenCV (13 MB). Raises ModelError where it isn't installed."""
    try:
        import deepseek_recipe
    except ImportError as error:
        raise ModelError(
            "This model's chats are encoded by the package deepseek-recipe, which isn't installed.",
            help="pip install 'flowinfer[deepseek]', or set `template` of recipe-tokenize to a chat template.",
        ) from error
    return deepseek_recipe


def _told(kind: str, text: str) -> dict[str, Any]:
    """What the package's conversation is told of an answer's form."""
    if kind == "regex":
        return {"response_regex": _clean(text)}
    if kind != "json":
        return {}
    try:
        schema = json.loads(text)
    except ValueError:
        return {}  # the grammar's own check tells
    return {"response_format": "json_object"} if schema == _ANY_OBJECT else {"response_schema": _clean(schema)}


def _message(package: Any, message: Mapping[str, Any], continued: bool) -> Any:
    role, content = message.get("role"), message.get("content") or ""
    if role == "assistant":
        calls = [_call(package, call) for call in message.get("tool_calls") or ()]
        return package.AssistantMessage(content, message.get("reasoning_content"), calls or None, continued)
    if role == "tool":
        return package.ToolMessage(content, message.get("tool_call_id"))
    kinds = {
        "system": package.SystemMessage,
        "developer": package.SystemMessage,
        "user": package.UserMessage,
        "latest_reminder": package.LatestReminderMessage,
    }
    if role not in kinds:
        raise ValueError(f"it knows no role {str(role)[:40]!r}")
    return kinds[role](content)


def _call(package: Any, call: Mapping[str, Any]) -> Any:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    text = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, (dict, list)) else str(arguments or "{}")
    return package.ToolCall(str(call.get("id") or ""), str(function.get("name") or ""), text)


def _tool(package: Any, tool: Mapping[str, Any]) -> Any:
    function = tool.get("function") or {}
    parameters = function.get("parameters")
    return package.ToolDefinition(
        str(function.get("name") or ""), function.get("description"), parameters, function.get("strict")
    )


def _segments(prompt: str, special: Sequence[tuple[int, int]]) -> list[Segment]:
    found: list[Segment] = []
    at = 0
    for start, end in special:
        found += [Segment(False, prompt[at:start]), Segment(True, prompt[start:end])]
        at = end
    return [segment for segment in [*found, Segment(False, prompt[at:])] if segment.text]


def _without_prompt(segments: list[Segment]) -> list[Segment]:
    """Without the two markers that open the assistant's turn."""
    return segments[:-2] if all(segment.control for segment in segments[-2:]) else segments


def _clean(value: Any) -> Any:
    """Strings without halves of surrogate pairs, which JSON can spell and UTF-8 can't."""
    if isinstance(value, str):
        return str(value).translate(SURROGATES) if not value.isascii() else str(value)
    if isinstance(value, JsonObject):
        return _clean(str(value))
    if isinstance(value, Mapping):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value
