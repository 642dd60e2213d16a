"""Grammars of answers that may, or must, call tools: in the model's own format, each tool by its own schema.

Of a strict tool the schema holds wherever it's called, and what can't be bound is refused. Where a call is required the
schemas of other tools hold as far as they can be followed. Formats are data (flowinfer.text.reply.formats).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowinfer.engine.grammar.lark import ANY, Lark, any_of, escaped
from flowinfer.errors import RequestError
from flowinfer.message import ToolChoice
from flowinfer.text.reply.formats import ToolFormat, Written

Tool = Mapping[str, Any]
_SPACE = r"[ \n]{1,4}"
_NO_CALL = r"[^{\s]" + ANY  # where calls are bare JSON
_OPEN_SCHEMA = {"type": "object"}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_AT_TOP = {"anyOf", "oneOf", "allOf", "not", "if", "$ref", "minProperties", "dependentRequired", "dependentSchemas"}
_OF_TEXT = {"type", "title", "description", "default", "examples", "enum", "const", "pattern", "minLength", "maxLength"}
_BAD_NAME = re.compile(r'[\s"<>{}\[\]=\\]|^$')  # could end the name, or be no name to the model's own parser


class Unbound(Exception):
    """A schema that the model's format can't be bound to; the text is the reason."""


def is_bound(tools: Sequence[Tool], choice: ToolChoice) -> bool:
    """Whether answers need a grammar for their calls' sake."""
    return choice != ToolChoice() or any(_is_strict(tool) for tool in tools)


def answer(
    lark: Lark,
    form: ToolFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    accepts: Callable[[Any], bool],
    body: str | None = None,
) -> str:
    """What an answer with calls matches, reasoning left out. Raises RequestError (400) naming the field at fault.

    accepts: whether a JSON Schema can be followed.  body: what an answer without calls matches; None: any text.
    """
    written, space = form.written, f"{lark.free(_SPACE)}?"
    calls = [_call(lark, written, place, tool, choice, accepts) for place, tool in chosen(tools, choice)]
    call = lark.rule(any_of(calls))
    more = f" ({lark.literal(written.between)} {call})*" if written.between else f" {call}*"
    rest = f"{call}{more if choice.parallel else ''} {lark.literal(written.after)} {space}"
    if choice.required:
        return f"{space} {lark.literal(written.before)} {rest}"
    if body is not None:
        return f"({body} | {space} {_opening_beside(lark, form)} {rest})"
    if form.at_start:
        return f"{space} ({lark.free(_NO_CALL)} | {rest})?"
    return f"({lark.free(without=form.starts)} | {_behind_text(lark, form)} {rest})"


def call_of(lark: Lark, head: str, tool: Tool, place: int, choice: ToolChoice, accepts: Callable[[Any], bool]) -> str:
    """`head`, with {name}, and the arguments as JSON. Raises RequestError (400)."""
    name = _name(tool, place)
    schema = _schema(tool, choice)
    if not accepts(schema):
        if _is_strict(tool):
            raise _refused(place, "the schema can't be followed")
        schema = _OPEN_SCHEMA
    return f"{lark.literal(head.replace('{name}', name))} {lark.json(schema)}"


def chosen(tools: Sequence[Tool], choice: ToolChoice) -> list[tuple[int, Tool]]:
    """The tools that may be called, with their places."""
    return [(n, tool) for n, tool in enumerate(tools) if not choice.names or tool["function"]["name"] in choice.names]


def _behind_text(lark: Lark, form: ToolFormat) -> str:
    """Any text, then what opens calls."""
    before, trigger = form.written.before, form.starts[0]
    if before.startswith(trigger) and lark.is_text(before):
        return f"{lark.until(ANY, trigger)} {lark.literal(before[len(trigger) :])}"
    return lark.until(ANY, before, without=form.starts)


def _opening_beside(lark: Lark, form: ToolFormat) -> str:
    """What opens calls where an answer of another form may stand instead: it has to be told apart at once."""
    if not form.at_start:
        return lark.literal(form.written.before)
    wrapper = next((wrapper for wrapper in form.wrappers if not lark.is_text(wrapper)), None)
    if wrapper is None:
        message = "'tools' can't be combined with a given form of the answer: this model writes calls as bare JSON."
        raise RequestError(400, message, code="unsupported_parameter", param="tools")
    return lark.literal(wrapper)


def _call(
    lark: Lark, written: Written, place: int, tool: Tool, choice: ToolChoice, accepts: Callable[[Any], bool]
) -> str:
    if written.text is None or written.other is None:
        return f"{call_of(lark, written.head, tool, place, choice, accepts)} {lark.literal(written.tail)}"
    head = lark.literal(written.head.replace("{name}", _name(tool, place)))
    schema = _schema(tool, choice)
    try:
        parameters = _parameters(lark, written.text, written.other, schema, accepts)
    except Unbound as error:
        if _is_strict(tool):
            raise _refused(place, str(error)) from None
        parameters = _any_parameters(lark, written.text)
    return f"{head} {parameters} {lark.literal(written.tail)}"


def _parameters(
    lark: Lark,
    text: tuple[str, str],
    other: tuple[str, str],
    schema: Mapping[str, Any],
    accepts: Callable[[Any], bool],
) -> str:
    """One parameter after the other, in the schema's order. Raises Unbound."""
    if missing := _AT_TOP & schema.keys():
        raise Unbound(f"{min(missing)!r} at the top of a schema can't be followed in this model's format")
    properties, required = schema.get("properties"), schema.get("required") or ()
    if not isinstance(properties, Mapping | None) or not isinstance(required, Sequence) or isinstance(required, str):
        raise Unbound("properties must be an object, and required a list")
    if properties is None and schema.get("additionalProperties") is not False:
        return _any_parameters(lark, text)
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    if unknown := [key for key in required if not isinstance(key, str) or key not in (properties or {})]:
        raise Unbound(f"{unknown[0]!r} is required, but isn't among the properties")
    parts = []
    for key, kind in (properties or {}).items():
        if _BAD_NAME.search(key):
            raise Unbound(f"a parameter of the name {key[:40]!r} can't be written in this model's format")
        parameter = lark.rule(_parameter(lark, text, other, key, kind, shared, accepts))
        parts.append(parameter if key in required else f"{parameter}?")
    return " ".join(parts)


def _parameter(
    lark: Lark,
    text: tuple[str, str],
    other: tuple[str, str],
    key: str,
    kind: Any,
    shared: dict[str, Any],
    accepts: Callable[[Any], bool],
) -> str:
    if isinstance(kind, Mapping) and kind.get("type") == "string":
        open, close = text
        value = lark.until(_regex(key, kind), close, without=_spelled(close))
        return f"{lark.literal(open.replace('{key}', key))} {value}"
    open, close = other
    schema = {**kind, **shared} if isinstance(kind, Mapping) else kind
    if not accepts(schema):
        raise Unbound(f"the schema of {key!r} can't be followed")
    return f"{lark.literal(open.replace('{key}', key))} {lark.json(schema)} {lark.literal(close)}"


def _any_parameters(lark: Lark, text: tuple[str, str]) -> str:
    """Any names, with any text."""
    before, after = text[0].split("{key}")
    ends = sorted({after[0], "<", "\n", '"'})
    key = lark.free(f"[^{''.join(map(escaped, ends))}]+")
    return (
        lark.rule(
            f"{lark.literal(before)} {key} {lark.literal(after)} {lark.until(ANY, text[1], without=_spelled(text[1]))}"
        )
        + "*"
    )


def _spelled(close: str) -> tuple[str, ...]:
    """The marker that ends a value, which no value may spell either: parsers read text, not tokens."""
    return (close.strip("\n"),)


def _regex(key: str, kind: Mapping[str, Any]) -> str:
    """A text's values as a regular expression. Raises Unbound."""
    if unknown := kind.keys() - _OF_TEXT:
        raise Unbound(f"{min(unknown)!r} of {key!r} can't be followed in this model's format")
    if "const" in kind or "enum" in kind:
        values = [kind["const"]] if "const" in kind else kind["enum"]
        if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
            raise Unbound(f"the values of {key!r} must be strings, as its type says")
        return "(" + "|".join(map(escaped, values)) + ")"
    if "pattern" in kind:
        if "minLength" in kind or "maxLength" in kind:
            raise Unbound(f"{key!r} has both a pattern and a length")
        if not isinstance(kind["pattern"], str):
            raise Unbound(f"the pattern of {key!r} must be a string")
        return _searched(kind["pattern"])
    if "minLength" in kind or "maxLength" in kind:
        least, most = kind.get("minLength", 0), kind.get("maxLength", "")
        if not all(isinstance(size, int) and size >= 0 for size in (least, most or 0)):
            raise Unbound(f"the lengths of {key!r} must be numbers")
        return f"(?s:.){{{int(least)},{most}}}"
    return ANY


def _searched(pattern: str) -> str:
    """JSON Schema's patterns match anywhere in a text."""
    front = "" if pattern.startswith("^") else ANY
    back = "" if pattern.endswith("$") and not pattern.endswith(r"\$") else ANY
    inner = pattern.removeprefix("^")
    inner = inner.removesuffix("$") if not back else inner
    return front + "(" + re.sub(r"(?<!\\)/", r"\/", inner) + ")" + back


def _schema(tool: Tool, choice: ToolChoice) -> dict[str, Any]:
    """What the arguments must be: the tool's schema where that is promised, or where a call is wanted anyway."""
    given = tool["function"].get("parameters")
    if not given:
        return _NO_PARAMETERS
    if not _is_strict(tool) and not choice.required:
        return _OPEN_SCHEMA
    return {"type": "object", **given}


def _name(tool: Tool, place: int) -> str:
    name = str(tool["function"]["name"])
    if _BAD_NAME.search(name):
        message = f"tools[{place}].function.name: {name[:40]!r} can't be called by a grammar; use letters, digits, _ -."
        raise RequestError(400, message, code="invalid_value", param=f"tools[{place}].function.name")
    return name


def _is_strict(tool: Tool) -> bool:
    return bool((tool.get("function") or {}).get("strict"))


def _refused(place: int, reason: str) -> RequestError:
    param = f"tools[{place}].function.parameters"
    return RequestError(400, f"{param}: {reason}, and `strict` is set.", code="invalid_grammar", param=param)
