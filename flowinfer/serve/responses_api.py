"""The endpoints of the Responses API: create, stream, retrieve, delete, cancel, and runs in the background."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from flowinfer.errors import RequestError
from flowinfer.serve.asgi import Disconnected, Headers, Receive, Scope, Send, read_body
from flowinfer.serve.openai.decode import decode
from flowinfer.serve.openai.fields import unsupported
from flowinfer.serve.openai.job import Job, Limits
from flowinfer.serve.openai.response_input import messages_of, messages_of_output
from flowinfer.serve.openai.response_store import ResponseStore
from flowinfer.serve.openai.responses import ResponsesRequest, response_job

Run = Callable[[Job, Receive, Send, Headers], Awaitable[None]]
Reply = Callable[[Send, Any, Headers], Awaitable[None]]


class ResponsesApi:
    """Over one store. run answers a job; tenant names the client of the current request."""

    def __init__(self, limits: Limits, max_body: int, run: Run, reply: Reply, tenant: Callable[[], str]) -> None:
        self._limits, self._max_body = limits, max_body
        self._run, self._reply, self._tenant = run, reply, tenant
        self._store = ResponseStore()
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def create(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        """POST /v1/responses."""
        request = decode(ResponsesRequest, await read_body(scope, receive, self._max_body))
        tenant, id = self._tenant(), f"resp_{uuid.uuid4().hex}"
        messages = self._history(tenant, request.previous_response_id) + messages_of(request.input)
        keep = request.store is not False

        def on_end(response: dict[str, Any]) -> None:
            if keep and (not request.background or (tenant, id) in self._running):
                self._store.put(tenant, response, messages, time.monotonic())

        job = response_job(request, id, self._limits, messages, on_end)
        if not request.background:
            await self._run(job, receive, send, headers)
            return
        queued = job.writer.response("queued")  # type: ignore[attr-defined]
        self._store.put(tenant, queued, messages, time.monotonic())
        task = asyncio.create_task(self._in_background(job, tenant, id, queued, messages))
        self._running[tenant, id] = task
        await self._reply(send, queued, headers)

    async def retrieve(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        """GET /v1/responses/{id}."""
        if b"stream=true" in scope["query_string"].lower():
            raise unsupported("stream", "is not supported when a response is retrieved")
        kept = self._store.get(self._tenant(), scope["path_params"]["id"], time.monotonic())
        await self._reply(send, kept.response, headers)

    async def delete(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        """DELETE /v1/responses/{id}; what still runs in the background ends."""
        tenant, id = self._tenant(), scope["path_params"]["id"]
        self._store.delete(tenant, id, time.monotonic())
        self._stop(tenant, id)
        await self._reply(send, {"id": id, "object": "response", "deleted": True}, headers)

    async def cancel(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        """POST /v1/responses/{id}/cancel, of a response that was made with background."""
        tenant, id = self._tenant(), scope["path_params"]["id"]
        kept = self._store.get(tenant, id, time.monotonic())
        if not kept.response["background"]:
            message = f"Response {id} wasn't made with background: close its connection to cancel it."
            raise RequestError(400, message, code="not_cancellable")
        if self._stop(tenant, id):
            response = kept.response | {"status": "cancelled"}
            self._store.put(tenant, response, kept.messages, time.monotonic())
        await self._reply(send, self._store.get(tenant, id, time.monotonic()).response, headers)

    def _history(self, tenant: str, previous: str | None) -> list[dict[str, Any]]:
        if previous is None:
            return []
        kept = self._store.get(tenant, previous, time.monotonic(), param="previous_response_id")
        if kept.response["status"] not in ("completed", "incomplete"):
            message = f"previous_response_id: response {previous} is {kept.response['status']}."
            raise RequestError(400, message, code="invalid_value", param="previous_response_id")
        return kept.messages + messages_of_output(kept.response["output"])

    def _stop(self, tenant: str, id: str) -> bool:
        task = self._running.pop((tenant, id), None)
        return task is not None and task.cancel()

    async def _in_background(
        self, job: Job, tenant: str, id: str, queued: dict[str, Any], messages: list[dict[str, Any]]
    ) -> None:
        try:
            await self._run(job, _never_leaves, _nowhere, [])
        except (RequestError, Disconnected) as error:
            if (tenant, id) in self._running:
                said = {"code": "server_error", "message": str(error) or "The request took too long."}
                self._store.put(tenant, queued | {"status": "failed", "error": said}, messages, time.monotonic())
        finally:
            self._running.pop((tenant, id), None)


async def _never_leaves() -> MutableMapping[str, Any]:
    """A client that waits for ever."""
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


async def _nowhere(message: MutableMapping[str, Any]) -> None:
    """The writer has given the response to the store."""
