"""Runs batches: lines of a file go through the pipeline beside other requests, and yield to them when it is full."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

from flowinfer.errors import RequestError
from flowinfer.serve.asgi import Disconnected, Headers, Receive, Send
from flowinfer.serve.batch_store import ERRORS, OUTPUT, Batch, BatchStore
from flowinfer.serve.files import TTL_S, FileStore, StoredFile
from flowinfer.serve.openai import batch
from flowinfer.serve.openai.fields import invalid
from flowinfer.serve.openai.job import Job, Limits
from flowinfer.serve.state import State

log = logging.getLogger(__name__)
Run = Callable[[Job, Receive, Send, Headers], Awaitable[None]]
WINDOW_S = 24 * 3600
MAX_CONCURRENT = 32
RETRY_S = 1.0
MAX_DEATHS = 3  # of workers that held the same line: it may be what kills them
_LATER = ("overloaded", "service_unavailable", "worker_died")  # also a service that stops: its successor asks again
_STOPPABLE = ("validating", "in_progress")


class Batches:
    """Batches by id. run answers a job as for an HTTP client; enter makes the current task that client's."""

    def __init__(
        self, state: State, files: FileStore, limits: Limits, run: Run, enter: Callable[[str], object]
    ) -> None:
        self._state, self._files, self._limits = state, files, limits
        self._run, self._enter = run, enter
        self._store = BatchStore(state)
        self._tasks: dict[str, tuple[Batch, asyncio.Task[None]]] = {}
        self._room = asyncio.Semaphore(max(1, min(MAX_CONCURRENT, limits.max_requests // 4)))

    def create(
        self,
        tenant: str,
        file: StoredFile,
        endpoint: str,
        metadata: dict[str, str] | None,
        output_ttl_s: float | None = None,
    ) -> dict[str, Any]:
        """Starts a batch. Raises RequestError naming the field at fault."""
        if endpoint not in (batch.CHAT, batch.COMPLETIONS):
            raise invalid("endpoint", f"must be {batch.CHAT} or {batch.COMPLETIONS}, not {endpoint[:80]!r}.")
        now = time.time()
        card: dict[str, Any] = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": file.id,
            "completion_window": "24h",
            "status": "validating",
            "created_at": int(now),
            "expires_at": int(now) + WINDOW_S,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "output_file_id": None,
            "error_file_id": None,
            "output_expires_after": None if output_ttl_s is None else int(output_ttl_s),
            "metadata": metadata,
        }
        self._store.expire(now)
        self._keep_input(file, card["id"])
        made = self._store.add(tenant, card, now + TTL_S)
        self._start(made)
        return made.card

    def resume(self) -> None:
        """Goes on with what a predecessor left; to be called in the loop."""
        for left in self._store.unfinished():
            self._start(left)

    def get(self, tenant: str, id: str) -> dict[str, Any]:
        """The card of a batch. Raises RequestError 404 for what isn't there or is another tenant's."""
        running = self._tasks.get(id)
        return running[0].card if running and running[0].tenant == tenant else self._store.get(tenant, id).card

    def list(self, tenant: str) -> list[dict[str, Any]]:
        """Newest first."""
        return [self.get(tenant, card["id"]) for card in self._store.list(tenant)]

    def cancel(self, tenant: str, id: str) -> dict[str, Any]:
        """Stops a batch; what is answered already stays in its files. Raises RequestError 404, 409."""
        card = self.get(tenant, id)
        if card["status"] not in _STOPPABLE or id not in self._tasks:
            raise RequestError(409, f"Batch {id} is {card['status']}.", code="not_cancellable")
        made, task = self._tasks[id]
        made.card |= {"status": "cancelling", "cancelling_at": int(time.time())}
        self._store.save(made)
        task.cancel()
        return made.card

    # ---------------------------------------------------------------------------------------------------------- running

    def _start(self, made: Batch) -> None:
        task = asyncio.create_task(self._work(made))
        self._tasks[made.id] = made, task
        task.add_done_callback(lambda _: self._tasks.pop(made.id, None))

    async def _work(self, made: Batch) -> None:
        self._enter(made.tenant)
        status = "failed"
        try:
            if made.card["status"] == "cancelling":
                raise asyncio.CancelledError
            async with asyncio.timeout(made.card["expires_at"] - time.time()):
                if await self._validate(made):
                    await self._answer_all(made)
                    status = "completed"
        except TimeoutError:
            status = "expired"
        except asyncio.CancelledError:
            if made.card["status"] != "cancelling":
                raise  # the service ends; its successor goes on
            status = "cancelled"
        except Exception as error:
            code = error.code if isinstance(error, RequestError) else "server_error"
            self._blame(made, code, str(error))
            log.exception("batch %s failed", made.id)
        self._finish(made, status)

    async def _validate(self, made: Batch) -> bool:
        """Counts the lines, and those that are answered. False, with the reason in the card, where there is none."""
        done = self._store.answered(made)
        total = await asyncio.to_thread(lambda: sum(1 for _ in _lines(self._input(made.id))))
        num_failed = sum(kind == ERRORS for kind in done.values())
        counts = {"total": total, "completed": len(done) - num_failed, "failed": num_failed}
        made.card |= {"status": "in_progress", "in_progress_at": int(time.time()), "request_counts": counts}
        if not total:
            self._blame(made, "empty_file", "The input file has no lines.")
        self._store.save(made)
        return total > 0

    async def _answer_all(self, made: Batch) -> None:
        done, ids = self._store.answered(made), dict[str, int]()
        try:
            async with asyncio.TaskGroup() as group:
                for number, line in _lines(self._input(made.id)):
                    text = _unique(number, line, ids)
                    if number in done:
                        continue
                    await self._room.acquire()
                    task = group.create_task(self._line(made, number, text))
                    task.add_done_callback(lambda _: self._room.release())  # also of one that never began
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from None

    async def _line(self, made: Batch, number: int, text: bytes | RequestError) -> None:
        kind, answer = await self._answer(made, number, text)
        self._store.answer(made, number, kind, answer)
        made.card["request_counts"]["completed" if kind == OUTPUT else "failed"] += 1

    async def _answer(self, made: Batch, number: int, text: bytes | RequestError) -> tuple[str, bytes]:
        try:
            if isinstance(text, RequestError):
                raise text
            line = batch.read_line(text)
        except RequestError as error:
            return ERRORS, batch.unreadable(number, error)
        request_id = ""
        try:
            if line.url != made.card["endpoint"]:
                raise invalid("url", f"must be {made.card['endpoint']}, as the batch says.")
            job = batch.job_of(line, self._limits)
            request_id = job.id
            return OUTPUT, batch.answered(line.custom_id, job.id, await self._patiently(job))
        except RequestError as error:
            return ERRORS, batch.failure(line.custom_id, request_id, error)

    async def _patiently(self, job: Job) -> bytes:
        """The body of the answer; where the service is full, asks again later, behind those who wait for theirs."""
        num_deaths = 0
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
                num_deaths += error.code == "worker_died"
                if error.code not in _LATER or num_deaths > MAX_DEATHS:
                    raise
                await asyncio.sleep(max(RETRY_S, error.retry_after_s or 0.0))

    # -------------------------------------------------------------------------------------------------------- its end

    def _blame(self, made: Batch, code: str, message: str) -> None:
        fault = {"code": code, "message": message, "param": None, "line": None}
        made.card["errors"] = {"object": "list", "data": [fault]}

    def _finish(self, made: Batch, status: str) -> None:
        now = time.time()
        for kind, key in ((OUTPUT, "output_file_id"), (ERRORS, "error_file_id")):
            id, path = self._files.new_path()
            if self._store.write(made, kind, path):
                name, ttl_s = f"{made.id}_{kind}.jsonl", made.card["output_expires_after"]
                made.card[key] = self._files.add(made.tenant, id, name, "batch_output", now, ttl_s).id
        made.card |= {"status": status, f"{status}_at": int(now)}
        self._store.save(made, open=False)
        self._store.forget_lines(made)
        self._input(made.id).unlink(missing_ok=True)

    def _keep_input(self, file: StoredFile, id: str) -> None:
        """A name of its own for the lines: who deletes the file doesn't stop the batch."""
        try:
            os.link(self._files.path(file.id), self._input(id))
        except OSError:  # a file system without links
            shutil.copyfile(self._files.path(file.id), self._input(id))

    def _input(self, id: str) -> Path:
        return self._state.path(f"{id}.input")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that aren't blank, each with its number (from 1)."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _unique(number: int, line: bytes, ids: dict[str, int]) -> bytes | RequestError:
    """The line, or the error that an earlier one has its custom_id; ids are those so far."""
    try:
        id = batch.read_line(line).custom_id
    except RequestError:
        return line  # told when it is answered
    first = ids.setdefault(id, number)
    return line if first == number else invalid("custom_id", f"{id[:80]!r} is that of line {first}.")


async def _never_leaves() -> MutableMapping[str, Any]:
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}
