"""What HTTP costs a token: 64 streams of 200 tokens from a stage that costs nothing, against bare ASGI frames.

Run: python tests/bench/bench_http.py [streams] [tokens]. Both servers run in this process, one after the other, several
rounds; the client is a separate process that only reads. CPU is that of the serving process, all threads.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import uvicorn
import uvloop

from flowinfer.message import Call, Event, Finish, Piece, Serving, Text
from flowinfer.serve.gateway import Gateway, GatewayConfig

ROUNDS = 5
WORD = " token"
PROMPT = {"model": "none", "messages": [{"role": "user", "content": "hi"}], "stream": True}

CLIENT = """
import selectors, socket, sys
port, streams, body = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()
ask = b"POST /v1/chat/completions HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\n"
ask += b"content-length: %d\\r\\n\\r\\n" % len(body) + body
selector, frames = selectors.DefaultSelector(), 0
for _ in range(streams):
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(ask)
    selector.register(connection, selectors.EVENT_READ)
left = streams
while left:
    for key, _ in selector.select():
        data = key.fileobj.recv(1 << 16)
        frames += data.count(b'"content":" token"')
        if not data:
            selector.unregister(key.fileobj)
            left -= 1
print(frames)
"""


class FreeContext:
    """A worker for one stage whose pipeline answers each open request with one token a step, at no cost."""

    stage, worker, generation, device, threads, clock = "api", "front.0", 1, "cpu", 1, None

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.clock = self
        self.woken = threading.Event()
        self.events: deque[Event] = deque()

    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    def wake(self) -> None:
        self.woken.set()

    def full(self, output: str) -> bool:
        return False

    def send(self, event: Event, to: str | None = None) -> None:
        self.events.append(event)

    def call_at(self, when: float, fn: Callable[[], Any], *, request: str = "") -> None:
        """Deadlines don't come up in a benchmark."""


def serve_flowinfer(listener: socket.socket, tokens: int, step_s: float) -> Callable[[], None]:
    """Starts the gateway with its free stage; returns what stops it."""
    ctx = FreeContext(listener)
    config = GatewayConfig(models=("none",), max_requests=10_000)
    gateway = Gateway(config, ctx)
    gateway.open()
    gateway.observe(Serving())
    running = True
    finish = Finish(reason="length", prompt_tokens=1, completion_tokens=tokens)

    def loop() -> None:
        left: dict[str, int] = {}
        while running:
            pieces = []
            for id in list(left):
                left[id] -= 1
                pieces.append(Piece(id=id, text=WORD, tokens=[1], finish=None if left[id] else finish))
                if not left[id]:
                    del left[id]
            calls: Iterable[Call] = gateway.step([Text(step=0, pieces=pieces)] if pieces else [])
            left.update({call.id: tokens for call in calls})
            if left:
                time.sleep(step_s)
            else:
                ctx.woken.wait(0.1)
                ctx.woken.clear()

    thread = threading.Thread(target=loop)
    thread.start()

    def stop() -> None:
        nonlocal running
        running = False
        thread.join()
        gateway.close()

    return stop


def serve_bare(listener: socket.socket, tokens: int, step_s: float) -> Callable[[], None]:
    """Starts an ASGI app that sends the same frames, ready made, a frame a stream a step."""
    choice = {"index": 0, "delta": {"content": WORD}, "logprobs": None, "finish_reason": None}
    head = {"id": "chatcmpl-" + "0" * 32, "created": 1_800_000_000, "model": "none"}
    frame = (
        b"data: "
        + json.dumps(head | {"object": "chat.completion.chunk", "choices": [choice]}, separators=(",", ":")).encode()
    )
    body = {"type": "http.response.body", "body": frame + b"\n\n", "more_body": True}
    loop = uvloop.new_event_loop()
    waiting: list[asyncio.Future[None]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(tokens):
            turn = loop.create_future()
            waiting.append(turn)
            await turn
            await send(body)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def turn_all() -> None:
        turns, waiting[:] = list(waiting), []
        for turn in turns:
            turn.set_result(None)

    config = uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve(sockets=[listener])))
    thread.start()
    running = True

    def pace() -> None:
        while running:
            time.sleep(step_s)
            loop.call_soon_threadsafe(turn_all)

    pacer = threading.Thread(target=pace)
    pacer.start()

    def stop() -> None:
        nonlocal running
        running = False
        pacer.join()
        server.should_exit = True
        thread.join()
        loop.close()

    return stop


def measure(
    serve: Callable[[socket.socket, int, float], Callable[[], None]], streams: int, tokens: int
) -> tuple[float, float]:
    """Tokens a second, and microseconds of CPU a token."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    stop = serve(listener, tokens, 0.0005)
    cpu, start = time.process_time(), time.perf_counter()
    command = [sys.executable, "-c", CLIENT, str(port), str(streams), json.dumps(PROMPT)]
    frames = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    stop()
    assert frames == streams * tokens, f"{frames} frames of {streams * tokens}"
    return frames / seconds, cpu / frames * 1e6


def main(streams: int = 64, tokens: int = 200) -> None:
    """Prints medians over the rounds, and the ratio of CPU per token."""
    results: dict[str, list[tuple[float, float]]] = {"bare": [], "flowinfer": []}
    for _ in range(ROUNDS):
        results["bare"].append(measure(serve_bare, streams, tokens))
        results["flowinfer"].append(measure(serve_flowinfer, streams, tokens))
    print(f"{streams} streams of {tokens} tokens, median of {ROUNDS} rounds")
    print(f"{'server':<12}{'tokens/s':>12}{'CPU us/token':>14}")
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in results.items()
    }
    for name, (rate, cpu) in medians.items():
        print(f"{name:<12}{rate:>12,.0f}{cpu:>14.1f}")
    print(f"CPU a token, flowinfer over bare: {medians['flowinfer'][1] / medians['bare'][1]:.2f}x")


if __name__ == "__main__":
    main(*(int(arg) for arg in sys.argv[1:]))
