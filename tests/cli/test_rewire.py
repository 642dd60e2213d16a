"""The commands that change a running service, against one in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from flowinfer.cli import main
from flowinfer.cli.run import ask_chat

ROOT = Path(__file__).parents[2]
SHORT = ("--probation", "100ms")


def call(*args: str, ok: bool = True) -> str:
    result = CliRunner().invoke(main, [*args], catch_exceptions=False)
    assert (result.exit_code == 0) == ok, result.output
    return result.output


@pytest.fixture
def address(echo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the echo service answers; it is started with --watch and nobody at its terminal."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    command = [sys.executable, "-m", "flowinfer", "run", str(echo_file), "--allow-local", "--watch"]
    log = tmp_path / "log.txt"
    process = subprocess.Popen(
        [*command, "--set", "serve.port=0"],
        stdin=subprocess.DEVNULL,
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    )
    found = wait_for(log, r"ready at (\S+)")
    yield found[1]
    process.send_signal(signal.SIGTERM)
    process.wait(60)


def wait_for(log: Path, pattern: str) -> re.Match[str]:
    deadline = time.monotonic() + 60
    while not (found := re.search(pattern, log.read_text())):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return found


def test_a_service_is_changed_from_the_command_line(address: str, echo_file: Path, tmp_path: Path) -> None:
    assert ask_chat(address, "one two").split() == ["one", "two"]
    same = ("plan", str(echo_file), "--allow-local", "--set", "serve.port=0")
    assert "Nothing differs" in call(*same)
    assert "serve.max_requests" in call(*same, "--set", "serve.max_requests=7")
    changes = json.loads(call(*same, "--set", "stages.echo.with.delay=0.001", "--json"))["changes"]
    assert [(change["path"], change["kind"]) for change in changes] == [("stages.echo.with.delay", "warm")]
    call(*same, "--set", "serve.port=1", ok=False)

    assert "epoch 2" in call("set", "serve.max_requests=7")
    assert "there is nobody to ask" in call("set", "stages.echo.with.delay=0.001", ok=False)
    call("set", "stages.echo.with.delay=0.001", "--yes", *SHORT)

    echo = echo_file.with_name("echo.py")
    echo.write_text(echo.read_text().replace("words.pop(0)", "words.pop(0).upper()"))
    call("swap", "echo", *SHORT)
    assert ask_chat(address, "one two").split() == ["ONE", "TWO"]

    call("rollback", *SHORT)
    assert "Nothing differs" in call(*same, "--set", "serve.max_requests=7")
    assert "change 1  set serve.max_requests=7: done after" in call("history") and "switch" in call("history")

    echo_file.write_text(echo_file.read_text().replace("delay: 0.0", "delay: 0.002"))
    wait_for(tmp_path / "log.txt", r"stages.echo.with.delay +0.0 -> 0.002")
    wait_for(tmp_path / "log.txt", r"`flowinfer apply .* serve.max_requests=7 .*` makes these changes")
    assert "was edited" in call("set", "serve.max_requests=8", ok=False)


def test_two_files_are_compared_without_a_service() -> None:
    prod = str(ROOT / "pipelines" / "prod.yaml")
    text = call("plan", prod, prod, "--set", "workers.prefill.replicas=2")
    assert re.search(r"warm  workers.prefill.replicas  1 -> 2", text)


def test_without_a_service_the_way_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert "No service is running" in call("set", "serve.max_requests=7", ok=False)
