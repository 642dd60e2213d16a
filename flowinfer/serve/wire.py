"""uvicorn's HTTP/1.1 with bounds on what comes before a body: how large a head may be, and how long it may take."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from flowinfer.errors import RequestError
from flowinfer.serve.asgi import error_body

MAX_HEAD = 64 * 2**10  # bytes of request line and headers together; common proxies stop at 32 KiB or less
HEAD_TIMEOUT_S = 60.0  # from a connection's or a request's first byte to the end of its head
LINGER_S = 2.0  # after a refusal, for the client to read it: closing on bytes that wait would take it from its hands
_STATUS = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


class TooLarge(Exception):
    """A head beyond MAX_HEAD; stops the parser."""


class Wire(HttpToolsProtocol):
    """One connection."""

    _head_bytes = 0  # of the request line and the headers that are complete
    _raw_bytes = 0  # that came since the head began, in parts that hold nothing else
    _in_head = True
    _left_head = False  # a head has ended in the part that was read last
    _refused = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        only_head, self._left_head = self._in_head, False
        super().data_received(data)
        # A header that isn't complete is told by no callback. Behind another request's head it isn't counted yet.
        if only_head and self._in_head and not self._left_head and not self._refused:
            self._raw_bytes += len(data)
            if self._too_large:
                self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes, self._raw_bytes = True, 0, 0
        if self._timer is None:
            self._arm()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._left_head = False, True
        self._disarm()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuses what can't be read, or is too large, in the shape of the API; in mid-answer by closing alone."""
        self._refused = True
        self._disarm()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        self.transport.write(_refusal(too_large=self._too_large))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._too_large:
            raise TooLarge

    @property
    def _too_large(self) -> bool:
        """Raw, a head may be twice as long: each header costs four bytes beside its name and value."""
        return self._head_bytes > MAX_HEAD or self._raw_bytes > 2 * MAX_HEAD

    def _arm(self) -> None:
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._expire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def _refusal(*, too_large: bool) -> bytes:
    error = RequestError(400, "This isn't HTTP that can be read.", code="invalid_http")
    if too_large:
        text = f"The request line and headers are larger than {MAX_HEAD} bytes."
        error = RequestError(431, text, code="headers_too_large")
    body = error_body(error)
    head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (error.status, _STATUS[error.status], len(body)) + body
