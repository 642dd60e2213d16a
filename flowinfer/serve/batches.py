"""Runs batches: lines of a file go through the pipeline beside other requests, and yield to them when it is full."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from flowinfer.errors import RequestError
from flowinfer.serve.asgi import Disconnected, Headers, Receive, Send
from flowinfer.serve.files import FileStore, StoredFile
from flowinfer.serve.openai import batch
from flowinfer.serve.openai.fields import invalid
from flowinfer.serve.openai.job import Job, Limits

Run = Callable[[Job, Receive, Send, Headers], Awaitable[None]]
WINDOW_S = 24 * 3600
MAX_CONCURRENT = 32
RETRY_S = 1.0


@dataclass
class Batch:
    """One batch of one tenant; card is what the API shows."""

    tenant: str
    card: dict[str, Any]
    task: asyncio.Task[None] | None = None
    lines: dict[str, list[bytes]] = field(default_factory=lambda: {"output": [], "errors": []})


class Batches:
    """Batches by id. run answers a job as for an HTTP client."""

    def __init__(self, files: FileStore, limits: Limits, run: Run) -> None:
        self._files, self._limits, self._run = files, limits, run
        self._batches: dict[str, Batch] = {}
        self._room = asyncio.Semaphore(max(1, min(MAX_CONCURRENT, limits.max_requests // 4)))

    def create(self, tenant: str, file: StoredFile, endpoint: str, metadata: dict[str, str] | None) -> dict[str, Any]:
        """Starts a batch. Raises RequestError naming the field at fault."""
        if endpoint not in (batch.CHAT, batch.COMPLETIONS):
            raise invalid("endpoint", f"must be {batch.CHAT} or {batch.COMPLETIONS}, not {endpoint[:80]!r}.")
        now = int(time.time())
        card: dict[str, Any] = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": endpoint,
            "input_file_id": file.id,
            "completion_window": "24h",
            "status": "in_progress",
            "created_at": now,
            "in_progress_at": now,
            "expires_at": now + WINDOW_S,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "output_file_id": None,
            "error_file_id": None,
            "metadata": metadata,
        }
        made = self._batches[card["id"]] = Batch(tenant, card)
        text = self._files.path(file.id).read_bytes()
        made.task = asyncio.create_task(self._work(made, text))
        return card

    def get(self, tenant: str, id: str) -> Batch:
        """Raises RequestError 404 for what isn't there or is another tenant's."""
        found = self._batches.get(id)
        if found is None or found.tenant != tenant:
            raise RequestError(404, f"There is no batch {id[:80]!r} here.", code="batch_not_found")
        return found

    def list(self, tenant: str) -> list[dict[str, Any]]:
        """Newest first."""
        return [found.card for found in reversed(self._batches.values()) if found.tenant == tenant]

    def cancel(self, tenant: str, id: str) -> dict[str, Any]:
        """Stops a batch; what is answered already stays in its files. Raises RequestError 404, 409."""
        found = self.get(tenant, id)
        if found.card["status"] != "in_progress" or found.task is None:
            raise RequestError(409, f"Batch {id} is {found.card['status']}.", code="not_cancellable")
        found.card |= {"status": "cancelling", "cancelling_at": int(time.time())}
        found.task.cancel()
        return found.card

    # ---------------------------------------------------------------------------------------------------------- running

    async def _work(self, made: Batch, text: bytes) -> None:
        status = "failed"
        try:
            async with asyncio.timeout(WINDOW_S), asyncio.TaskGroup() as group:
                for number, line in enumerate(text.splitlines(), 1):
                    if line.strip():
                        made.card["request_counts"]["total"] += 1
                        await self._room.acquire()
                        task = group.create_task(self._line(made, number, line))
                        task.add_done_callback(lambda _: self._room.release())  # also of one that never began
            status = "completed"
        except TimeoutError:
            status = "expired"
        except asyncio.CancelledError:
            status = "cancelled"
        finally:
            self._finish(made, status)

    async def _line(self, made: Batch, number: int, text: bytes) -> None:
        kind, line = await self._answer(made, number, text)
        made.lines[kind].append(line)
        made.card["request_counts"]["completed" if kind == "output" else "failed"] += 1

    async def _answer(self, made: Batch, number: int, text: bytes) -> tuple[str, bytes]:
        try:
            line = batch.read_line(text)
        except RequestError as error:
            return "errors", batch.unreadable(number, error)
        request_id = ""
        try:
            if line.url != made.card["endpoint"]:
                raise invalid("url", f"must be {made.card['endpoint']}, as the batch says.")
            job = batch.job_of(line, self._limits)
            request_id = job.id
            return "output", batch.answered(line.custom_id, job.id, await self._patiently(job))
        except RequestError as error:
            return "errors", batch.failure(line.custom_id, request_id, error)

    async def _patiently(self, job: Job) -> bytes:
        """The body of the answer; where the service is full, asks again later, behind those who wait for theirs."""
        while True:
            body = bytearray()

            async def collect(message: MutableMapping[str, Any], into: bytearray = body) -> None:
                into += message.get("body", b"")

            try:
                await self._run(job, _never_leaves, collect, [])
                return bytes(body)
            except Disconnected:
                raise RequestError(504, "The request took too long.", code="timeout") from None
            except RequestError as error:
                if error.status not in (429, 503) or error.retry_after_s is None:
                    raise
                await asyncio.sleep(max(RETRY_S, error.retry_after_s))

    def _finish(self, made: Batch, status: str) -> None:
        for kind, key in (("output", "output_file_id"), ("errors", "error_file_id")):
            if made.lines[kind]:
                id, path = self._files.new_path()
                path.write_bytes(b"".join(made.lines[kind]))
                name = f"{made.card['id']}_{kind}.jsonl"
                made.card[key] = self._files.add(made.tenant, id, name, "batch_output").id
        made.lines = {"output": [], "errors": []}
        made.card |= {"status": status, f"{status}_at": int(time.time())}


async def _never_leaves() -> MutableMapping[str, Any]:
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}
