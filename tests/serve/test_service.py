"""The gateway in a real front worker, with the pipeline in another process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

ROOT = Path(__file__).parents[2]

SLOW_ECHO = '''
from collections.abc import Iterable

from flowinfer.message import Call, Finish, Piece, Text
from flowinfer.stage import Stage


class SlowEcho(Stage):
    """Says the first word at once; the rest, and the end, only to "finish": so a test decides when things happen."""

    def open(self) -> None:
        self.held: set[str] = set()

    def step(self, calls: list[Call]) -> Iterable[Text]:
        for call in calls:
            text = call.messages[-1]["content"]
            if text == "held?":
                text = f"held={len(self.held)}"
            pieces = [Piece(id=call.id, text=text, tokens=[1])]
            if text == "wait":
                self.held.add(call.id)
            else:
                pieces.append(Piece(id=call.id, finish=Finish(reason="stop", completion_tokens=1)))
            yield Text(step=0, pieces=pieces)

    def cancel(self, requests) -> None:
        self.held.difference_update(requests)
'''

PIPELINE = """flowinfer: 1
name: slow
serve: {port: PORT}
workers: {back: {device: cpu}}
stages:
  echo: {use: "./slow.py:SlowEcho", place: {worker: back}}
edges:
  api -> echo:
  echo -> api:
"""


class Running:
    """A service in a process of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (folder / "slow.py").write_text(SLOW_ECHO)
        (folder / "slow.yaml").write_text(PIPELINE.replace("PORT", str(port)))
        self.url = f"http://127.0.0.1:{port}"
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "flowinfer", "run", str(folder / "slow.yaml"), "--allow-local"]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "is ready" in line:
                return
        raise AssertionError("the service didn't start")

    def ask(self, text: str, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/chat/completions", json=self.body(text) | more, timeout=10)

    def answers(self, wanted: str, *, to: str) -> bool:
        """True when the service answers `to` with `wanted`; False while it says something else, or nothing."""
        try:
            response = self.ask(to)
        except httpx.HTTPError:
            return False
        return response.status_code == 200 and response.json()["choices"][0]["message"]["content"] == wanted

    def stream(self, text: str) -> Any:
        body = self.body(text) | {"stream": True}
        return httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=10)

    def body(self, text: str) -> dict[str, Any]:
        return {"model": "slow", "messages": [{"role": "user", "content": text}]}

    def worker(self, name: str) -> psutil.Process:
        """The process of this worker."""
        (worker,) = [c for c in psutil.Process(self.process.pid).children(recursive=True) if name in c.cmdline()]
        return worker

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    service = Running(tmp_path_factory.mktemp("service"))
    yield service
    if service.process.poll() is None:
        service.process.kill()
    service.process.wait()


def until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def first_word(lines: Iterator[str]) -> str:
    for line in lines:
        if line.startswith("data: {") and (text := json.loads(line[6:])["choices"][0]["delta"].get("content")):
            return str(text)
    raise AssertionError("no text")


def test_an_answer_crosses_the_processes(running: Running) -> None:
    assert running.ask("hello").json()["choices"][0]["message"]["content"] == "hello"


def test_a_client_that_leaves_frees_what_the_worker_held(running: Running) -> None:
    with running.stream("wait") as response:
        lines = response.iter_lines()  # named, for httpx closes the response when this is collected
        assert first_word(lines) == "wait"
        assert running.ask("held?").json()["choices"][0]["message"]["content"] == "held=1"
    until(lambda: running.answers("held=0", to="held?"))


def test_a_killed_worker_ends_its_streams_and_comes_back(running: Running) -> None:
    with running.stream("wait") as response:
        lines = response.iter_lines()
        assert first_word(lines) == "wait"
        running.worker("back.0").kill()
        rest = [line for line in lines if line]
    assert len(rest) == 1
    assert "back.0" in json.loads(rest[0][6:])["error"]["message"]
    until(lambda: running.answers("hello", to="hello"))
    assert httpx.get(running.url + "/ready").status_code == 200


def test_a_killed_front_comes_back_and_what_it_had_open_is_freed(running: Running) -> None:
    with running.stream("wait") as response:
        lines = response.iter_lines()
        assert first_word(lines) == "wait"
        running.worker("front.0").kill()
        with pytest.raises(httpx.HTTPError):
            list(lines)
    until(lambda: running.answers("held=0", to="held?"))


def test_metrics_come_from_both_workers(running: Running) -> None:
    def seen() -> bool:
        page = httpx.get(running.url + "/metrics").text
        return all(f'flowinfer:worker_up{{worker="{name}"}} 1.0' in page for name in ("front.0", "back.0"))

    until(seen)


def test_it_drains_and_stops(running: Running) -> None:
    assert running.stop() == 0
    with pytest.raises(httpx.ConnectError):
        running.ask("hello")
