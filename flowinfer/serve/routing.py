"""What stands between the router and the endpoints: handlers as ASGI apps, request ids, statuses for the metrics."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException

from flowinfer.errors import RequestError
from flowinfer.serve.asgi import Headers, Receive, Scope, Send, header

Handler = Callable[[Scope, Receive, Send, Headers], Awaitable[None]]
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Endpoint:
    """An ASGI app around a handler; a class, so that Starlette calls it as it is."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._handler(scope, receive, send, [(b"x-request-id", scope["request_id"])])


class Counted:
    """`send` that remembers the status. Costs a stream one call a chunk: it returns send's own awaitable."""

    __slots__ = ("_send", "status")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    @property
    def started(self) -> bool:
        """The status line is out."""
        return self.status != 0

    def __call__(self, message: Any) -> Awaitable[None]:
        if not self.status:
            self.status = message["status"]
        return self._send(message)


def request_id(scope: Scope) -> bytes:
    """The client's X-Request-Id if it is printable and short, else a new one."""
    given = header(scope, b"x-request-id")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()


async def unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    """What no route matches. Raises RequestError 404."""
    raise RequestError(404, f"Unknown path {scope['path']}.", code="unknown_url")


def method_error(scope: Scope, error: HTTPException) -> RequestError:
    """The router's refusal of a method, in the shape of the API."""
    message = f"{scope['method']} is not allowed on {scope['path']}."
    return RequestError(error.status_code, message, code="method_not_allowed")


def raw_headers(error: HTTPException) -> Headers:
    """Headers that go with it, as Allow."""
    return [(key.lower().encode(), value.encode()) for key, value in (error.headers or {}).items()]


def path_label(scope: Scope) -> str:
    """The route's path; unknown paths share one label, or a scanner would fill the registry."""
    route = scope.get("route")
    return route.path if route is not None else "unknown"
