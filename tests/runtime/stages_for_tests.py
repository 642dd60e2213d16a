"""Plain stages for the tests of the runtime; workers load them as "stages_for_tests:Name"."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np

from flowinfer.errors import RequestError
from flowinfer.message import (
    Call,
    Drain,
    Ended,
    Event,
    Failure,
    Moved,
    Piece,
    Prompt,
    Sampling,
    Serving,
    Text,
    WorkerDown,
)
from flowinfer.observe import metrics
from flowinfer.stage import Contract, Stage, StageConfig, setting


class Note(StageConfig):
    file: str = ""


def write(path: str, line: str) -> None:
    """Appends a line at once: tests read the file from another process."""
    with Path(path).open("a") as file:
        file.write(line + "\n")


class Source(Stage):
    """Gives `count` prompts as fast as it may; keeps fewer than 64 in hand."""

    class Config(StageConfig):
        count: int = 10
        file: str = ""
        tokens: int = 8

    listens = (Serving, Failure, WorkerDown)

    def open(self) -> None:
        self.sent = 0
        self.serving = False

    @property
    def busy(self) -> bool:
        return self.serving and self.sent < self.config.count

    def observe(self, event: Event) -> None:
        if isinstance(event, Serving):
            self.serving = True
        elif isinstance(event, Failure):
            write(self.config.file, f"failure {event.id} {event.status} {event.code}")
        elif isinstance(event, WorkerDown):
            write(self.config.file, f"down {event.worker} {event.generation}")

    def step(self) -> Iterable[Prompt]:
        for _ in range(min(64, self.config.count - self.sent)):
            self.sent += 1
            tokens = np.full(self.config.tokens, self.sent, np.int32)
            yield Prompt(id=f"r{self.sent}", tokens=tokens, sampling=Sampling())


class Relay(Stage):
    """Passes prompts on."""

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]:
        return prompts


class LateWriter(Stage):
    """Needs `seconds` to close, of which it speaks or not."""

    class Config(StageConfig):
        file: str = ""
        seconds: float = 0.0
        speaks: bool = True

    def step(self, prompts: list[Prompt]) -> None:
        return None

    def close(self) -> None:
        since = self.ctx.clock.now()
        while (now := self.ctx.clock.now()) < since + self.config.seconds:
            if self.config.speaks and not self.ctx.still_closing("writes its notes", since):
                write(self.config.file, "gave up")
                return
            time.sleep(min(0.05, since + self.config.seconds - now))
        write(self.config.file, "all written")


class Sink(Stage):
    """Writes the id and the sum of the tokens of each prompt to a file."""

    Config = Note

    def open(self) -> None:
        write(self.config.file, f"pid {os.getpid()}")

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]:
        with Path(self.config.file).open("a") as file:
            file.writelines(f"got {prompt.id} {int(prompt.tokens.sum())}\n" for prompt in prompts)
        return ()


class Broken(Stage):
    """Can't open."""

    def open(self) -> None:
        raise FileNotFoundError("there is no such model here")

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]:
        return prompts


class Keeper(Stage):
    """Holds prompts; gives each back when `release` is called."""

    class Config(StageConfig):
        unit: str = "messages"

        def contract(self) -> Contract:
            return Contract(held=frozenset({"prompts"}))

    def open(self) -> None:
        self.kept: dict[str, Prompt] = {}
        self.cancelled: list[str] = []

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]:
        self.kept.update((prompt.id, prompt) for prompt in prompts)
        return ()

    def release(self, request: str) -> None:
        del self.kept[request]
        self.ctx.give_back("prompts", request)

    def cancel(self, requests: Collection[str]) -> None:
        for request in requests:
            if self.kept.pop(request, None):
                self.cancelled.append(request)
                self.ctx.give_back("prompts", request)


class Picky(Stage):
    """Breaks on prompts whose id begins with x; refuses those that begin with y."""

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]:
        for prompt in prompts:
            if prompt.id.startswith("x"):
                raise RuntimeError("that can't be")
            if prompt.id.startswith("y"):
                self.ctx.fail(prompt.id, RequestError(400, "not you", code="no"))
            else:
                yield prompt


class Door(Stage):
    """Stands in for the gateway: keeps `open` calls open until it is told to drain; writes what becomes of them."""

    class Config(StageConfig):
        file: str
        open: int = 8
        calls: int = 1_000_000_000

    listens = (Serving, Drain, Failure, WorkerDown, Moved)

    def open(self) -> None:
        self.waiting: dict[str, float] = {}
        self.held: dict[str, tuple[str, int]] = {}  # by request: the worker that has it, and its generation
        self.dead: dict[str, int] = {}
        self.made = 0
        self.admits = False

    @property
    def busy(self) -> bool:
        more = self.admits and self.made < self.config.calls
        return more and len(self.waiting) < self.config.open and not self.ctx.full("call")

    def observe(self, event: Event) -> None:
        if isinstance(event, Serving):
            self.admits = True
        elif isinstance(event, Drain):
            self.admits = False
            write(self.config.file, "drain")
        elif isinstance(event, WorkerDown):
            write(self.config.file, f"down {event.worker} {event.generation}")
            self.dead[event.worker] = event.generation
            self._fail_lost()
        elif isinstance(event, Moved):
            self.held |= dict.fromkeys(self.waiting.keys() & set(event.ids), (event.worker, event.generation))
            self._fail_lost()
        elif isinstance(event, Failure):
            self._fail(event.id, event.status, event.code)

    def _fail_lost(self) -> None:
        """Ends what died with a worker, as the gateway's ledger does."""
        for request, (worker, generation) in list(self.held.items()):
            if generation <= self.dead.get(worker, 0):
                self._fail(request, 503, "worker_died")

    def _fail(self, request: str, status: int, code: str) -> None:
        if request in self.waiting:
            write(self.config.file, f"failed {request} {status} {code}")
            metrics.counter("requests_failed_total").labels(code=code).inc()
            self._end(request)

    def step(self, texts: list[Text]) -> Iterable[Call]:
        for piece in (piece for text in texts for piece in text.pieces):
            if piece.id in self.waiting:
                write(self.config.file, f"answered {piece.id}")
                metrics.histogram("time_to_first_token_seconds").observe(self.ctx.clock.now() - self.waiting[piece.id])
                metrics.counter("requests_finished_total").labels(reason="stop").inc()
                self._end(piece.id)
        while self.busy:
            self.made += 1
            request = f"{self.ctx.generation}-{self.made}"
            self.waiting[request] = self.ctx.clock.now()
            write(self.config.file, f"made {request}")
            yield Call(id=request, sampling=Sampling(), prompt="x" * 100)

    def _end(self, request: str) -> None:
        self.waiting.pop(request, None)
        self.held.pop(request, None)
        self.ctx.send(Ended(ids=[request]))

    def close(self) -> None:
        write(self.config.file, f"closed {len(self.waiting)}")


class CallRelay(Stage):
    """Passes calls on."""

    def step(self, calls: list[Call]) -> Iterable[Call]:
        return calls


class Talker(CallRelay):
    """Passes calls on, and logs when it begins."""

    def open(self) -> None:
        logging.getLogger(__name__).warning("relay begins")


class Answerer(Stage):
    """Answers calls, once the file `gate` is there, if one is named."""

    class Config(StageConfig):
        gate: str = ""

    def open(self) -> None:
        self.kept: list[Call] = []

    def step(self, calls: list[Call]) -> Iterable[Text]:
        self.kept += calls
        if self.config.gate and not Path(self.config.gate).exists():
            self.ctx.call_at(self.ctx.clock.now() + 0.05, self._answer)
            return ()
        return self._answer()

    def _answer(self) -> Iterable[Text]:
        if self.config.gate and not Path(self.config.gate).exists():
            self.ctx.call_at(self.ctx.clock.now() + 0.05, self._answer)
            return []
        calls, self.kept = self.kept, []
        return [Text(step=1, pieces=[Piece(id=call.id, text="ok") for call in calls])] if calls else []


class Dying(Stage):
    """Is killed while it opens."""

    def open(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]:
        return prompts


class SlowSink(Sink):
    """Takes as many messages a second as it is told to, by holding each until its time."""

    class Config(StageConfig):
        file: str = ""
        messages_per_s: float = 100.0

        def contract(self) -> Contract:
            return Contract(held=frozenset({"prompts"}))

    def open(self) -> None:
        self.next_at = self.ctx.clock.now()

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]:
        for prompt in prompts:
            self.next_at = max(self.next_at, self.ctx.clock.now()) + 1 / self.config.messages_per_s
            self.ctx.call_at(self.next_at, lambda prompt=prompt: self._take(prompt))  # type: ignore[misc]
        return ()

    def _take(self, prompt: Prompt) -> None:
        write(self.config.file, f"got {prompt.id} {int(prompt.tokens.sum())}")
        self.ctx.give_back("prompts", prompt.id)


class LateAnswerer(Stage):
    """Answers each call after a delay, in two pieces; knows only the calls that it got itself."""

    class Config(StageConfig):
        delay: float = setting(0.01, change="live")
        broken: bool = False

    def open(self) -> None:
        self.delay = self.config.delay
        self.calls: dict[str, Call] = {}

    def reconfigure(self, config: Config) -> None:
        self.delay = config.delay

    def step(self, calls: list[Call]) -> Iterable[Text]:
        if self.config.broken:
            raise RuntimeError("that can't be")
        for call in calls:
            self.calls[call.id] = call
            self.ctx.call_at(self.ctx.clock.now() + self.delay, lambda id=call.id: self._answer(id))  # type: ignore[misc]
        return ()

    def _answer(self, request: str) -> Iterable[Text]:
        if self.calls.pop(request, None) is None:
            return []
        return [Text(step=1, pieces=[Piece(id=request, text="ok")])]

    def cancel(self, requests: Collection[str]) -> None:
        for request in requests:
            self.calls.pop(request, None)


class NotedAnswerer(LateAnswerer):
    """Writes when it opens and closes."""

    class Config(LateAnswerer.Config):
        file: str = ""
        version: int = 1

    def open(self) -> None:
        write(self.config.file, f"opens {self.config.version}")
        super().open()

    def close(self) -> None:
        write(self.config.file, f"closes {self.config.version}")


class BrokenAnswerer(LateAnswerer):
    """Can't open."""

    def open(self) -> None:
        raise FileNotFoundError("there is no such model here")


class HoldingAnswerer(LateAnswerer):
    """Gives credit back only with the answer, so that it can't stand beside itself in one worker."""

    class Config(LateAnswerer.Config):
        def contract(self) -> Contract:
            return Contract(held=frozenset({"calls"}))

    def _answer(self, request: str) -> Iterable[Text]:
        self.ctx.give_back("calls", request)
        return super()._answer(request)

    def cancel(self, requests: Collection[str]) -> None:
        for request in set(requests) & self.calls.keys():
            self.ctx.give_back("calls", request)
        super().cancel(requests)
