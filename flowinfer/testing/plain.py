"""Test files that hold requests and answers alone: the graph as one in this process, or a service over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flowinfer.errors import RequestError
from flowinfer.graph.plan import Plan
from flowinfer.message import Piece
from flowinfer.runtime.local import LocalService
from flowinfer.runtime.models import fetch_models
from flowinfer.serve.gateway import GatewayConfig
from flowinfer.serve.mailbox import joined
from flowinfer.serve.openai.chat import ChatRequest, chat_job
from flowinfer.serve.openai.completions import CompletionRequest, completion_job
from flowinfer.serve.openai.decode import decode
from flowinfer.serve.openai.job import Job, Limits
from flowinfer.testing.checks import Outcome, answer_problems, text_of
from flowinfer.testing.file import Case, PipelineTest

Ask = Callable[[Case], tuple[int, dict[str, Any]]]


def run_plain(test: PipelineTest, path: Path) -> Iterator[Outcome]:
    """Runs the cases of a test file in this process, one after the other."""
    with _inline(test.plan(path)) as ask, _inline(test.other_plan(path)) as other:
        assert ask is not None
        yield from _run(test, ask, other)


def run_over_http(path: Path, url: str) -> Iterator[Outcome]:
    """Runs the cases of a test file against a running service."""
    test = PipelineTest.load(path)
    model = ask_http(url, "GET", "/v1/models", None)[1]["data"][0]["id"]
    with _inline(test.other_plan(path)) as other:
        yield from _run(test, lambda case: ask_http(url, "POST", case.path, case.body(model)), other)


@contextlib.contextmanager
def _inline(plan: Plan | None) -> Iterator[Ask | None]:
    """The pipeline of a plan in this process, to be asked; None without a plan."""
    if plan is None:
        yield None
        return
    fetch_models(plan)
    config = GatewayConfig.of(plan)
    limits = Limits.of(config)
    with LocalService(plan) as service:
        yield lambda case: _ask_inline(service, limits, config.models[0], case)


def _run(test: PipelineTest, ask: Ask, other: Ask | None) -> Iterator[Outcome]:
    for case in test.cases:
        status, body = ask(case)
        problems = answer_problems(case.expect, status, body)
        if other is not None and (wanted := text_of(other(case)[1])) != text_of(body):
            problems.append(f"answers {text_of(body)!r}, but {test.equivalent_to} answers {wanted!r}")
        yield Outcome(case.name, text_of(body), tuple(problems))


def _ask_inline(service: LocalService, limits: Limits, model: str, case: Case) -> tuple[int, dict[str, Any]]:
    try:
        job = job_of(case, json.dumps(case.body(model)).encode(), limits)
        answers = service.generate(job.calls)
        pieces = [_joined(answers[call.id]) for call in job.calls]
    except RequestError as error:
        return error_answer(error)
    return 200, json.loads(job.writer.whole(pieces))


def job_of(case: Case, body: bytes, limits: Limits, id: str = "") -> Job:
    """The calls of a case. Raises RequestError as the API would."""
    id = id or f"test-{uuid.uuid4().hex}"  # an id is never used twice in the life of a service
    if case.chat is not None:
        return chat_job(decode(ChatRequest, body), id, limits)
    return completion_job(decode(CompletionRequest, body), id, limits)


def error_answer(error: RequestError) -> tuple[int, dict[str, Any]]:
    """Status and body of an error, as the API has them."""
    return error.status, {"error": {"message": str(error), "param": error.param, "code": error.code}}


def _joined(answer: list[Piece] | RequestError) -> Piece:
    if isinstance(answer, RequestError):
        raise answer
    return joined(answer)


def ask_http(url: str, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "127.0.0.1", where.port or 8000, timeout=600)
    try:
        connection.request(method, path, json.dumps(body) if body else None, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()
