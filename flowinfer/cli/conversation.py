"""Who answers in a terminal chat: a running service over HTTP, or a pipeline in this process. Prints nothing."""

from __future__ import annotations

import http.client
import json
import queue
import uuid
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from flowinfer.errors import FlowInferError, RequestError
from flowinfer.graph.plan import Plan
from flowinfer.message import Call, Piece, Sampling

Messages = list[dict[str, Any]]
TIMEOUT_S = 600.0
UNLIMITED = 2**20  # tokens; the context ends an answer before


@dataclass(frozen=True)
class Options:
    """Settings of all answers of a chat; None leaves a setting to the service."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None


class Partner(Protocol):
    """Answers the last of `messages`. Closing the iterator stops the answer."""

    model: str

    def answer(self, messages: Messages) -> Generator[str, None, None]: ...

    def close(self) -> None: ...


class RemotePartner:
    """A running service. Raises FlowInferError when it can't be reached or refuses."""

    def __init__(self, url: str, model: str | None, options: Options) -> None:
        self._url = urlsplit(url if "://" in url else f"http://{url}")
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise FlowInferError(
                f"{url!r} isn't the address of a service.", help="It looks like http://127.0.0.1:8000."
            )
        self._options = options
        self.model = model or self._first_model()

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        body = {"model": self.model, "messages": messages, "stream": True}
        body |= {key: value for key, value in vars(self._options).items() if value is not None}
        connection, response = self._request("POST", "/v1/chat/completions", json.dumps(body).encode())
        try:
            yield from _deltas(response)
        finally:
            connection.close()  # in mid-answer, this is what cancels it

    def close(self) -> None:
        return None

    def _first_model(self) -> str:
        connection, response = self._request("GET", "/v1/models")
        models = json.loads(response.read())["data"]
        connection.close()
        return str(models[0]["id"]) if models else "default"  # a service that names none answers to any name

    def _request(
        self, method: str, path: str, body: bytes | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        secure = self._url.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, self._url.path.rstrip("/") + path, body, {"content-type": "application/json"})
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            help = "Start one with `flowinfer run FILE`, or give a pipeline file: `flowinfer chat FILE`."
            raise FlowInferError(f"No service answers at {self._url.geturl()}: {error}.", help=help) from error
        if response.status != 200:
            raise FlowInferError(_reason(response))
        return connection, response


class LocalPartner:
    """The pipeline of a plan, run in this process."""

    def __init__(self, plan: Plan, options: Options) -> None:
        from flowinfer.runtime.local import LocalService

        self.model = plan.name
        self._options = options
        self._service = LocalService(plan)
        self._service.open()
        self._service.start()

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        pieces: queue.SimpleQueue[Piece | RequestError] = queue.SimpleQueue()
        call = Call(id=f"chat-{uuid.uuid4().hex}", sampling=self._sampling(), messages=list(messages))
        self._service.submit(call, pieces.put)
        finished = False
        try:
            while not finished:
                piece = self._next(pieces)
                finished = piece.finish is not None
                if piece.text:
                    yield piece.text
        finally:
            if not finished:
                self._service.cancel([call.id])

    def close(self) -> None:
        self._service.close()

    def _next(self, pieces: queue.SimpleQueue[Piece | RequestError]) -> Piece:
        while True:
            try:
                piece = pieces.get(timeout=1.0)
            except queue.Empty:
                if self._service.error is not None:
                    raise FlowInferError(f"The pipeline broke: {self._service.error}") from self._service.error
                continue
            if isinstance(piece, RequestError):
                raise piece
            return piece

    def _sampling(self) -> Sampling:
        temperature = 1.0 if self._options.temperature is None else self._options.temperature
        return Sampling(
            max_tokens=self._options.max_tokens or UNLIMITED, temperature=temperature, seed=self._options.seed
        )


def _deltas(response: http.client.HTTPResponse) -> Iterator[str]:
    """The texts of a stream. Raises FlowInferError on an error event, or when the stream breaks off."""
    try:
        for line in response:
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                yield from _texts(json.loads(line[6:]))
    except (OSError, http.client.HTTPException) as error:
        raise FlowInferError(f"The connection broke: {error}.") from error
    raise FlowInferError("The answer broke off.")


def _texts(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise FlowInferError(str(event["error"].get("message", "unknown error")))
    for choice in event.get("choices", ()):
        if text := choice.get("delta", {}).get("content"):
            yield text


def _reason(response: http.client.HTTPResponse) -> str:
    body = response.read()
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    return f"The service answered {response.status}: {message}"
