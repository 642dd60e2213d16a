"""A gateway on a real port with a pipeline that the test plays by hand: it sees each Call and says each piece."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import openai
import pytest

from flowinfer.message import Call, Event, Finish, Message, Opened, Piece, ReplyFormat, Serving, Text
from flowinfer.serve.gateway import Gateway, GatewayConfig
from flowinfer.text.reply import Delta, open_parser

WAIT_S = 10.0
Auto = Callable[[Call], Iterable[Piece | Event]]


class FakeClock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time


class FakeContext:
    """The worker's side of a stage, in one thread; events that the stage sends are kept in order."""

    stage, worker, generation, device, threads = "api", "front.0", 1, "cpu", 1

    def __init__(self, listener: socket.socket | None) -> None:
        self.listener = listener
        self.clock = FakeClock()
        self.sent: list[Event] = []
        self.news = threading.Condition()
        self.woken = threading.Event()
        self.is_full = False
        self.timers: list[tuple[float, Callable[[], Any]]] = []

    def wake(self) -> None:
        self.woken.set()

    def full(self, output: str) -> bool:
        return self.is_full

    def send(self, event: Event, to: str | None = None) -> None:
        with self.news:
            self.sent.append(event)
            self.news.notify_all()

    def call_at(self, when: float, fn: Callable[[], Any], *, request: str = "") -> None:
        self.timers.append((when, fn))


class Service:
    """The gateway's worker loop in a thread. Without `auto`, calls wait in `calls` for the test to answer."""

    def __init__(self, config: GatewayConfig, auto: Auto | None, listener: socket.socket | None) -> None:
        self.ctx = FakeContext(listener)
        self.gateway = Gateway(config, self.ctx)
        self.calls: queue.Queue[Call] = queue.Queue()
        self.auto = auto
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}" if listener else ""
        self._inbox: deque[Piece | Event | Callable[[], None]] = deque()
        self._running = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.gateway.open()
        self._thread.start()
        self.put(Serving())
        self.settle()

    def say(self, id: str, text: str = "", *, finish: str | None = None, **more: Any) -> None:
        """A piece of this request; with finish, its last."""
        tokens = more.pop("tokens", [7] if text else [])
        last = Finish(reason=finish, **more.pop("usage", {})) if finish else None
        self.put(Piece(id=id, text=text, tokens=tokens, finish=last, **more))

    def put(self, item: Piece | Event | Callable[[], None]) -> None:
        self._inbox.append(item)
        self.ctx.wake()

    def advance(self, seconds: float) -> None:
        """Moves the clock and fires what was due."""

        def fire() -> None:
            self.ctx.clock.time += seconds
            due = [t for t in self.ctx.timers if t[0] <= self.ctx.clock.time]
            self.ctx.timers = [t for t in self.ctx.timers if t not in due]
            for _, fn in due:
                fn()

        self.put(fire)

    def next_call(self) -> Call:
        return self.calls.get(timeout=WAIT_S)

    def wait_sent(self, kind: type[Event], id: str) -> None:
        """Returns once an event of this kind naming the request was sent to the workers."""
        with self.ctx.news:
            assert self.ctx.news.wait_for(lambda: self.was_sent(kind, id), WAIT_S), f"no {kind.__name__} for {id}"

    def was_sent(self, kind: type[Event], id: str) -> bool:
        return any(isinstance(event, kind) and id in event.ids for event in self.ctx.sent)  # type: ignore[attr-defined]

    def wait_idle(self) -> None:
        """Returns once no request is open."""
        deadline = time.monotonic() + WAIT_S
        while self.gateway.num_open and time.monotonic() < deadline:
            self.settle()
        assert not self.gateway.num_open

    def settle(self) -> None:
        """Returns once the loop has done all that was put before."""
        for _ in range(2):  # a turn takes what was put, and only then steps: the second time, it has
            done = threading.Event()
            self.put(done.set)
            assert done.wait(WAIT_S)

    def close(self) -> None:
        self.put(self._stop)
        self._thread.join(WAIT_S)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S, **options)

    def _stop(self) -> None:
        self._running = False

    def _run(self) -> None:
        while self._running:
            self.ctx.woken.wait()
            self.ctx.woken.clear()
            while self._inbox or self.gateway.busy:
                self._turn()
        self.gateway.close()

    def _turn(self) -> None:
        pieces = []
        for _ in range(len(self._inbox)):
            item = self._inbox.popleft()
            if isinstance(item, Piece):
                pieces.append(item)
            elif isinstance(item, Event):
                self._route(self.gateway.observe(item) or ())
            else:
                item()
        self._route(self.gateway.step([Text(step=0, pieces=pieces)] if pieces else []))

    def _route(self, messages: Iterable[Message]) -> None:
        for call in messages:
            assert isinstance(call, Call)
            if self.auto is None:
                self.calls.put(call)
            else:
                self._inbox.extend(self.auto(call))


def echo(call: Call) -> Iterator[Piece]:
    """Answers with the last message or the prompt, a word a piece."""
    text = call.messages[-1]["content"] if call.messages else str(call.prompt)
    words = [word + " " for word in text.split(" ")] or [""]
    for word in words:
        yield Piece(id=call.id, text=word, tokens=[1])
    usage = Finish(reason="stop", prompt_tokens=3, completion_tokens=len(words), cached_tokens=2)
    yield Piece(id=call.id, finish=usage)


def scripted(answer: str, form: ReplyFormat, finish: Finish) -> Auto:
    """A pipeline that says `answer`, four characters a piece, taken apart as detokenize does."""

    def play(call: Call) -> Iterator[Piece]:
        parser = open_parser(form, call_prefix=call.id)
        opened = Opened(prompt_tokens=finish.prompt_tokens, cached_tokens=finish.cached_tokens, stored_tokens=3)
        yield Piece(id=call.id, opened=opened)
        for start in range(0, len(answer) + 1, 4):
            parser.push(answer[start : start + 4])
            yield _piece(call.id, parser.delta)
        parser.finish()
        yield _piece(call.id, parser.delta)
        yield Piece(id=call.id, finish=finish)

    return play


def _piece(id: str, delta: Delta) -> Piece:
    text, reasoning, calls = "".join(delta.text), "".join(delta.reasoning), delta.calls
    delta.clear()
    return Piece(id=id, text=text, reasoning=reasoning, calls=calls, tokens=[1])


@pytest.fixture
def play() -> Callable[..., Auto]:
    """play(answer, finish=…, tools=…): a pipeline that says this answer."""

    def make(answer: str, *, finish: Finish | None = None, tools: str = "hermes") -> Auto:
        end = finish or Finish(reason="stop", prompt_tokens=9, completion_tokens=5, cached_tokens=4, reasoning_tokens=2)
        return scripted(answer, ReplyFormat(reasoning="think", tools=tools), end)

    return make


@pytest.fixture
def start() -> Iterator[Callable[..., Service]]:
    """Starts services on a port of their own: start(auto=None, **settings)."""
    services: list[Service] = []

    def make(auto: Auto | None = None, **settings: Any) -> Service:
        services.append(Service(config_of(settings), auto, socket.create_server(("127.0.0.1", 0))))
        return services[-1]

    yield make
    for service in services:
        service.close()


@pytest.fixture
def start_plain() -> Iterator[Callable[..., Service]]:
    """Starts services without HTTP."""
    services: list[Service] = []

    def make(auto: Auto | None = None, **settings: Any) -> Service:
        services.append(Service(config_of(settings), auto, None))
        return services[-1]

    yield make
    for service in services:
        service.close()


def config_of(settings: dict[str, Any]) -> GatewayConfig:
    return GatewayConfig.model_validate({"models": ("tiny",), **settings})


@pytest.fixture
def service(start: Callable[..., Service]) -> Service:
    """A service whose pipeline the test plays."""
    return start()


@pytest.fixture
def echoing(start: Callable[..., Service]) -> Service:
    """A service that echoes."""
    return start(echo)
