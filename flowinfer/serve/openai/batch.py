"""The OpenAI batch format: a line of input becomes a job, its answer a line of output. Reads and writes no file."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from flowinfer.errors import RequestError
from flowinfer.message import Piece
from flowinfer.serve.asgi import error_body
from flowinfer.serve.mailbox import joined
from flowinfer.serve.openai.chat import ChatRequest, chat_job
from flowinfer.serve.openai.completions import CompletionRequest, completion_job
from flowinfer.serve.openai.decode import decode
from flowinfer.serve.openai.fields import invalid
from flowinfer.serve.openai.job import Job, Limits

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """One request of an input file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class OutputLine(msgspec.Struct, kw_only=True):
    """One answer. `line` names the input line where that has no readable custom_id."""

    id: str
    custom_id: str | None
    response: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    line: int | msgspec.UnsetType = msgspec.UNSET


def read_line(text: bytes) -> BatchLine:
    """A line of input. Raises RequestError naming the field at fault."""
    return decode(BatchLine, text)


def job_of(line: BatchLine, limits: Limits) -> Job:
    """The job that a line asks for. Raises RequestError naming the field at fault."""
    if line.method != "POST":
        raise invalid("method", f"must be POST, not {line.method[:20]!r}.")
    if line.url not in (CHAT, COMPLETIONS):
        raise invalid("url", f"must be {CHAT} or {COMPLETIONS}, not {line.url[:80]!r}.")
    name, body = uuid.uuid4().hex, bytes(line.body)
    if line.url == CHAT:
        job = chat_job(decode(ChatRequest, body), f"chatcmpl-{name}", limits)
    else:
        job = completion_job(decode(CompletionRequest, body), f"cmpl-{name}", limits)
    if job.stream:
        raise invalid("stream", "a batch can't be streamed.")
    return job


def success(custom_id: str, job: Job, pieces: list[list[Piece]]) -> bytes:
    """The output line of an answer; pieces[i] are those of choice i."""
    return answered(custom_id, job.id, job.writer.whole([joined(choice) for choice in pieces]))


def answered(custom_id: str, request_id: str, body: bytes) -> bytes:
    """The output line of an answer that is written already."""
    return _encoded(custom_id, {"status_code": 200, "request_id": request_id, "body": msgspec.Raw(body)})


def failure(custom_id: str, request_id: str, error: RequestError) -> bytes:
    """The output line of a request that was refused or failed."""
    body = msgspec.Raw(error_body(error))
    return _encoded(custom_id, {"status_code": error.status, "request_id": request_id, "body": body})


def unreadable(number: int, error: RequestError) -> bytes:
    """The output line for input line `number` (from 1), which has no custom_id that can be read."""
    said = {"code": "invalid_line", "message": f"line {number}: {error.message}"}
    return _line(OutputLine(id=_id(), custom_id=None, error=said, line=number))


def _encoded(custom_id: str, response: dict[str, Any]) -> bytes:
    return _line(OutputLine(id=_id(), custom_id=custom_id, response=response))


def _line(line: OutputLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
