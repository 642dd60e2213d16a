"""Tests beside pipelines: requests in, expectations out. A `*_test.yaml` is read here and run inline or over HTTP.

Inline, the whole graph runs in this process without sockets; over HTTP, against a service that is already running.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flowinfer.errors import FlowInferError, RequestError
from flowinfer.graph import load_plan
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

Ask = Callable[["Case"], tuple[int, dict[str, Any]]]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Expect(_Strict):
    """What must hold of the answer. text is exact, contains a part, matches a regular expression; error a status."""

    text: str | None = None
    contains: str | None = None
    matches: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    min_cached_tokens: int | None = None
    error: int | None = None
    param: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Expect:
        if not self.model_fields_set:
            raise ValueError("expect says nothing, so the case can't fail")
        return self


class Case(_Strict):
    """One request: a `chat` (a string, or messages) or a `prompt`, with further fields of the API under `with`."""

    name: str
    chat: str | list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    fields: dict[str, Any] = Field({}, alias="with")
    expect: Expect | None = None

    @model_validator(mode="after")
    def _asks_one_thing(self) -> Case:
        if (self.chat is None) == (self.prompt is None):
            raise ValueError("give either chat or prompt")
        return self

    @property
    def path(self) -> str:
        """Of the endpoint."""
        return "/v1/completions" if self.chat is None else "/v1/chat/completions"

    def body(self, model: str) -> dict[str, Any]:
        """Of the request."""
        asked: dict[str, Any] = {"prompt": self.prompt}
        if self.chat is not None:
            asked = {"messages": [{"role": "user", "content": self.chat}] if isinstance(self.chat, str) else self.chat}
        return {"model": model, "temperature": 0, **asked, **self.fields}


class PipelineTest(_Strict):
    """A test file. `pipeline` is relative to it; `set` changes settings as --set does; cases run in order.

    `cases_of` names another test file, whose cases run here too. `equivalent_to` names another pipeline, run in this
    process with the same `set`: it must answer each case with the same text. Cases then need no `expect`.
    """

    pipeline: str
    set: dict[str, Any] = {}
    cases_of: str | None = None
    equivalent_to: str | None = None
    cases: list[Case] = []

    @model_validator(mode="after")
    def _has_cases(self) -> PipelineTest:
        if not self.cases and self.cases_of is None:
            raise ValueError("there are no cases")
        if self.equivalent_to is None and (idle := [case.name for case in self.cases if case.expect is None]):
            raise ValueError(f"case {idle[0]!r} expects nothing, so it can't fail; give expect or equivalent_to")
        return self

    @classmethod
    def load(cls, path: Path) -> PipelineTest:
        """Reads a file. Raises FlowInferError naming file and field."""
        try:
            test = cls.model_validate(yaml.safe_load(path.read_text()))
            if test.cases_of is None:
                return test
            shared = cls.load(path.parent / test.cases_of).cases
            return test.model_copy(update={"cases": [*shared, *test.cases]})
        except (OSError, yaml.YAMLError) as error:
            raise FlowInferError(f"{path}: {error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise FlowInferError(f"{path}: {where or 'file'}: {first['msg']}") from error

    def plan(self, path: Path) -> Plan:
        """The plan of the pipeline under test."""
        return self._plan(path.parent / self.pipeline)

    def other_plan(self, path: Path) -> Plan | None:
        """The plan of the pipeline that must answer the same, if there is one."""
        return self._plan(path.parent / self.equivalent_to) if self.equivalent_to else None

    def _plan(self, file: Path) -> Plan:
        return load_plan(file, sets=[f"{key}={value}" for key, value in self.set.items()])


class Outcome(_Strict):
    """How a case went; `problems` is empty where it passed."""

    case: Case
    text: str
    problems: tuple[str, ...]


def run_inline(path: Path) -> Iterator[Outcome]:
    """Runs the cases of a test file in this process, one after the other."""
    test = PipelineTest.load(path)
    with _inline(test.plan(path)) as ask, _inline(test.other_plan(path)) as other:
        assert ask is not None
        yield from _run(test, ask, other)


def run_over_http(path: Path, url: str) -> Iterator[Outcome]:
    """Runs the cases of a test file against a running service."""
    test = PipelineTest.load(path)
    model = _http(url, "GET", "/v1/models", None)[1]["data"][0]["id"]
    with _inline(test.other_plan(path)) as other:
        yield from _run(test, lambda case: _http(url, "POST", case.path, case.body(model)), other)


@contextlib.contextmanager
def _inline(plan: Plan | None) -> Iterator[Ask | None]:
    """The pipeline of a plan in this process, to be asked; None without a plan."""
    if plan is None:
        yield None
        return
    fetch_models(plan)
    config = GatewayConfig.of(plan)
    limits = Limits(config.models, config.max_requests, config.default_max_tokens, config.tools)
    with LocalService(plan) as service:
        yield lambda case: _ask_inline(service, limits, config.models[0], case)


def _run(test: PipelineTest, ask: Ask, other: Ask | None) -> Iterator[Outcome]:
    for case in test.cases:
        status, body = ask(case)
        problems: list[str] = []
        if case.expect is not None:
            problems = _error_problems(case.expect, status, body) or _answer_problems(case.expect, status, body)
        if other is not None and (wanted := _text(other(case)[1])) != _text(body):
            problems.append(f"answers {_text(body)!r}, but {test.equivalent_to} answers {wanted!r}")
        yield Outcome(case=case, text=_text(body), problems=tuple(problems))


def _ask_inline(service: LocalService, limits: Limits, model: str, case: Case) -> tuple[int, dict[str, Any]]:
    try:
        job = _job(case, json.dumps(case.body(model)).encode(), limits)
        answers = service.generate(job.calls)
        pieces = [_joined(answers[call.id]) for call in job.calls]
    except RequestError as error:
        return error.status, {"error": {"message": str(error), "param": error.param, "code": error.code}}
    return 200, json.loads(job.writer.whole(pieces))


def _job(case: Case, body: bytes, limits: Limits) -> Job:
    id = f"test-{uuid.uuid4().hex}"  # an id is never used twice in the life of a service
    if case.chat is not None:
        return chat_job(decode(ChatRequest, body), id, limits)
    return completion_job(decode(CompletionRequest, body), id, limits)


def _joined(answer: list[Piece] | RequestError) -> Piece:
    if isinstance(answer, RequestError):
        raise answer
    return joined(answer)


def _http(url: str, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "127.0.0.1", where.port or 8000, timeout=600)
    try:
        connection.request(method, path, json.dumps(body) if body else None, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def _text(body: dict[str, Any]) -> str:
    if "choices" not in body:
        return str(body.get("error", {}).get("message", ""))
    choice = body["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def _error_problems(expect: Expect, status: int, body: dict[str, Any]) -> list[str]:
    if status == (expect.error or 200):
        return []
    return [f"status {status}, expected {expect.error or 200}: {_text(body)}"]


def _answer_problems(expect: Expect, status: int, body: dict[str, Any]) -> list[str]:
    text = _text(body)
    usage = body.get("usage") or {}
    choice = body["choices"][0] if status == 200 else {}
    found: dict[str, Any] = {
        "text": text,
        "finish_reason": choice.get("finish_reason"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "param": (body.get("error") or {}).get("param"),
    }
    wanted = expect.model_dump(exclude_none=True)
    problems = [
        f"{key} is {found[key]!r}, expected {wanted[key]!r}"
        for key in found
        if key in wanted and found[key] != wanted[key]
    ]
    if expect.contains is not None and expect.contains not in text:
        problems.append(f"{text!r} doesn't contain {expect.contains!r}")
    if expect.matches is not None and not re.search(expect.matches, text):
        problems.append(f"{text!r} doesn't match {expect.matches!r}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if expect.min_cached_tokens is not None and cached < expect.min_cached_tokens:
        problems.append(f"{cached} cached tokens, expected at least {expect.min_cached_tokens}")
    return problems
