"""The endpoints /v1/files and /v1/batches."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.routing import BaseRoute, Route

from flowinfer.errors import RequestError
from flowinfer.serve.asgi import Disconnected, Headers, Receive, Scope, Send, discard, header, read_body, respond
from flowinfer.serve.batches import Batches, Run
from flowinfer.serve.files import FileStore
from flowinfer.serve.openai.decode import decode
from flowinfer.serve.openai.fields import invalid
from flowinfer.serve.openai.job import Limits

MAX_UPLOAD = 200 * 2**20  # bytes, as in the OpenAI API
_CHUNK = 2**20
Reply = Callable[[Send, Any, Headers], Awaitable[None]]
Handler = Callable[[Scope, Receive, Send, Headers], Awaitable[None]]


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: Any = None


class FilesApi:
    """Over one store of files and its batches; tenant names the client of the current request."""

    def __init__(self, limits: Limits, max_body: int, run: Run, reply: Reply, tenant: Callable[[], str]) -> None:
        self._max_body, self._reply, self._tenant = max_body, reply, tenant
        self._files = FileStore()
        self._batches = Batches(self._files, limits, run)

    def routes(self, endpoint: Callable[[Handler], Any]) -> list[BaseRoute]:
        """All of them."""
        table: list[tuple[str, str, Handler]] = [
            ("POST", "/v1/files", self.upload),
            ("GET", "/v1/files", self.list_files),
            ("GET", "/v1/files/{id}", self.file),
            ("GET", "/v1/files/{id}/content", self.content),
            ("DELETE", "/v1/files/{id}", self.delete),
            ("POST", "/v1/batches", self.create),
            ("GET", "/v1/batches", self.list_batches),
            ("GET", "/v1/batches/{id}", self.batch),
            ("POST", "/v1/batches/{id}/cancel", self.cancel),
        ]
        return [Route(path, endpoint(handler), methods=[method]) for method, path, handler in table]

    async def upload(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        declared = header(scope, b"content-length")
        if not declared.isdigit() or int(declared) > MAX_UPLOAD:
            await discard(receive, int(declared) if declared.isdigit() else 0)
            raise RequestError(413, f"An upload says its length, up to {MAX_UPLOAD} bytes.", code="request_too_large")
        try:
            async with Request(scope, receive).form(max_files=1, max_fields=8) as form:
                card = await self._keep(form.get("purpose"), form.get("file"))
        except HTTPException as error:
            raise RequestError(400, f"The form can't be read: {error.detail}", code="invalid_form") from None
        except ClientDisconnect:
            raise Disconnected from None
        await self._reply(send, card, headers)

    async def _keep(self, purpose: Any, file: Any) -> dict[str, Any]:
        if purpose != "batch":
            raise invalid("purpose", "must be batch.")
        if not isinstance(file, UploadFile):
            raise invalid("file", "must be a file.")
        id, path = self._files.new_path()
        with path.open("wb") as out:
            while chunk := await file.read(_CHUNK):
                out.write(chunk)
        return self._files.add(self._tenant(), id, file.filename or id, "batch").card()

    async def list_files(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        cards = [file.card() for file in self._files.list(self._tenant())]
        await self._reply(send, _page(scope, cards), headers)

    async def file(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        await self._reply(send, self._files.get(self._tenant(), scope["path_params"]["id"]).card(), headers)

    async def content(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        file = self._files.get(self._tenant(), scope["path_params"]["id"])
        kind = (b"content-type", b"application/octet-stream")
        await respond(send, 200, self._files.path(file.id).read_bytes(), [kind, *headers])

    async def delete(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        id = scope["path_params"]["id"]
        self._files.delete(self._tenant(), id)
        await self._reply(send, {"id": id, "object": "file", "deleted": True}, headers)

    async def create(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        request = decode(BatchRequest, await read_body(scope, receive, self._max_body))
        if request.completion_window != "24h":
            raise invalid("completion_window", "must be 24h.")
        if request.output_expires_after is not None:
            raise invalid("output_expires_after", "is not supported: outputs live as long as the service.")
        file = self._files.get(self._tenant(), request.input_file_id, param="input_file_id")
        card = self._batches.create(self._tenant(), file, request.endpoint, request.metadata)
        await self._reply(send, card, headers)

    async def list_batches(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        await self._reply(send, _page(scope, self._batches.list(self._tenant())), headers)

    async def batch(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        await self._reply(send, self._batches.get(self._tenant(), scope["path_params"]["id"]).card, headers)

    async def cancel(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        await self._reply(send, self._batches.cancel(self._tenant(), scope["path_params"]["id"]), headers)


def _page(scope: Scope, cards: list[dict[str, Any]]) -> dict[str, Any]:
    """What `limit` and `after` of the query ask for."""
    query = parse_qs(scope["query_string"].decode("latin-1"))
    limit, after = query.get("limit", ["20"])[0], query.get("after", [""])[0]
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= 10_000):
        raise invalid("limit", "must be from 1 to 10000.")
    ids = [card["id"] for card in cards]
    if after and after not in ids:
        raise invalid("after", "must be an id of the list.")
    rest = cards[ids.index(after) + 1 :] if after else cards
    page, more = rest[: int(limit)], len(rest) > int(limit)
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, "has_more": more, **ends}
