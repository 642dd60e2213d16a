"""The JSON Schema of test files, from which editors complete and check."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from flowinfer.spec.docs import attribute_docs
from flowinfer.spec.schema import DRAFT, UNITS
from flowinfer.testing import expect, file

PARTS = {**vars(expect), **vars(file)}
MODELS = {name: cls for name, cls in PARTS.items() if isinstance(cls, type) and issubclass(cls, expect.Strict)}


def json_schema() -> dict[str, Any]:
    """A schema of draft 2020-12. What one mistake of a pair is, a reader says; the schema knows keys and types."""
    schema = file.PipelineTest.model_json_schema(by_alias=True, mode="validation")
    definitions = {name: _described(MODELS[name], value) for name, value in schema.pop("$defs").items()}
    return {
        "$schema": DRAFT,
        "$id": "https://flowinfer.dev/schema/test/1",
        **_described(file.PipelineTest, schema),
        "title": "FlowInfer pipeline test",
        "$defs": definitions,
    }


def _described(model: type[BaseModel], schema: dict[str, Any]) -> dict[str, Any]:
    docs = attribute_docs(model)
    names = {field.alias or name: name for name, field in model.model_fields.items()}
    properties = {key: _with_units(value) for key, value in schema["properties"].items()}
    for key, value in properties.items():
        value.pop("title", None)
        if docs.get(names.get(key, key)):
            value["description"] = docs[names.get(key, key)]
    return {**schema, "properties": properties}


def _with_units(value: Any) -> Any:
    """A duration is text with its unit, or 0."""
    if isinstance(value, list):
        return [_with_units(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("unit") == "duration":
        kept = {key: item for key, item in value.items() if key in ("default", "description")}
        return {**kept, "anyOf": [UNITS["duration"], {"const": 0}]}
    return {key: _with_units(item) for key, item in value.items()}
