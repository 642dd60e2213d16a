"""The tools that a request offers, checked; what can't be honoured is refused by its name."""

from __future__ import annotations

from typing import Any

from flowinfer.message import ToolChoice
from flowinfer.serve.openai.fields import invalid, only, unsupported
from flowinfer.serve.openai.job import Limits

MAX_TOOLS = 1024
_FIELDS = {"name", "description", "parameters", "strict"}


def offered(tools: list[dict[str, Any]] | None, choice: Any, limits: Limits) -> list[dict[str, Any]] | None:
    """The tools that the model is shown. Raises RequestError naming the field at fault."""
    if tools and not limits.tools:
        raise unsupported("tools")
    if choice not in (None, "none") and not tools:
        raise invalid("tool_choice", "is only allowed with tools.")
    if tools and len(tools) > MAX_TOOLS:
        raise invalid("tools", f"takes up to {MAX_TOOLS} tools, not {len(tools)}.", "out_of_range")
    for place, tool in enumerate(tools or ()):
        _check(tool, f"tools[{place}]")
    return tools or None if choice != "none" else None


def choice_of(tools: list[dict[str, Any]] | None, choice: Any, parallel: bool | None) -> ToolChoice:
    """What tool_choice and parallel_tool_calls say of tools that are offered. Raises RequestError naming the field."""
    known = [tool["function"]["name"] for tool in tools or ()]
    required, names = _said(choice)
    for name in names:
        if name not in known:
            raise invalid("tool_choice", f"names {name[:64]!r}, which is none of the tools.")
    return ToolChoice(required=required, names=names, parallel=parallel is not False)


def _said(choice: Any) -> tuple[bool, tuple[str, ...]]:
    """Whether a call is required, and the names that it's bound to."""
    if choice in (None, "none", "auto", "required"):
        return choice == "required", ()
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return True, (_named(choice, "tool_choice"),)
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools")
        given = allowed.get("tools") if isinstance(allowed, dict) else None
        if not isinstance(given, list) or not given or allowed.get("mode") not in ("auto", "required"):
            raise invalid("tool_choice.allowed_tools", "needs a mode, auto or required, and a list of tools.")
        only(choice, "tool_choice", ("type", "allowed_tools"))
        only(allowed, "tool_choice.allowed_tools", ("mode", "tools"))
        names = tuple(_named(tool, f"tool_choice.allowed_tools.tools[{i}]") for i, tool in enumerate(given))
        return allowed["mode"] == "required", names
    raise invalid("tool_choice", "must be none, auto, required, or an object of type function or allowed_tools.")


def _named(given: Any, where: str) -> str:
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid(where, "must be {type: function, function: {name}}.")
    only(given, where, ("type", "function"))
    only(given["function"], f"{where}.function", ("name",))
    return name


def _check(tool: dict[str, Any], where: str) -> None:
    if tool.get("type") != "function":
        raise unsupported(f"{where}.type", f"{str(tool.get('type'))[:40]!r} is not supported by this pipeline")
    only(tool, where, ("type", "function"))
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise invalid(f"{where}.function", "must be an object with a name.")
    only(function, f"{where}.function", _FIELDS)
    if not isinstance(function.get("parameters") or {}, dict):
        raise invalid(f"{where}.function.parameters", "must be a JSON Schema, which is an object.")
    if not isinstance(function.get("strict"), bool | None):
        raise invalid(f"{where}.function.strict", "must be true or false.")
