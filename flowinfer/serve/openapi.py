"""The OpenAPI document of the service, made from the types that read the requests. Answers are described by status."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

from flowinfer import __version__
from flowinfer.serve.anthropic.messages import Conversation, MessageRequest
from flowinfer.serve.files_api import BatchRequest
from flowinfer.serve.openai.chat import ChatRequest
from flowinfer.serve.openai.completions import CompletionRequest
from flowinfer.serve.openai.responses import ResponsesRequest
from flowinfer.serve.tokens import DetokenizeRequest, TokenizeRequest


class Operation(NamedTuple):
    """One method of one path. body: the type that reads it."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    api: str = ""
    answer: str = "application/json"


OPERATIONS = (
    Operation("get", "/health", "The process answers."),
    Operation("get", "/ready", "A request would be admitted now."),
    Operation("get", "/version", "The version of FlowInfer."),
    Operation("get", "/metrics", "Metrics for Prometheus.", answer="text/plain"),
    Operation("get", "/openapi.json", "This document."),
    Operation("post", "/tokenize", "Token ids of a text or a chat.", TokenizeRequest),
    Operation("post", "/detokenize", "The text of token ids.", DetokenizeRequest),
    Operation("post", "/v1/chat/completions", "Answers a chat.", ChatRequest, "openai"),
    Operation("post", "/v1/completions", "Continues a text.", CompletionRequest, "openai"),
    Operation("get", "/v1/models", "The models that are served.", api="openai"),
    Operation("get", "/v1/models/{id}", "One model.", api="openai"),
    Operation("post", "/v1/responses", "Answers, and keeps the conversation.", ResponsesRequest, "openai"),
    Operation("post", "/v1/responses/input_tokens", "Counts a request's tokens.", ResponsesRequest, "openai"),
    Operation("get", "/v1/responses/{id}", "A response that was kept, or its stream.", api="openai"),
    Operation("get", "/v1/responses/{id}/input_items", "The conversation that led to a response.", api="openai"),
    Operation("delete", "/v1/responses/{id}", "Forgets a response.", api="openai"),
    Operation("post", "/v1/responses/{id}/cancel", "Stops a response that runs in the background.", api="openai"),
    Operation("post", "/v1/files", "Uploads the input of a batch.", api="openai"),
    Operation("get", "/v1/files", "The files of this client.", api="openai"),
    Operation("get", "/v1/files/{id}", "What is known of a file.", api="openai"),
    Operation("get", "/v1/files/{id}/content", "A file.", api="openai", answer="application/octet-stream"),
    Operation("delete", "/v1/files/{id}", "Deletes a file.", api="openai"),
    Operation("post", "/v1/batches", "Starts a batch.", BatchRequest, "openai"),
    Operation("get", "/v1/batches", "The batches of this client.", api="openai"),
    Operation("get", "/v1/batches/{id}", "How far a batch is.", api="openai"),
    Operation("post", "/v1/batches/{id}/cancel", "Stops a batch.", api="openai"),
    Operation("post", "/v1/messages", "Answers a chat.", MessageRequest, "anthropic"),
    Operation("post", "/v1/messages/count_tokens", "Counts a chat's tokens.", Conversation, "anthropic"),
)
_UPLOAD = {
    "type": "object",
    "properties": {"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}},
    "required": ["purpose", "file"],
}


def document(apis: Collection[str], *, keys: bool) -> dict[str, Any]:
    """OpenAPI 3.1 for a service that offers `apis`. keys: requests need one."""
    offered = [operation for operation in OPERATIONS if not operation.api or operation.api in apis]
    bodies = list(dict.fromkeys(operation.body for operation in offered if operation.body is not None))
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in offered:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, by_type)
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "FlowInfer", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR}},
    }
    if keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _operation(operation: Operation, schemas: dict[type[msgspec.Struct], dict[str, Any]]) -> dict[str, Any]:
    schema = {} if operation.api == "anthropic" else {"schema": {"$ref": "#/components/schemas/Error"}}
    error = {"application/json": schema}
    found: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "The answer.", "content": {operation.answer: {}}},
            "default": {"description": "Refused or failed, and why.", "content": error},
        },
    }
    if "{id}" in operation.path:
        found["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.body is not None:
        content: dict[str, Any] = {"application/json": {"schema": schemas[operation.body]}}
        if "stream" in operation.body.__struct_fields__:
            found["responses"]["200"]["content"]["text/event-stream"] = {}
        found["requestBody"] = {"required": True, "content": content}
    elif (operation.method, operation.path) == ("post", "/v1/files"):
        found["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}
    return found


_TEXT_OR_NULL = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _TEXT_OR_NULL,
                "code": _TEXT_OR_NULL,
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
