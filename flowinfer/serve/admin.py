"""What operators ask a service, under /admin/: from this host, through no proxy, and with a key if there are any."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from flowinfer.errors import RequestError
from flowinfer.message import TraceTold
from flowinfer.serve.access import Access
from flowinfer.serve.asgi import JSON, Receive, Scope, Send, header, respond, respond_error
from flowinfer.serve.openai.encode import encode

if TYPE_CHECKING:
    from flowinfer.serve.gateway import Gateway

PREFIX = "/admin/"
TRACE = "/admin/trace/"


class Admin:
    """Answers /admin/ and hands everything else to the app behind it."""

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], gateway: Gateway, access: Access
    ) -> None:
        self._app = app
        self._gateway = gateway
        self._access = access

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http" and scope["path"].startswith(PREFIX):
            return self._answer(scope, send)
        return self._app(scope, receive, send)

    async def _answer(self, scope: Scope, send: Send) -> None:
        try:
            _check_local(scope)
            self._access.client(header(scope, b"authorization"), header(scope, b"x-api-key"))
            if not scope["path"].startswith(TRACE) or scope["method"] != "GET":
                raise RequestError(404, f"Unknown path {scope['path']}.", code="unknown_url")
            await respond(send, 200, encode(await self._trace(scope["path"].removeprefix(TRACE))), (JSON,))
        except RequestError as error:
            await respond_error(send, error, [])

    async def _trace(self, id: str) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        told: asyncio.Future[list[TraceTold]] = loop.create_future()
        self._gateway.trace(id, lambda answers: loop.call_soon_threadsafe(told.set_result, answers))
        workers = [
            {"worker": answer.worker, "since": answer.since, "steps": [_fields(step) for step in answer.steps]}
            for answer in await told
        ]
        return {"id": id, "workers": workers}


def _fields(step: Any) -> dict[str, Any]:
    return {name: getattr(step, name) for name in step.__struct_fields__}


def _check_local(scope: Scope) -> None:
    host = (scope.get("client") or ("",))[0]
    proxied = header(scope, b"x-forwarded-for") or header(scope, b"forwarded")
    try:
        local = ipaddress.ip_address(host).is_loopback and not proxied
    except ValueError:
        local = False
    if not local:
        raise RequestError(403, "/admin/ answers only to this host.", code="not_local")
