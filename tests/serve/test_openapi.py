"""The service's own document: complete, and requests made from it, right and wrong, never break the service."""

from __future__ import annotations

from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from flowinfer.message import Call, Finish, Piece
from flowinfer.serve.app import App

BOTH = ("openai", "anthropic")


def answer(call: Call) -> list[Piece]:
    return [Piece(id=call.id, text="a", tokens=[1], finish=Finish(reason="stop", completion_tokens=1))]


def sendable(part: Any) -> Any:
    """A part of a form as httpx takes it: numbers and lists, which a wrong request may hold, as their text."""
    if isinstance(part, tuple):
        return tuple(sendable(one) for one in part)
    return part if part is None or isinstance(part, str | bytes) or hasattr(part, "read") else str(part)


HTTP = httpx.Client(timeout=30)  # one for all: to make one takes 20 ms


def check(case: Any) -> None:
    asked = {key: value for key, value in case.as_transport_kwargs().items() if value is not None and key != "cookies"}
    if "data" in asked:  # httpx calls bytes `content`
        data = asked.pop("data")
        asked["content" if isinstance(data, str | bytes) else "data"] = data
    if "files" in asked:
        parts = asked["files"].items() if isinstance(asked["files"], dict) else asked["files"]
        asked["files"] = [(name, sendable(part)) for name, part in parts]
    response = HTTP.request(**asked)
    assert response.status_code < 500, asked
    if response.status_code >= 400:
        assert response.json()["error"]["message"]


def test_no_request_made_from_the_document_breaks_the_service(start: Any) -> None:
    schema = schemathesis.openapi.from_url(f"{start(answer, apis=BOTH).url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 20
    for operation in operations:
        wrong = [GenerationMode.NEGATIVE] if operation.body else []  # without one, hardly anything can be wrong
        for mode in (GenerationMode.POSITIVE, *wrong):
            strategy = operation.as_strategy(generation_mode=mode)
            few = settings(max_examples=8, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            few(given(case=strategy)(check))()


def test_the_document_names_every_route(start: Any) -> None:
    service = start(apis=BOTH)
    documented = {
        (method.upper(), path)
        for path, operations in httpx.get(f"{service.url}/openapi.json").json()["paths"].items()
        for method in operations
    }
    app = App(service.gateway, lambda mailbox: lambda item: None)
    routes = {
        (method, route.path.replace(":path", ""))
        for route in app.routes
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert documented == routes


def test_a_guarded_service_says_so(start: Any) -> None:
    service = start(keys={"ann": "0" * 64})
    assert httpx.get(f"{service.url}/openapi.json").json()["security"] == [{"key": []}]
