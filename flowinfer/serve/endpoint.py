"""Runs one API request over ASGI: submits its calls, streams or gathers the answer, cancels when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from flowinfer.errors import RequestError
from flowinfer.message import Piece
from flowinfer.serve.asgi import JSON, SSE, Disconnected, Headers, Receive, Send, disconnection, respond
from flowinfer.serve.mailbox import Mailbox, joined
from flowinfer.serve.openai.job import Job


class Front(Protocol):
    """What an endpoint needs of the service."""

    def submit(self, job: Job, mailbox: Mailbox) -> None: ...

    def cancel(self, job: Job) -> None: ...


class Answer:
    """The way of one job from submission to the last byte."""

    def __init__(self, front: Front, job: Job, *, buffer: int, keepalive_s: float, patience_s: float) -> None:
        self._front = front
        self._job = job
        self._keepalive_s = keepalive_s
        self._patience_s = patience_s
        self._indices = {call.id: index for index, call in enumerate(job.calls)}
        self._mailbox = Mailbox(len(job.calls), buffer, whole=not job.stream)
        self._last: dict[int, Piece] = {}

    async def send(self, receive: Receive, send: Send, headers: Headers) -> None:
        """Answers. Raises RequestError before the first byte, Disconnected when nobody reads (any more)."""
        try:
            async with asyncio.timeout(self._patience_s), self._open(receive):
                if self._job.stream:
                    await self._stream(send, headers)
                else:
                    await self._gather(send, headers)
        except TimeoutError:
            raise Disconnected from None

    @asynccontextmanager
    async def _open(self, receive: Receive) -> AsyncIterator[None]:
        watch = asyncio.create_task(disconnection(receive))
        watch.add_done_callback(lambda _: self._mailbox.leave())
        ticker = _Ticker(self._mailbox.tick, self._keepalive_s) if self._job.stream else None
        self._front.submit(self._job, self._mailbox)
        try:
            yield
        finally:
            watch.cancel()
            if ticker is not None:
                ticker.stop()
            if not self._mailbox.closed:
                self._front.cancel(self._job)

    async def _gather(self, send: Send, headers: Headers) -> None:
        by_index: dict[int, list[Piece]] = {index: [] for index in self._indices.values()}
        while self._unfinished:
            if (pieces := self._take()) is None:
                await self._mailbox.news()
                continue
            for piece in pieces:
                by_index[self._indices[piece.id]].append(piece)
        body = self._job.writer.whole([joined(by_index[index]) for index in range(len(by_index))])
        await respond(send, 200, body, [JSON, *headers])

    async def _stream(self, send: Send, headers: Headers) -> None:
        while (pieces := self._take()) is None:  # before the status line: an early failure has a status of its own
            await self._mailbox.news()
        await send({"type": "http.response.start", "status": 200, "headers": [*SSE, *headers]})
        out = self._job.writer.opening()
        try:
            while True:
                out += self._events(pieces)
                if not self._unfinished:
                    break
                if out or not pieces:
                    await send(
                        {"type": "http.response.body", "body": out or self._job.writer.idle(), "more_body": True}
                    )
                    out = b""
                while (pieces := self._take()) is None:
                    await self._mailbox.news()
        except RequestError as error:  # the status line is long gone: the stream says it
            await send({"type": "http.response.body", "body": out + self._job.writer.failure(error)})
            return
        out += self._job.writer.closing([self._last[index] for index in range(len(self._last))])
        await send({"type": "http.response.body", "body": out})

    @property
    def _unfinished(self) -> bool:
        return len(self._last) < len(self._indices)

    def _take(self) -> list[Piece] | None:
        pieces = self._mailbox.take()
        for piece in pieces or ():
            if piece.finish is not None:
                self._last[self._indices[piece.id]] = piece
        return pieces

    def _events(self, pieces: list[Piece]) -> bytes:
        indices, event = self._indices, self._job.writer.event
        if len(pieces) == 1:
            return event(indices[pieces[0].id], pieces[0])
        return b"".join([event(indices[piece.id], piece) for piece in pieces])


class _Ticker:
    """Calls `tick` every interval until stopped."""

    def __init__(self, tick: Callable[[], None], interval_s: float) -> None:
        self._tick = tick
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(interval_s, self._fire)

    def stop(self) -> None:
        self._handle.cancel()

    def _fire(self) -> None:
        self._tick()
        self._handle = self._loop.call_later(self._interval_s, self._fire)
