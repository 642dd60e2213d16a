"""The little of HTTP that endpoints need: bodies within a limit, plain responses, errors in the API's shape."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec

from flowinfer.errors import RequestError
from flowinfer.serve.anthropic import errors

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON = (b"content-type", b"application/json")
SSE: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that buffer would hold tokens back
]
BODY_TIMEOUT_S = 60.0
MAX_DISCARDED = 256 * 2**20  # bytes of a refused body that are read all the same
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Disconnected(Exception):
    """The client went away; nobody is left to tell."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The request's body. Raises RequestError 413 beyond `limit` bytes, 408, 415 (compressed), Disconnected."""
    coding = header(scope, b"content-encoding").decode("latin-1")
    if coding.lower() not in ("", "identity"):
        message = f"The body is encoded as {coding[:20]!r}; send it as plain JSON, without Content-Encoding."
        raise RequestError(415, message, code="unsupported_encoding")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(scope, receive, limit)
    except TimeoutError:
        message = f"The body didn't arrive within {BODY_TIMEOUT_S:g} s."
        raise RequestError(408, message, code="request_timeout") from None


async def _read(scope: Scope, receive: Receive, limit: int) -> bytes:
    declared = header(scope, b"content-length")
    if declared.isdigit() and int(declared) > limit:
        await discard(receive, int(declared))
        raise _too_large(limit)
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
        if size > limit:
            if more:
                await discard(receive)
            raise _too_large(limit)
    return b"".join(parts)


async def discard(receive: Receive, declared: int = 0) -> None:
    """Reads what is left of a body that is refused: who still sends it would read no answer. Raises Disconnected.

    Gives up, and lets the connection break, beyond MAX_DISCARDED bytes or BODY_TIMEOUT_S.
    """
    size = declared
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while size <= MAX_DISCARDED:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                if not message.get("more_body", False):
                    return
                size += 0 if declared else len(message.get("body", b""))


async def disconnection(receive: Receive) -> None:
    """Returns when the client has gone away. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def header(scope: Scope, name: bytes) -> bytes:
    """The first header of this (lower-case) name, or b""."""
    return next((bytes(value) for key, value in scope["headers"] if key == name), b"")


async def respond(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (JSON,)) -> None:
    """Sends a whole response."""
    all_headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


async def respond_error(
    send: Send, error: RequestError, headers: Headers | None = None, *, anthropic: bool = False
) -> None:
    """Sends an error in the shape that OpenAI's or Anthropic's clients read, with Retry-After where known."""
    extra = [JSON, *(headers or [])]
    if error.retry_after_s is not None:
        extra.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    if error.status in (408, 413, 415):
        extra.append((b"connection", b"close"))  # the rest of the body stays unread
    if anthropic:
        await respond(send, errors.status_of(error), errors.error_body(error), extra)
    else:
        await respond(send, error.status, error_body(error), extra)


def error_body(error: RequestError) -> bytes:
    """{"error": {message, type, param, code}} of an error."""
    fallback = "invalid_request_error" if error.status < 500 else "server_error"
    kind = _TYPES.get(error.status, fallback)
    fields = {"message": error.message, "type": kind, "param": error.param, "code": error.code or None}
    return msgspec.json.encode({"error": fields})


def _too_large(limit: int) -> RequestError:
    return RequestError(413, f"The body is larger than {limit} bytes.", code="request_too_large")
