"""The endpoints of the Responses API: create, stream, retrieve, delete, cancel, and runs in the background."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from flowinfer.errors import RequestError
from flowinfer.serve.asgi import SSE, Disconnected, Headers, Receive, Scope, Send, disconnection, read_body
from flowinfer.serve.openai.decode import decode
from flowinfer.serve.openai.event_log import EventLog
from flowinfer.serve.openai.fields import invalid, unsupported
from flowinfer.serve.openai.job import KEEP_ALIVE, Job, Limits
from flowinfer.serve.openai.response_input import items_of, messages_of
from flowinfer.serve.openai.response_store import ResponseStore
from flowinfer.serve.openai.responses import ResponseJob, ResponsesRequest, response_job
from flowinfer.serve.paging import page
from flowinfer.serve.traffic import classed

Run = Callable[[Job, Receive, Send, Headers], Awaitable[None]]
Reply = Callable[[Send, Any, Headers], Awaitable[None]]
Items = list[dict[str, Any]]
_OF_RETRIEVE = {"stream", "starting_after", "include", "include[]", "include_obfuscation"}


@dataclass
class Running:
    """A response that is made in the background. log: its stream, where it has one."""

    task: asyncio.Task[None] | None = None
    log: EventLog | None = None


class ResponsesApi:
    """Over one store. run answers a job; tenant names the client of the current request."""

    def __init__(
        self,
        limits: Limits,
        max_body: int,
        run: Run,
        reply: Reply,
        tenant: Callable[[], str],
        store: ResponseStore,
        keepalive_s: float,
    ) -> None:
        self._limits, self._max_body, self._keepalive_s = limits, max_body, keepalive_s
        self._run, self._reply, self._tenant = run, reply, tenant
        self._store = store
        self._running: dict[tuple[str, str], Running] = {}
        store.fail_unfinished("The service ended before this response did.")

    # ------------------------------------------------------------------------------------------------------ endpoints

    async def create(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        """POST /v1/responses."""
        request = decode(ResponsesRequest, await read_body(scope, receive, self._max_body))
        tenant, id = self._tenant(), f"resp_{uuid.uuid4().hex}"
        past = self._history(tenant, request.previous_response_id)
        messages = messages_of(past) + messages_of(request.input)
        items = past + items_of(request.input)
        keep = request.store is not False

        def on_end(response: dict[str, Any]) -> None:
            if keep and (not request.background or (tenant, id) in self._running):
                self._store.put(tenant, response, items, time.time())

        job = classed(response_job(request, id, self._limits, messages, on_end), scope)
        if not request.background:
            await self._run(job, receive, send, headers)
            return
        queued = job.writer.response("queued")
        self._store.put(tenant, queued, items, time.time())
        running = self._running[tenant, id] = Running(log=EventLog(job.writer.queued()) if job.stream else None)
        running.task = asyncio.create_task(self._in_background(job, tenant, items, running))
        if running.log is None:
            await self._reply(send, queued, headers)
        else:
            await self._follow(running.log, -1, receive, send, headers)

    async def retrieve(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        """GET /v1/responses/{id}; with stream=true, the events of one that was made in the background with a stream."""
        query, tenant, id = (
            parse_qs(scope["query_string"].decode("latin-1")),
            self._tenant(),
            scope["path_params"]["id"],
        )
        if unknown := query.keys() - _OF_RETRIEVE:
            raise invalid(min(unknown), "is not a parameter of this path.", "unknown_parameter")
        kept = self._store.get(tenant, id, time.time())
        if query.get("stream", ["false"])[0].lower() != "true":
            await self._reply(send, kept.response, headers)
            return
        running = self._running.get((tenant, id))
        log = running.log if running else EventLog(kept.events, ended=True) if kept.events is not None else None
        if log is None:
            raise unsupported("stream", "needs a response that was made with background and stream")
        after = query.get("starting_after", ["-1"])[0]
        if not after.removeprefix("-").isdecimal():
            raise invalid("starting_after", "must be the sequence_number of an event.")
        await self._follow(log, max(-1, int(after)), receive, send, headers)

    async def input_items(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        """GET /v1/responses/{id}/input_items: all of the conversation that led to the response, the latest first."""
        kept = self._store.get(self._tenant(), scope["path_params"]["id"], time.time())
        await self._reply(send, page(scope, kept.items[::-1], ignored=("include", "include[]")), headers)

    async def delete(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        """DELETE /v1/responses/{id}; what still runs in the background ends."""
        tenant, id = self._tenant(), scope["path_params"]["id"]
        self._store.delete(tenant, id, time.time())
        self._stop(tenant, id)
        await self._reply(send, {"id": id, "object": "response", "deleted": True}, headers)

    async def cancel(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        """POST /v1/responses/{id}/cancel, of a response that was made with background."""
        tenant, id = self._tenant(), scope["path_params"]["id"]
        kept = self._store.get(tenant, id, time.time())
        if not kept.response["background"]:
            message = f"Response {id} wasn't made with background: close its connection to cancel it."
            raise RequestError(400, message, code="not_cancellable")
        if (running := self._stop(tenant, id)) is not None:
            events = running.log.whole if running.log else None
            self._store.put(tenant, kept.response | {"status": "cancelled"}, kept.items, time.time(), events)
        await self._reply(send, self._store.get(tenant, id, time.time()).response, headers)

    # ---------------------------------------------------------------------------------------------------------- running

    def _history(self, tenant: str, previous: str | None) -> Items:
        if previous is None:
            return []
        kept = self._store.get(tenant, previous, time.time(), param="previous_response_id")
        if kept.response["status"] not in ("completed", "incomplete"):
            message = f"previous_response_id: response {previous} is {kept.response['status']}."
            raise RequestError(400, message, code="invalid_value", param="previous_response_id")
        output: Items = kept.response["output"]
        return kept.items + output

    def _stop(self, tenant: str, id: str) -> Running | None:
        """Ends what runs in the background; readers of its stream are told."""
        running = self._running.pop((tenant, id), None)
        if running is None or running.task is None or not running.task.cancel():
            return None
        if running.log is not None:
            running.log.add(_cancelled(len(running.log)))
            running.log.end()
        return running

    async def _in_background(self, job: ResponseJob, tenant: str, items: Items, running: Running) -> None:
        key = (tenant, job.id)
        try:
            await self._run(job, _never_leaves, running.log.send if running.log else _nowhere, [])
        except (RequestError, Disconnected) as failure:
            late = RequestError(504, "The request took too long.", code="timeout")
            ended = job.writer.failure(failure if isinstance(failure, RequestError) else late)  # and keeps it
            if running.log is not None:
                running.log.add(ended)
        finally:
            if self._running.pop(key, None) is not None and running.log is not None:
                running.log.end()
                kept = self._store.get(tenant, job.id, time.time())
                self._store.put(tenant, kept.response, items, time.time(), running.log.whole)

    async def _follow(self, log: EventLog, after: int, receive: Receive, send: Send, headers: Headers) -> None:
        """Sends a stream as it grows. A reader that goes away, or is slow, harms nobody: what it reads is kept."""
        reader = asyncio.current_task()
        assert reader is not None, "requests are tasks"
        watch = asyncio.create_task(disconnection(receive))
        watch.add_done_callback(lambda _: reader.cancel() if not watch.cancelled() else None)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [*SSE, *headers]})
            async with aclosing(log.read(after, self._keepalive_s)) as events:
                async for part in events:
                    await send({"type": "http.response.body", "body": part or KEEP_ALIVE, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except asyncio.CancelledError:
            if watch.done():
                raise Disconnected from None
            raise
        finally:
            watch.cancel()


def _cancelled(number: int) -> bytes:
    """The last event of a stream whose response was cancelled."""
    said = b'{"type":"error","code":"cancelled","message":"The response was cancelled.","param":null,"sequence_number":'
    return b"event: error\ndata: " + said + str(number).encode() + b"}\n\n"


async def _never_leaves() -> MutableMapping[str, Any]:
    """A client that waits for ever."""
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


async def _nowhere(message: MutableMapping[str, Any]) -> None:
    """The writer has given the response to the store."""
