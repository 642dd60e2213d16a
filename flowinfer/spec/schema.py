"""The JSON Schema of pipeline files, from which editors complete and check: settings of every kind, keys of edges."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from flowinfer.errors import FlowInferError
from flowinfer.spec.docs import attribute_docs
from flowinfer.spec.models import EDGE_PATTERN, NAME_PATTERN, Spec
from flowinfer.spec.registry import builtin_kinds, installed_kinds, load_stage
from flowinfer.stage import Stage

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_VARIABLE = {"type": "string", "pattern": r"\$\{[^{}]+\}"}
UNITS = {
    "duration": {
        "type": "string",
        "pattern": r"^[0-9]+(\.[0-9]+)? ?(us|µs|ms|s|min|m|h|d)$",
        "examples": ["50ms", "3d"],
    },
    "bytes": {
        "type": "string",
        "pattern": r"^[0-9]+(\.[0-9]+)? ?(B|[KMGT]iB|[kKMGT]B)$",
        "examples": ["1GiB", "512MiB"],
    },
    "share": {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?%$", "examples": ["10%"]},
    "tokens": {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?[km]?$", "examples": ["2k", "4096"]},
}

_PLAIN_NUMBERS: dict[str, dict[str, Any]] = {  # what may be written without a unit
    "tokens": {"type": "integer", "minimum": 0},
    "share": {"type": "number", "minimum": 0, "maximum": 1},
}


def json_schema() -> dict[str, Any]:
    """A schema of draft 2020-12 that accepts overlays too: an overlay may leave out what its base gives."""
    schema = TypeAdapter(Spec).json_schema(by_alias=True, mode="validation")
    definitions = {name: _with_variables(definition) for name, definition in schema["$defs"].items()}
    stages = {kind: stage for kind in [*builtin_kinds(), *installed_kinds()] if (stage := _load(kind))}
    for kind, stage in stages.items():
        definitions |= _settings(kind, stage)
    _describe(schema, definitions)
    definitions["StageEntry"] = _stage_entry(definitions["StageEntry"], stages)
    properties = {key: _with_drop(value) for key, value in schema["properties"].items()}
    properties["stages"] = _named("StageEntry", NAME_PATTERN, "Stages by name.")
    properties["workers"] = _named("Worker", NAME_PATTERN, "Workers by name.")
    properties["edges"] = _named("Edge", EDGE_PATTERN, "Edges: `a -> b`, or `a.output -> b.input`.")
    arm = definitions["ArmOverlay"]["properties"]
    arm |= {key: {**properties[key], "description": arm[key]["description"]} for key in ("stages", "workers", "edges")}
    return {
        "$schema": DRAFT,
        "$id": "https://flowinfer.dev/schema/1",
        "title": "FlowInfer pipeline",
        "description": (Spec.__doc__ or "").strip(),
        "type": "object",
        "properties": properties,
        "anyOf": [{"required": ["flowinfer", "stages", "edges"]}, {"required": ["extends"]}],
        "additionalProperties": False,
        "$defs": definitions,
    }


def _load(kind: str) -> type[Stage] | None:
    try:
        return load_stage(kind)
    except FlowInferError:  # a broken plug-in must not take completion from the others
        return None


def _settings(kind: str, stage: type[Stage]) -> dict[str, Any]:
    prefix = f"{kind}."
    schema = stage.Config.model_json_schema(by_alias=True, ref_template=f"#/$defs/{prefix}{{model}}", mode="validation")
    inner = {f"{prefix}{name}": _with_variables(value) for name, value in schema.pop("$defs", {}).items()}
    docs = attribute_docs(stage.Config)
    for key, value in schema.get("properties", {}).items():
        if docs.get(key):
            value["description"] = docs[key]
    schema.pop("required", None)  # an overlay names only what it changes
    schema["title"] = f"Settings of {kind}"
    return {**inner, f"{prefix}settings": _with_variables(schema)}


def _describe(schema: dict[str, Any], definitions: dict[str, Any]) -> None:
    from flowinfer.spec import models

    for name, definition in definitions.items():
        model = getattr(models, name, None)
        docs = attribute_docs(model) if model else {}
        for key, value in definition.get("properties", {}).items():
            field = "with_" if key == "with" else key
            if field in docs:
                value["description"] = docs[field]
    for key, text in attribute_docs(Spec).items():
        schema["properties"][key]["description"] = text


def _stage_entry(entry: dict[str, Any], stages: dict[str, type[Stage]]) -> dict[str, Any]:
    """`with` by kind, through if/then: editors then complete the settings of the kind that is named."""
    entry.pop("required", None)
    kinds = [{"const": kind, "description": _first_line(stage)} for kind, stage in stages.items()]
    local = {"type": "string", "pattern": r"\.py:[A-Za-z_]\w*$|\$\{"}
    entry["properties"]["use"] = {"description": "The kind of stage, or ./file.py:Class.", "anyOf": [*kinds, local]}
    entry["allOf"] = [
        {
            "if": {"properties": {"use": {"const": kind}}, "required": ["use"]},
            "then": {"properties": {"with": {"anyOf": [{"$ref": f"#/$defs/{kind}.settings"}, {"type": "null"}]}}},
        }
        for kind in stages
    ]
    return entry


def _first_line(stage: type[Stage]) -> str:
    return (stage.__doc__ or "").strip().split("\n")[0]


def _named(definition: str, pattern: str, description: str) -> dict[str, Any]:
    value = {"anyOf": [{"$ref": f"#/$defs/{definition}"}, {"type": "null"}]}
    names = {pattern: value}
    return {
        "description": description,
        "type": ["object", "null"],
        "patternProperties": names,
        "additionalProperties": False,
    }


def _with_drop(value: dict[str, Any]) -> dict[str, Any]:
    """`!drop` is an empty value to an editor that doesn't know the tag."""
    kept: dict[str, Any] = {key: value[key] for key in ("description", "default") if key in value}
    return {**kept, "anyOf": [_with_variables(value), {"type": "null"}]}


def _with_variables(value: dict[str, Any]) -> dict[str, Any]:
    """Every single value may be a variable; every quantity may carry its unit; an overlay may leave out anything."""
    inner = {key: _deeper(key, item) for key, item in value.items() if key not in ("title", "required")}
    unit = inner.pop("unit", None)
    if unit in UNITS:
        return _choice(inner, [UNITS[unit], _PLAIN_NUMBERS.get(unit, {"const": 0})])
    if inner.get("type") in ("integer", "number", "boolean") or {"enum", "const", "pattern"} & inner.keys():
        return _choice(inner, [{key: item for key, item in inner.items() if key not in ("default", "description")}])
    return inner


def _deeper(key: str, item: Any) -> Any:
    if key in ("properties", "patternProperties"):
        return {name: _with_variables(member) for name, member in item.items()}
    if key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        return [_with_variables(member) for member in item]
    return _with_variables(item) if key in ("items", "additionalProperties") and isinstance(item, dict) else item


def _choice(value: dict[str, Any], members: list[dict[str, Any]]) -> dict[str, Any]:
    kept: dict[str, Any] = {key: value[key] for key in ("default", "description") if key in value}
    return {**kept, "anyOf": [*members, _VARIABLE]}
