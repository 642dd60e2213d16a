"""The tools that a request offers, checked; what can't be honoured is refused by its name."""

from __future__ import annotations

from typing import Any

from flowinfer.serve.openai.fields import invalid, unsupported
from flowinfer.serve.openai.job import Limits

MAX_TOOLS = 1024
_FIELDS = {"name", "description", "parameters", "strict"}


def offered(tools: list[dict[str, Any]] | None, choice: Any, limits: Limits) -> list[dict[str, Any]] | None:
    """The tools that the model is shown. Raises RequestError naming the field at fault."""
    if tools and not limits.tools:
        raise unsupported("tools")
    if choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "other than 'auto' and 'none' is not supported by this pipeline")
    if choice == "auto" and not tools:
        raise invalid("tool_choice", "is only allowed with tools.")
    if tools and len(tools) > MAX_TOOLS:
        raise invalid("tools", f"takes up to {MAX_TOOLS} tools, not {len(tools)}.", "out_of_range")
    for place, tool in enumerate(tools or ()):
        _check(tool, f"tools[{place}]")
    return tools or None if choice != "none" else None


def _check(tool: dict[str, Any], where: str) -> None:
    if tool.get("type") != "function":
        raise unsupported(f"{where}.type", f"{str(tool.get('type'))[:40]!r} is not supported by this pipeline")
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise invalid(f"{where}.function", "must be an object with a name.")
    if unknown := function.keys() - _FIELDS:
        raise invalid(f"{where}.function.{min(unknown)}", "is not a field of a function.", "unknown_parameter")
    if not isinstance(function.get("parameters") or {}, dict):
        raise invalid(f"{where}.function.parameters", "must be a JSON Schema, which is an object.")
    if function.get("strict"):
        raise unsupported(f"{where}.function.strict", "is not supported: arguments aren't bound to the schema")
