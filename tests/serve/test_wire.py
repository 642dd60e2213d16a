"""What comes before a body: heads that are too large, too slow, or no HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from flowinfer.serve import wire


def spoken(service: Any, *parts: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of what the service says to these bytes before it closes."""
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except OSError:
            pass  # it has refused already
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


BIG = b"x" * (1 << 20)


@pytest.mark.parametrize(
    "parts",
    [
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx-big: " + BIG + b"\r\n\r\n",),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx-big: ", BIG),
        (b"GET /" + BIG + b" HTTP/1.1\r\nhost: x\r\n\r\n",),
        (b"GET /health HTTP/1.1\r\n", *[b"x-%d: y\r\n" % n for n in range(20_000)]),
    ],
    ids=["a header", "an endless header", "a path", "many headers"],
)
def test_a_head_that_is_too_large_is_431(service: Any, parts: tuple[bytes, ...]) -> None:
    status, error = spoken(service, *parts)
    assert (status, error["code"]) == (431, "headers_too_large")
    assert httpx.get(f"{service.url}/health").status_code == 200


def test_a_large_head_below_the_bound_and_a_large_body_pass(echoing: Any) -> None:
    with httpx.Client(base_url=echoing.url, headers={"x-long": "y" * 30_000}) as client:
        for _ in range(3):  # the bound is one of each request, not of the connection
            assert client.get("/health").status_code == 200
            ask = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 200_000}]}
            assert client.post("/v1/chat/completions", json=ask).status_code == 200


def test_a_head_in_many_parts_and_one_behind_a_body_are_counted_right(echoing: Any) -> None:
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x" * 100_000}]}).encode()
    first = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    long = [b"x-%d: %s\r\n" % (n, b"y" * 1000) for n in range(50)]
    host, port = echoing.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(first + body + b"GET /health HTTP/1.1\r\nhost: x\r\n")  # sent ahead, as pipelining does
        for part in long:
            connection.sendall(part)
        connection.sendall(b"connection: close\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_however_the_bytes_come_a_body_is_no_head(parts: int) -> None:
    """A request with a long body and the beginning of the next one, in parts of any size."""
    body = b"x" * 200_000
    data = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body + b"GET / HTTP/1.1\r\nhost: x"

    async def read() -> wire.Wire:
        async def app(*_: Any) -> None:
            await asyncio.sleep(0)

        config = uvicorn.Config(app)
        config.load()
        protocol = wire.Wire(config, ServerState(), {}, asyncio.get_running_loop())
        protocol.connection_made(MagicMock(spec=asyncio.Transport))
        size = -(-len(data) // parts)
        for start in range(0, len(data), size):
            protocol.data_received(data[start : start + size])
        for _ in range(3):
            await asyncio.sleep(0)  # the application has its turn
        protocol.connection_lost(None)
        return protocol

    assert not asyncio.run(read())._refused


def test_what_is_no_http_gets_an_error_to_read(service: Any) -> None:
    assert spoken(service, b"\x16\x03\x01 hello\r\n\r\n")[0] == 400


def test_a_head_that_never_ends_is_given_up(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HEAD_TIMEOUT_S", 0.05)
    host, port = service.url.removeprefix("http://").split(":")
    for begun in (b"", b"GET /health HTTP/1.1\r\nhost:"):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(begun)
            assert connection.recv(1) == b""
