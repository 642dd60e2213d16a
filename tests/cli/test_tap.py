"""`flowinfer tap` and `flowinfer logs` over true processes of plain stages."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result
from services import MODULE, Service, edge, plan_of, stage, until

from flowinfer.cli import main


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A door that keeps two calls open, all the time, over three workers; the last one has a stage of its own."""
    tmp = tmp_path_factory.mktemp("tapped")
    stages = [
        stage("api", "Door", "front", file=str(tmp / "notes.txt"), open=2),
        stage("first", "CallRelay", "front"),
        stage("relay", "Talker", "middle"),
        stage("answer", "LateAnswerer", "back", delay=0.01),
    ]
    edges = [edge("api", "first", "Call", "calls"), edge("first", "relay", "Call", "calls")]
    edges += [edge("relay", "answer", "Call", "calls"), edge("answer", "api", "Text", "texts")]
    running = Service(plan_of(stages, edges, tmp), tmp, 60.0)
    running.wait_ready()
    yield running
    running.process.send_signal(signal.SIGINT)
    running.process.send_signal(signal.SIGINT)
    running.wait_gone()


@pytest.fixture(autouse=True)
def same_folder(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services are looked for where this one has its folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(service.tmp))


def flowinfer(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize(("name", "worker"), [("api->first", "front.0"), ("relay -> answer", "middle.0")])
def test_messages_are_shown_inside_a_worker_and_between_workers(name: str, worker: str) -> None:
    done = flowinfer("tap", name, "--limit", "5", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.exit_code == 0, done.stderr
    assert [(line["worker"], line["type"]) for line in lines] == [(worker, "Call")] * 5
    assert all(line["prompt"] == "x" * 100 for line in lines)
    assert "5 shown" in done.stderr


def test_only_what_the_expression_says_is_shown() -> None:
    asked = ("--where", "type == 'Text' and len(pieces) >= 1 and request != '1-1'", "--limit", "2")
    done = flowinfer("tap", "answer -> api", *asked)
    assert [line.split()[2] for line in done.stdout.splitlines()] == ["Text", "Text"], done.stderr
    none = flowinfer("tap", "answer -> api", "--where", "request == 'nobody'", "--for", "0.5")
    assert none.stdout == ""
    assert int(none.stderr.split(" shown, ")[1].split()[0]) > 2, "what passed is counted, also with nothing to show"


def test_a_sample_is_a_share() -> None:
    done = flowinfer("tap", "first -> relay", "--sample", "0.2", "--limit", "3")
    shown, passed = (int(part.split()[-2]) for part in done.stderr.split(", ")[:2])
    assert shown == 3
    assert passed >= 15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("api -> frist",), "There is no edge 'api -> frist'. Did you mean `api -> first`?"),
        (("api -> first", "--where", "promt == 1"), "'promt' is no field of Call"),
        (("api -> first", "--where", "__import__('os')"), "isn't something that --where knows"),
    ],
)
def test_mistakes_are_told_before_anything_is_tapped(arguments: tuple[str, ...], message: str) -> None:
    done = flowinfer("tap", *arguments)
    assert done.exit_code == 1
    assert message in " ".join(done.stderr.replace("help:", "").split())


def test_logs_are_by_stage_and_outlive_their_worker(service: Service) -> None:
    lines = [json.loads(line) for line in flowinfer("logs", "relay", "--json").stdout.splitlines()]
    told = [line for line in lines if line["logger"] == MODULE]
    assert {(line["worker"], line["stage"], line["level"], line["text"]) for line in told} == {
        ("middle.0", "relay", "WARNING", "relay begins")
    }
    before = service.workers()["middle.0"].pid
    os.kill(before, signal.SIGKILL)
    until(lambda: service.has_new("middle.0", before), "a new worker")
    until(lambda: flowinfer("logs", "relay").stdout.count("relay begins") == 2, "both lines")
    all_of_it = flowinfer("logs", "--since", "10min").stdout
    assert "Worker middle.0 died" in all_of_it and "stage answer opened" in all_of_it
    warnings = flowinfer("logs", "--level", "warning").stdout
    assert "relay begins" in warnings and "opened" not in warnings


def test_a_stage_that_isnt_there() -> None:
    done = flowinfer("logs", "realy")
    assert done.exit_code == 1
    assert "Did you mean `relay`?" in done.stderr
