"""The table of fields says what the service does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

import flowinfer.serve
from flowinfer.serve.support import APIS, standing, table

FOREIGN: tuple[Any, ...] = ({"x": 1}, "foreign", ["foreign"], [{"x": 1}], True, 99, -7)
PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    "completions": ("/v1/completions", {"prompt": "a"}),
    "responses": ("/v1/responses", {"input": "a"}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
}


def test_the_page_is_the_table() -> None:
    """`python -m flowinfer.serve.support > flowinfer/serve/FIELDS.md` writes it anew."""
    assert (Path(flowinfer.serve.__file__).parent / "FIELDS.md").read_text() == table()


@pytest.mark.parametrize("api", APIS)
def test_what_the_table_calls_refused_is_refused_by_name(start: Any, api: str) -> None:
    service = start(apis=("openai", "anthropic"))
    path, body = PATHS[api]
    fields = [f for f in APIS[api][0].__struct_fields__ if standing(api, f).startswith(("refused", "only"))]
    assert fields
    with httpx.Client(base_url=service.url) as http:
        for field in fields:
            for value in FOREIGN:
                response = http.post(path, json={"model": "tiny", **body, field: value})
                assert response.status_code == 400, (field, value)
                assert field in response.json()["error"]["message"], (field, value)
    assert service.calls.empty()
