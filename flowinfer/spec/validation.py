"""Checks a tree against a pydantic model and says what is wrong at the value's own place in the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from flowinfer.errors import Problem
from flowinfer.spec.hints import did_you_mean
from flowinfer.spec.tree import Node, to_json

Model = TypeVar("Model", bound=BaseModel)

_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "dict": "a map",
    "model": "a map",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "none": "nothing",
}
_RANGE = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "too_short", "too_long", "multiple_of")


@dataclass(frozen=True)
class Codes:
    """The codes of one kind of place: sections of the file, or settings of a stage."""

    unknown: str
    missing: str
    type: str
    choice: str
    value: str


STRUCTURE = Codes(unknown="FI201", missing="FI202", type="FI203", choice="FI204", value="FI205")
SETTINGS = Codes(unknown="FI209", missing="FI211", type="FI210", choice="FI210", value="FI210")


def validate(model: type[Model], node: Node, what: str, codes: Codes) -> tuple[Model | None, list[Problem]]:
    """`node` as a `model`, read strictly (no text for numbers, no 1 for true), or what is wrong with it."""
    try:
        return model.model_validate_json(to_json(node), strict=True), []
    except ValidationError as error:
        return None, _explain(error, model, node, what, codes)


def _explain(error: ValidationError, model: type[BaseModel], node: Node, what: str, codes: Codes) -> list[Problem]:
    found: dict[tuple[str | int, ...], Problem] = {}
    for detail in error.errors(include_url=False):
        path = tuple(_real_path(node, detail["loc"], detail["type"] == "missing"))
        found.setdefault(path, _problem(detail, path, model, node, what, codes))
    deepest = [path for path in found if not any(len(p) > len(path) and p[: len(path)] == path for p in found)]
    # A union tries each member: the one that got furthest is the one that was meant.
    return [found[path] for path in deepest]


def _real_path(node: Node, loc: tuple[str | int, ...], is_missing: bool) -> Iterator[str | int]:
    """The steps of a pydantic location that are keys or indexes of the file; it has names of union members between."""
    at: Node | None = node
    for index, step in enumerate(loc):
        child = at.child(step) if at else None
        if child is not None:
            yield step
            at = child
        elif is_missing and index == len(loc) - 1:
            yield step


def _problem(
    detail: Any, path: tuple[str | int, ...], model: type[BaseModel], node: Node, what: str, codes: Codes
) -> Problem:
    kind, key = detail["type"], str(path[-1]) if path else ""
    parent = node.at(*path[:-1]) or node
    here = node.at(*path)
    if kind == "extra_forbidden" and here:
        known = _fields_at(model, path[:-1])
        shown = ".".join(map(str, path))
        return Problem(codes.unknown, f"{what} has no `{shown}`.", here.where, did_you_mean(key, known))
    if kind == "missing" or here is None:
        return Problem(codes.missing, f"{what} lacks `{'.'.join(map(str, path))}`.", parent.where)
    message, help = _message(detail)
    shown = f"`{'.'.join(map(str, path))}` of {what}" if path else what
    return Problem(_code(kind, codes), f"{shown}: {message}.", here.mark, help)


def _code(kind: str, codes: Codes) -> str:
    if kind in ("literal_error", "enum", "string_pattern_mismatch"):
        return codes.choice
    return codes.value if kind == "value_error" or kind in _RANGE else codes.type


def _message(detail: Any) -> tuple[str, str]:
    """What is wrong with the value, and the way out where we know it."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    got = _show(value)
    if kind in ("literal_error", "enum"):
        expected = str(context["expected"]).replace("'", "`")
        words = [word.strip("` ") for part in expected.split(" or ") for word in part.split(",")]
        return f"it must be {expected}, not {got}", did_you_mean(value, words) if isinstance(value, str) else ""
    if kind == "value_error":
        text = str(context["error"]).rstrip(".")
        return text, _unit_help(text, value)
    if kind == "string_pattern_mismatch" and "cuda" in context["pattern"]:
        return f"it must be auto, cpu or a device such as cuda:0, not {got}", ""
    wanted = _WANTED.get(kind.split("_")[0])
    if wanted and kind.endswith(("_type", "_parsing", "_from_float", "_attributes_type")):
        return f"it must be {wanted}, not {got}", _number_help(wanted, value)
    text = str(detail["msg"])
    return f"{text[:1].lower()}{text[1:].rstrip('.')}, not {got}", ""


def _number_help(wanted: str, value: object) -> str:
    if not isinstance(value, str) or "number" not in wanted:
        return ""
    try:
        float(value)
    except ValueError:
        return ""
    return f"Remove the quotes: {value}."


def _unit_help(text: str, value: object) -> str:
    """A number without a unit, with the units that it may have meant."""
    if isinstance(value, bool) or not isinstance(value, int) or "without a unit" not in text:
        return ""
    return f"Write {value}ms or {value}s." if "duration" in text else f"Write {value}MiB or {value}GiB."


def _show(value: object) -> str:
    if value is None:
        return "empty"
    if isinstance(value, (dict, list)):
        return "a map" if isinstance(value, dict) else "a list"
    text = repr(value) if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _fields_at(model: type[BaseModel], path: tuple[str | int, ...]) -> list[str]:
    """Keys that may stand at `path` below `model`."""
    models = [model]
    for step in path:
        models = [inner for m in models for inner in _models_in(_annotation(m, str(step)))] or models
    return sorted({field.alias or name for m in models for name, field in m.model_fields.items()})


def _annotation(model: type[BaseModel], key: str) -> Any:
    return next((f.annotation for name, f in model.model_fields.items() if key in (name, f.alias)), None)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
