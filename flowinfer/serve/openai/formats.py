"""The shapes in which requests describe the form of their answer. Checks types only."""

from __future__ import annotations

from typing import Any

import msgspec


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`json_schema` of a response_format. strict changes nothing: the schema always holds."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format` of the chat API."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """`structured_outputs` as vLLM's clients send it."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
