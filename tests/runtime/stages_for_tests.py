"""Plain stages for the tests of the runtime; workers load them as "stages_for_tests:Name"."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np

from flowinfer.errors import RequestError
from flowinfer.message import Event, Failure, Prompt, Sampling, Serving, WorkerDown
from flowinfer.stage import Contract, Stage, StageConfig


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
