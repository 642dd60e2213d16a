"""/admin/: answers of the workers are gathered, and only this host is answered."""

from __future__ import annotations

import threading
from typing import Any

import httpx

from flowinfer.message import TraceAsk, TracedStep, TraceTold
from flowinfer.serve.access import digest_of


def test_a_trace_gathers_what_the_workers_tell(service: Any) -> None:
    got: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: got.append(httpx.get(service.url + "/admin/trace/r1")))
    asking.start()
    with service.ctx.news:
        assert service.ctx.news.wait_for(lambda: any(isinstance(e, TraceAsk) for e in service.ctx.sent), 10)
    steps = [TracedStep(stage="decode", started=1.0, ended=2.0, batch=3)]
    service.put(TraceTold(worker="decode.0", id="r1", since=0.5, steps=steps))
    service.advance(1.0)
    asking.join(10)
    (worker,) = got[0].json()["workers"]
    assert (worker["worker"], worker["since"]) == ("decode.0", 0.5)
    assert worker["steps"] == [{"stage": "decode", "started": 1.0, "ended": 2.0, "batch": 3, "shared": False}]


def test_a_request_that_came_through_a_proxy_is_refused(service: Any) -> None:
    response = httpx.get(service.url + "/admin/trace/r1", headers={"x-forwarded-for": "10.0.0.1"})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "not_local")


def test_where_there_are_keys_an_operator_needs_one_too(start: Any) -> None:
    service = start(keys={"ann": digest_of("secret")})
    asked = [httpx.get(f"{service.url}/admin/nothing", headers=headers) for headers in ({}, {"x-api-key": "secret"})]
    assert [response.status_code for response in asked] == [401, 404]


def test_unknown_paths(service: Any) -> None:
    assert httpx.get(service.url + "/admin/").status_code == 404
    assert httpx.post(service.url + "/admin/trace/r1").status_code == 404
