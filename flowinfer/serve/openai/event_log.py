"""The stream of one response that is made in the background: written once, read by any number, from any event on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any


class EventLog:
    """Events in order, each numbered by its place. Lives in the HTTP loop."""

    def __init__(self, events: bytes = b"", *, ended: bool = False) -> None:
        self._events = _split(events)
        self._ended = ended
        self._news = asyncio.Event()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Takes what a client of the stream would get; signs of life are each reader's own affair."""
        if new := _split(message.get("body", b"")):
            self._events += new
            self._tell()

    def end(self) -> None:
        """Nothing more will come."""
        self._ended = True
        self._tell()

    def add(self, event: bytes) -> None:
        """Adds an event of the service's own."""
        self._events.append(event)
        self._tell()

    @property
    def whole(self) -> bytes:
        """All events so far."""
        return b"".join(self._events)

    def __len__(self) -> int:
        return len(self._events)

    async def read(self, after: int, keepalive_s: float) -> AsyncGenerator[bytes, None]:
        """Events behind number `after`; b"" where there was none for keepalive_s."""
        at = after + 1
        while True:
            if at < len(self._events):
                new, at = self._events[at:], len(self._events)
                yield b"".join(new)
            elif self._ended:
                return
            elif not await self._wait(keepalive_s):
                yield b""

    async def _wait(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def _split(data: bytes) -> list[bytes]:
    return [part + b"\n\n" for part in data.split(b"\n\n") if part and not part.startswith(b":")]
