"""`flowinfer run` outlives its controller, and takes settings in place; asked over HTTP by a client that streams."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from flowinfer.cli import main
from flowinfer.cli.run import ask_chat
from flowinfer.runtime.rewire.control import running
from flowinfer.runtime.rewire.protocol import Service

ROOT = Path(__file__).parents[2]
TELLING = '''

class Telling(Echo):
    """Says how each call is sampled."""

    def step(self, calls: list[Call]) -> Iterable[Text]:
        for call in calls:
            s = call.sampling
            call.messages = [{"role": "user", "content": f"{s.temperature:g} {s.top_k} {s.max_tokens} {s.seed % 100}"}]
        return list(super().step(calls))
'''


class Run:
    """A `flowinfer run` of the echo pipeline."""

    def __init__(self, file: Path, tmp: Path, *sets: str) -> None:
        self.log = tmp / "log.txt"
        command = [sys.executable, "-m", "flowinfer", "run", str(file), "--allow-local", "--set", "serve.port=0"]
        self.process = subprocess.Popen(
            [*command, *(f"--set={one}" for one in sets)],
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        )
        self.wait_for("ready at")
        self.address = self.log.read_text().rpartition("ready at ")[2].split()[0]

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + 60
        while words not in self.log.read_text():
            assert time.monotonic() < deadline and self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    @property
    def about(self) -> Service:
        return next(service for service, _ in running() if service.pid == self.process.pid)

    def stream(self, text: str) -> Iterator[str]:
        """The words of an answer, as they come."""
        connection = http.client.HTTPConnection(self.address.removeprefix("http://"), timeout=60)
        body = {"model": "echo", "messages": [{"role": "user", "content": text}], "stream": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                yield from (choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def test_a_stream_goes_on_while_its_controller_is_killed(echo_file: Path, home: Path) -> None:
    run = Run(echo_file, home, "stages.echo.with.delay=0.02")
    words = [f"w{i}" for i in range(150)]
    got: list[str] = []
    for word in run.stream(" ".join(words)):
        got.append(word)
        if word == "w10 ":
            os.kill(run.about.controller, signal.SIGKILL)
    assert "".join(got).split() == words
    run.wait_for("takes over 1 workers")
    assert ask_chat(run.address, "one two").split() == ["one", "two"]
    shown = CliRunner().invoke(main, ["history"], catch_exceptions=False).output
    assert "takeover" in shown and "the controller died between changes" in shown
    family = psutil.Process(run.process.pid).children(recursive=True)
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(60) == 0
    assert not [process for process in family if process.is_running()]
    assert not [path for path in home.glob(f"flowinfer-{os.getuid()}/*") if path.name != ".lock"]


def test_sampling_defaults_are_set_while_the_service_runs(echo_file: Path, home: Path) -> None:
    echo = echo_file.with_name("echo.py")
    echo.write_text(echo.read_text() + TELLING)
    echo_file.write_text(echo_file.read_text().replace("echo.py:Echo", "echo.py:Telling"))
    run = Run(echo_file, home, "serve.sampling.seed=42")
    try:
        before = {child.pid for child in psutil.Process(run.process.pid).children(recursive=True)}
        assert "".join(run.stream("x")).split() == ["1", "0", str(2**20), "42"]
        args = [f"serve.sampling.{value}" for value in ("temperature=0.25", "top_k=9", "max_tokens=77")]
        done = CliRunner().invoke(main, ["set", *args, "--probation", "100ms"], catch_exceptions=False).output
        assert "live  serve.sampling.temperature  (absent) -> 0.25" in done and "Done" in done
        assert "".join(run.stream("x")).split() == ["0.25", "9", "77", "42"]
        assert ask_chat(run.address, "x").split()[:3] == ["0", "9", "256"]  # what a request says goes first
        assert {child.pid for child in psutil.Process(run.process.pid).children(recursive=True)} == before
    finally:
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(60)
