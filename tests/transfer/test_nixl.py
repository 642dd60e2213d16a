"""KV by NIXL between two processes of this machine, where it is installed (pip install 'flowinfer[nixl]')."""

from __future__ import annotations

import base64
import importlib.util
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowinfer.transfer.transport import Push, Stopped, Written

if importlib.util.find_spec("nixl") is None:
    pytest.skip("NIXL isn't installed (pip install 'flowinfer[nixl]')", allow_module_level=True)

import nixl_taker

from flowinfer.transfer import nixl

HERE = Path(__file__).parent
PATIENCE_S = 60.0


class Taker:
    """The other process."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        command = [sys.executable, str(HERE / "nixl_taker.py"), str(generation)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **pipes)

    def ask(self, what: str, **more: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"ask": what, **more}) + "\n")
        self.process.stdin.flush()
        while not (line := self.process.stdout.readline()).startswith(("[", '"', "null")):
            assert line, "the taker ended"  # NIXL's own lines go to its output too
        return json.loads(line)

    def push(self, ticket: int, targets: list[int]) -> Push:
        return Push("r", ticket, "taker", self.generation, base64.b64decode(self.ask("address")), targets)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Owner:
    """A sender whose background work is done in threads and heard of in `until`."""

    def __init__(self) -> None:
        self.done: queue.SimpleQueue[tuple[Callable[[Any], Any], Any]] = queue.SimpleQueue()
        self.engine = nixl_taker.engine("owner", 1, submit=self.submit)
        self.engine.kv[:] = nixl_taker.torch.arange(1.0, nixl_taker.NUM_BLOCKS + 1)[:, None, None]
        self.sender = nixl.make_sender(self.engine)
        self.said: list[Written | Stopped] = []

    def submit(self, fn: Callable[[], Any], then: Callable[[Any], Any]) -> None:
        def work() -> None:
            try:
                result = fn()
            except Exception as error:
                result = error
            self.done.put((then, result))

        threading.Thread(target=work, daemon=True).start()

    def until(self, claim: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not claim():
            assert time.monotonic() < deadline, self.said
            try:
                then, result = self.done.get(timeout=0.002)
                then(result)
            except queue.Empty:
                pass
            self.said += self.sender.progress()


@pytest.fixture
def takers() -> Iterator[list[Taker]]:
    made: list[Taker] = []
    yield made
    for one in made:
        one.end()


def sum_of(block: int) -> float:
    return (block + 1.0) * nixl_taker.SHAPE[0] * nixl_taker.SHAPE[1]


def test_blocks_are_written_checked_and_written_again_by_a_successor(takers: list[Taker]) -> None:
    owner = Owner()
    for generation in (1, 2):
        takers.append(Taker(generation))
        push = takers[-1].push(generation, [9, 2, 14])
        owner.sender.push(push, 0, [3, 0], last=False)
        owner.sender.push(push, 2, [15], last=True)
        owner.until(lambda: sum(len(news.checks) for news in owner.said if isinstance(news, Written)) == 3)
        sums = takers[-1].ask("sums")
        assert {block: found for block, found in enumerate(sums) if found} == {
            9: sum_of(3),
            2: sum_of(0),
            14: sum_of(15),
        }
        for news in owner.said:
            assert isinstance(news, Written) and news.ticket == generation
            more = {"first": news.first, "targets": push.targets}
            indices = list(range(news.first, news.first + len(news.checks)))
            assert takers[-1].ask("land", checks=news.checks, **more) == indices
            assert "isn't what was sent" in takers[-1].ask("land", checks=[news.checks[0] ^ 1], **more)
        owner.said.clear()
        takers[-1].end()
        owner.sender.forget("taker")
    owner.sender.close()


def test_a_taker_that_dies_stops_its_tickets_and_a_new_one_is_reached(takers: list[Taker]) -> None:
    owner = Owner()
    takers.append(Taker(1))
    push = takers[0].push(1, list(range(16)))
    owner.sender.push(push, 0, list(range(8)), last=True)
    owner.until(lambda: owner.said == [Written(1, 0, owner.said[0].checks)] if owner.said else False)  # type: ignore[union-attr]
    takers[0].end()
    owner.said.clear()
    owner.sender.push(push, 8, list(range(8)), last=True)
    owner.until(lambda: bool(owner.said))
    assert isinstance(owner.said[0], Stopped) and owner.said[0].reason
    takers.append(Taker(2))
    owner.said.clear()
    owner.sender.push(takers[1].push(2, [4]), 0, [7], last=True)
    owner.until(lambda: bool(owner.said))
    assert isinstance(owner.said[0], Written) and takers[1].ask("sums")[4] == sum_of(7)
    owner.sender.close()
