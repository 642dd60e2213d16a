"""Experiments on a running service in real processes: begun, killed, stopped by themselves and by hand, under load."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from flowinfer.cli import main
from flowinfer.experiment.policy import place

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
SHORT = ("--yes", "--probation", "100ms")
HOLD = '''

class Hold(Echo):
    """Keeps its calls in a worker of its own, as what holds memory does; says everything loudly if asked to."""

    class Config(StageConfig):
        loud: bool = False
        broken: bool = False

        def contract(self):
            return Contract(held=frozenset({"calls"}))

    def step(self, calls: list[Call]) -> Iterable[Text]:
        if self.config.broken and calls:
            for call in calls:
                self.ctx.give_back("calls", call.id)
                self.ctx.fail(call.id, RequestError(500, "it is broken"))
            return
        for call in calls:
            self.left[call.id] = (call.prompt.upper() if self.config.loud else call.prompt).split()
        pieces = [self.say(id) for id, words in list(self.left.items()) if words != ["NEVER"]]
        for piece in pieces:
            if piece.finish is not None:
                self.ctx.give_back("calls", piece.id)
        if pieces:
            yield Text(step=0, pieces=pieces)

    @property
    def busy(self) -> bool:
        return any(words != ["NEVER"] for words in self.left.values())
'''


MARK = '''

class Mark(Stage):
    """Says that a call came by here."""

    def step(self, calls: list[Call]) -> Iterable[Call]:
        for call in calls:
            call.prompt = f"B {call.prompt}"
            yield call
'''
MARKED = """extends: echo.yaml
experiment:
  name: loud
  SHARE
  with:
    stages: {mark: {use: "./echo.py:Mark"}}
    edges: {"api -> echo": !drop , "api -> mark": , "mark -> echo": }
"""


class Traffic:
    """Clients that ask without end, each with a session of its own. texts: what each session was answered, in order."""

    def __init__(self, port: int, num: int = 6) -> None:
        self.port = port
        self.texts: dict[str, list[str]] = {f"u{number}": [] for number in range(num)}
        self.errors: list[tuple[str, int, str]] = []
        self._stop = False
        self._news = threading.Condition()
        self._threads = [threading.Thread(target=self._loop, args=(name,)) for name in self.texts]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop = True
        for thread in self._threads:
            thread.join()

    def _loop(self, session: str) -> None:
        while not self._stop:
            status, text = ask(self.port, session)
            with self._news:
                if status == 200:
                    self.texts[session].append(text)
                else:
                    self.errors.append((session, status, text))
                self._news.notify_all()

    def more(self, count: int = 5) -> dict[str, list[str]]:
        """What each session is answered from now on, at least `count` times. The first may be of before."""
        with self._news:
            since = {session: len(texts) for session, texts in self.texts.items()}

            def enough() -> bool:
                return all(len(texts) > since[session] + count for session, texts in self.texts.items())

            assert self._news.wait_for(enough, PATIENCE_S), self.errors
            return {session: texts[since[session] + 1 :] for session, texts in self.texts.items()}


def ask(port: int, session: str, prompt: str = "one two") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    body = {"model": "echo", "prompt": prompt, "user": session}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer["choices"][0]["text"] if response.status == 200 else answer["error"]["message"]


def answered(port: int) -> dict[str, float]:
    """Requests that each arm has answered, by the metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    found = re.findall(
        r'^flowinfer:arm_requests_total\{arm="(.)",experiment="loud",result="answered".*\} (\S+)', page, re.M
    )
    return {arm: float(count) for arm, count in found}


def call(*args: object, ok: bool = True) -> str:
    result = CliRunner(env={"COLUMNS": "120"}).invoke(main, [*map(str, args)], catch_exceptions=False)
    assert (result.exit_code == 0) == ok, result.output
    return result.output


Overlay = Callable[..., Path]


@pytest.fixture
def overlay(echo_file: Path, tmp_path: Path) -> Overlay:
    """Writes an experiment over a service whose echo runs in a worker of its own."""
    source = (tmp_path / "echo.py").read_text()
    source = source.replace("import Stage, StageConfig", "import Contract, Stage, StageConfig")
    (tmp_path / "echo.py").write_text(source + HOLD)
    echo_file.write_text(
        echo_file.read_text()
        .replace('{use: "./echo.py:Echo", with: {delay: 0.0}}', '{use: "./echo.py:Hold", place: {worker: say}}')
        .replace("stages:", "workers: {say: }\nstages:")
    )

    def write(change: str, how: str, **more: str) -> Path:
        path = tmp_path / "experiment.yaml"
        lines = [f"  {key}: {value}" for key, value in more.items()]
        lines += [f"  {how}", f"  with: {{stages: {{echo: {{with: {change}}}}}}}"]
        path.write_text("\n".join(["extends: echo.yaml", "experiment:", "  name: loud", *lines, ""]))
        return path

    return write


class Running:
    """The service, before its experiment."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = process, log
        self.port = int(self.wait_for(r"ready at http://127.0.0.1:(\d+)")[1])

    def wait_for(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, self.log.read_text())):
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return found

    def worker(self, name: str) -> psutil.Process | None:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if child.cmdline()[-1:] == [name]:
                return child
        return None

    def apply(self, path: Path) -> str:
        return call("apply", path, "--allow-local", *SHORT, "--set", "serve.port=0")


@pytest.fixture
def running(overlay: Overlay, echo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    log = tmp_path / "log.txt"
    command = [sys.executable, "-m", "flowinfer", "run", str(echo_file), "--allow-local", "--set", "serve.port=0"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    process = subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env=env)
    yield Running(process, log)
    process.send_signal(signal.SIGTERM)
    process.wait(PATIENCE_S)


def is_b(session: str, share: float) -> bool:
    return place(session, "loud") < share


def test_a_split_begins_and_ends_under_load_and_outlives_the_death_of_its_arm(
    running: Running, overlay: Overlay, tmp_path: Path
) -> None:
    path = overlay("{loud: true}", "split: 50%")
    assert {is_b(f"u{number}", 0.5) for number in range(6)} == {True, False}
    with Traffic(running.port) as traffic:
        assert set(itertools.chain(*traffic.more().values())) == {"one two "}
        out = running.apply(path)
        assert "warm  workers.say-b" in out and "gap for new requests: none" in out
        for session, texts in traffic.more().items():  # each session in its arm, and only there
            assert set(texts) == {"ONE TWO " if is_b(session, 0.5) else "one two "}, session
        assert traffic.errors == []
        deadline = time.monotonic() + PATIENCE_S
        while answered(running.port).keys() != {"a", "b"}:
            assert time.monotonic() < deadline, answered(running.port)
            traffic.more(1)

        arm = running.worker("say-b.0")
        assert arm is not None
        arm.send_signal(signal.SIGKILL)
        traffic.more()
        running.wait_for("Worker say-b.0 is back")
        assert [error for error in traffic.errors if not is_b(error[0], 0.5)] == []  # arm A didn't notice
        assert {status for _, status, _ in traffic.errors} <= {503}
        failed = len(traffic.errors)
        for session, texts in traffic.more().items():
            assert set(texts[-3:]) == {"ONE TWO " if is_b(session, 0.5) else "one two "}, session

        assert "live" in call("set", "experiment.split=100%", *SHORT)
        assert set(itertools.chain(*traffic.more().values())) == {"ONE TWO "}
        assert "arm b      gets nothing new" in call("experiment", "stop", *SHORT)
        assert set(itertools.chain(*traffic.more().values())) == {"one two "}
        assert len(traffic.errors) == failed
    assert running.worker("say-b.0") is None and running.worker("say.0") is not None
    report = call("experiment", "report", "--json", tmp_path / "out.json", "--require", "errors <= 50%")
    assert "arm B of loud" in report and "each arm answered other requests" in report.replace("\n", " ")


def test_arm_b_is_led_into_a_worker_that_runs_already(
    running: Running, overlay: Overlay, tmp_path: Path, echo_file: Path
) -> None:
    """What arm B has of its own stands at the door, and its new edge goes to the other arm's worker."""
    (tmp_path / "echo.py").write_text((tmp_path / "echo.py").read_text() + MARK)
    path = tmp_path / "experiment.yaml"
    path.write_text(MARKED)
    with Traffic(running.port) as traffic:
        for share in ("split: 50%", "split: 100%"):
            path.write_text(MARKED.replace("SHARE", share))
            running.apply(path)
            number = float(share[7:-1]) / 100
            for session, texts in traffic.more().items():
                assert set(texts) == {"B one two " if is_b(session, number) else "one two "}, session
            call("experiment", "stop", *SHORT)
            assert set(itertools.chain(*traffic.more().values())) == {"one two "}
    assert traffic.errors == []
    assert psutil.pid_exists(running.process.pid) and "gives up" not in running.log.read_text()


def test_a_mirror_compares_answers_and_leaves_clients_alone(running: Running, overlay: Overlay, tmp_path: Path) -> None:
    running.apply(overlay("{loud: true}", "mirror: 100%", max_open="2"))
    with Traffic(running.port) as traffic:
        assert set(itertools.chain(*traffic.more(10).values())) == {"one two "}
    status, _ = ask(running.port, "u0", "never")  # arm B's copy would hang; the request itself is answered
    assert status == 200
    assert traffic.errors == []
    call("experiment", "stop", *SHORT)
    out = call("experiment", "report", "--html", tmp_path / "r.html", "--json", tmp_path / "r.json")
    assert "'ONE TWO '" in out and "first at" in out
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["answers"]["num_pairs"] == len(found["answers"]["differences"]) > 0
    assert "dropped" in found["setup"]["note"] and (tmp_path / "r.html").read_text().count("<svg") >= 2


def test_an_arm_that_fails_is_taken_down_by_itself(running: Running, overlay: Overlay, tmp_path: Path) -> None:
    path = overlay("{broken: true}", "split: 50%", min_requests="20", stop_if='{errors: "> 5%"}')
    with Traffic(running.port) as traffic:
        running.apply(path)
        running.wait_for("Experiment loud stops itself: errors > 5%")
        running.wait_for(r"done +epoch 3")
        failed = Counter(session for session, _, _ in traffic.errors)
        assert all(is_b(session, 0.5) for session in failed)
        assert set(itertools.chain(*traffic.more().values())) == {"one two "}
        assert Counter(session for session, _, _ in traffic.errors) == failed
    assert running.worker("say-b.0") is None
    assert "experiment loud stopped: errors > 5%" in call("history")
    assert "ended: errors > 5%" in call("experiment", "list")
    assert "live" in call("set", "serve.max_requests=99", *SHORT)  # what runs is the file without its experiment
    assert "no experiment" in call("experiment", "status", ok=False)
