"""The endpoints /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.routing import BaseRoute, Route

from flowinfer.errors import RequestError
from flowinfer.serve.asgi import Disconnected, Headers, Receive, Scope, Send, discard, header, read_body
from flowinfer.serve.batches import Batches
from flowinfer.serve.files import FileStore, StoredFile
from flowinfer.serve.openai.decode import decode
from flowinfer.serve.openai.fields import in_range, invalid
from flowinfer.serve.paging import page
from flowinfer.serve.routing import Handler

MAX_UPLOAD = 200 * 2**20  # bytes, as in the OpenAI API
_CHUNK = 2**20
_EXPIRES = ("expires_after[anchor]", "expires_after[seconds]")  # as forms write an object
_EXPIRY_S = (3600, 30 * 24 * 3600)  # as in the OpenAI API
Reply = Callable[[Send, Any, Headers], Awaitable[None]]


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How long a file is to be kept."""

    anchor: str
    seconds: int


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class FilesApi:
    """Over the files of a state and the batches of them; tenant names the client of the current request."""

    def __init__(
        self, files: FileStore, batches: Batches, max_body: int, reply: Reply, tenant: Callable[[], str]
    ) -> None:
        self._max_body, self._reply, self._tenant = max_body, reply, tenant
        self._files, self._batches = files, batches

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
                if unknown := form.keys() - {"purpose", "file", *_EXPIRES}:
                    raise invalid(min(unknown), "is not a field of an upload.", "unknown_parameter")
                card = await self._keep(form.get("purpose"), form.get("file"), _ttl_of_form(form))
        except HTTPException as error:
            raise RequestError(400, f"The form can't be read: {error.detail}", code="invalid_form") from None
        except ClientDisconnect:
            raise Disconnected from None
        await self._reply(send, card, headers)

    async def _keep(self, purpose: Any, file: Any, ttl_s: float | None) -> dict[str, Any]:
        if purpose != "batch":
            raise invalid("purpose", "must be batch.")
        if not isinstance(file, UploadFile):
            raise invalid("file", "must be a file.")
        id, path = self._files.new_path()
        try:
            with path.open("wb") as out:
                while chunk := await file.read(_CHUNK):
                    await asyncio.to_thread(out.write, chunk)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise RequestError(503, f"The file can't be kept: {error.strerror}.", code="storage_failed") from None
        return self._files.add(self._tenant(), id, file.filename or id, "batch", time.time(), ttl_s).card()

    async def list_files(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        purpose = parse_qs(scope["query_string"].decode("latin-1")).get("purpose", [""])[-1]
        files = self._files.list(self._tenant(), time.time())
        cards = [file.card() for file in files if purpose in ("", file.purpose)]
        await self._reply(send, page(scope, cards, ignored=("purpose",)), headers)

    async def file(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        await self._reply(send, self._file(scope).card(), headers)

    async def content(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        file = self._file(scope)
        start = [(b"content-type", b"application/octet-stream"), (b"content-length", str(file.size).encode()), *headers]
        with self._files.path(file.id).open("rb") as stored:
            await send({"type": "http.response.start", "status": 200, "headers": start})
            while chunk := await asyncio.to_thread(stored.read, _CHUNK):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _file(self, scope: Scope) -> StoredFile:
        return self._files.get(self._tenant(), scope["path_params"]["id"], time.time())

    async def delete(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        id = scope["path_params"]["id"]
        self._files.delete(self._tenant(), id, time.time())
        await self._reply(send, {"id": id, "object": "file", "deleted": True}, headers)

    async def create(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        request = decode(BatchRequest, await read_body(scope, receive, self._max_body))
        if request.completion_window != "24h":
            raise invalid("completion_window", "must be 24h.")
        after = request.output_expires_after
        ttl_s = None if after is None else _ttl(after.anchor, after.seconds, "output_expires_after")
        file = self._files.get(self._tenant(), request.input_file_id, time.time(), param="input_file_id")
        card = self._batches.create(self._tenant(), file, request.endpoint, request.metadata, ttl_s)
        await self._reply(send, card, headers)

    async def list_batches(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        await self._reply(send, page(scope, self._batches.list(self._tenant())), headers)

    async def batch(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        await self._reply(send, self._batches.get(self._tenant(), scope["path_params"]["id"]), headers)

    async def cancel(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        await self._reply(send, self._batches.cancel(self._tenant(), scope["path_params"]["id"]), headers)


def _ttl_of_form(form: Mapping[str, Any]) -> float | None:
    anchor, seconds = (form.get(name) for name in _EXPIRES)
    if anchor is None and seconds is None:
        return None
    if not (isinstance(seconds, str) and seconds.isascii() and seconds.isdigit() and len(seconds) < 12):
        raise invalid("expires_after.seconds", "must be a number of seconds.")
    return _ttl(anchor, int(seconds), "expires_after")


def _ttl(anchor: Any, seconds: int, param: str) -> float:
    if anchor != "created_at":
        raise invalid(f"{param}.anchor", "must be created_at.")
    in_range(f"{param}.seconds", seconds, *_EXPIRY_S)
    return float(seconds)
