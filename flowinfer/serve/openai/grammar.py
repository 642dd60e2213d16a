"""What a request says about the form of its answer, as one grammar: response_format, guided_*, structured_outputs."""

from __future__ import annotations

from typing import Any

import msgspec

from flowinfer.errors import RequestError
from flowinfer.message import Grammar
from flowinfer.serve.openai.fields import Common, invalid
from flowinfer.serve.openai.formats import StructuredOutputs

MAX_GRAMMAR_CHARS = 256 * 1024  # it travels with the prompt
_ANY_OBJECT = '{"type": "object"}'
_GUIDED = {"json": "json", "regex": "regex", "choice": "choice", "grammar": "lark"}


def grammar_of(request: Common) -> Grammar | None:
    """The grammar that a request asks for, if any. Raises RequestError naming the field at fault."""
    found = [*_formats(request), *_guided(request), *_structured(request.structured_outputs)]
    if not found:
        return None
    if len(found) > 1:
        raise invalid(found[1].param, f"can't be combined with {found[0].param}; give one of them.")
    (grammar,) = found
    _check_size(grammar)
    if request.ignore_eos:
        raise invalid("ignore_eos", f"can't be combined with {grammar.param}: its text ends where the grammar does.")
    return grammar


def schema_grammar(schema: dict[str, Any], param: str) -> Grammar:
    """The grammar of a JSON Schema that came in this field. Raises RequestError naming it."""
    grammar = Grammar("json", _text(schema), param)
    _check_size(grammar)
    return grammar


def _check_size(grammar: Grammar) -> None:
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise invalid(grammar.param, f"takes up to {MAX_GRAMMAR_CHARS} characters.", "out_of_range")


def _formats(request: Common) -> list[Grammar]:
    given = request.response_format
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [Grammar("json", _ANY_OBJECT, "response_format")]
    if given.type != "json_schema":
        raise invalid("response_format.type", f"must be text, json_object or json_schema, not {given.type[:40]!r}.")
    param = "response_format.json_schema"
    if given.json_schema is None:
        raise invalid(param, "is required with type json_schema.", "missing_required_parameter")
    schema = given.json_schema.schema
    return [Grammar("json", _ANY_OBJECT if schema is None else _text(schema), f"{param}.schema")]


def _guided(request: Common) -> list[Grammar]:
    values = {name: getattr(request, f"guided_{name}") for name in _GUIDED}
    return [_grammar(name, value, f"guided_{name}") for name, value in values.items() if value is not None]


def _structured(given: StructuredOutputs | None) -> list[Grammar]:
    if given is None:
        return []
    values = {name: getattr(given, name) for name in _GUIDED}
    found = [_grammar(name, value, f"structured_outputs.{name}") for name, value in values.items() if value is not None]
    if given.json_object:
        found.append(Grammar("json", _ANY_OBJECT, "structured_outputs.json_object"))
    return found


def _grammar(name: str, value: Any, param: str) -> Grammar:
    if name == "json":
        return Grammar("json", value if isinstance(value, str) else _text(value), param)
    if name == "choice":
        if not value or "" in value:
            raise invalid(param, "must be a list of strings that aren't empty.")
        return Grammar("choice", _text(value), param)
    if not value:
        raise invalid(param, "must not be empty.")
    return Grammar("regex" if name == "regex" else "lark", value, param)


def _text(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (RecursionError, msgspec.MsgspecError) as error:
        raise RequestError(400, f"The grammar can't be read: {error}.", code="invalid_value") from None
