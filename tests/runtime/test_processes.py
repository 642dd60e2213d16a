"""Services of plain stages in real processes: back-pressure, deaths, draining, failing starts, nothing left over."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from services import Start, edge, loaded, plan_of, stage, until

from flowinfer.graph.plan import ServePlan


def test_a_fast_producer_loses_nothing_and_waits_for_its_consumers(start: Start, tmp_path: Path) -> None:
    notes, count = str(tmp_path / "notes.txt"), 3_000
    plan = plan_of(
        [
            stage("source", "Source", "front", count=count, file=notes, tokens=8_000),
            stage("relay", "Relay", "middle"),
            stage("sink", "Sink", "back", file=notes),
        ],
        [edge("source", "relay", "Prompt", "prompts"), edge("relay", "sink", "Prompt", "prompts")],
        tmp_path,
        back=2,
    )
    service = start(plan)
    service.wait_ready()
    until(lambda: len(service.lines("got")) >= count, "all prompts arrived")
    got = [line.split() for line in service.lines("got")]
    assert sorted(int(request[1:]) for _, request, _ in got) == list(range(1, count + 1))
    assert all(int(total) == 8_000 * int(request[1:]) for _, request, total in got)
    # 3,000 prompts of 32 kB are 96 MB: a queue without bounds would show.
    assert max(p.memory_info().rss for p in service.workers().values()) < 160e6


@pytest.mark.parametrize("victim", ["front.0", "middle.0", "back.0"])
def test_a_killed_worker_fails_what_it_held_and_comes_back(start: Start, tmp_path: Path, victim: str) -> None:
    service = start(loaded(tmp_path))
    service.wait_ready()
    until(lambda: len(service.lines("answered")) > 100, "requests go round")
    first = service.workers()[victim]
    first.kill()
    until(lambda: service.has_new(victim, first.pid), "a new process")
    if victim != "front.0":
        until(lambda: f"down {victim} 1" in service.lines("down"), "the front knows")
    before = len(service.lines("answered"))
    until(lambda: len(service.lines("answered")) > before + 200, "requests go round again")
    assert all(line.split()[2:] == ["503", "worker_died"] for line in service.lines("failed"))
    assert f"Worker {victim} died: worker {victim} was ended by SIGKILL" in service.log.read_text()
    service.process.send_signal(signal.SIGTERM)
    service.wait_gone()
    assert service.process.returncode == 0, service.log.read_text()


def test_requests_on_their_way_to_a_dead_worker_fail_at_once(start: Start, tmp_path: Path) -> None:
    service = start(loaded(tmp_path, calls=4, gate=str(tmp_path / "gate")))
    service.wait_ready()
    os.kill(service.workers()["middle.0"].pid, signal.SIGSTOP)  # what is sent now isn't taken
    stopped = service.workers()["middle.0"]
    until(lambda: stopped.status() == psutil.STATUS_STOPPED, "the worker stands still")
    stopped.kill()
    until(lambda: "down middle.0 1" in service.lines("down"), "the front knows")
    done = set(service.lines("failed"))
    (tmp_path / "gate").touch()
    until(lambda: len(service.lines("failed")) + len(service.lines("answered")) == 4, "each request has its end")
    assert done <= set(service.lines("failed"))


def test_a_drain_lets_open_requests_finish(start: Start, tmp_path: Path) -> None:
    service = start(loaded(tmp_path, calls=3, gate=str(tmp_path / "gate")))
    service.wait_ready()
    until(lambda: len(service.lines("made")) == 3, "three requests are open")
    service.process.send_signal(signal.SIGINT)
    until(lambda: bool(service.lines("drain")), "the door knows")
    assert service.process.poll() is None
    (tmp_path / "gate").touch()
    service.wait_gone()
    assert service.process.returncode == 0
    assert len(service.lines("answered")) == 3 and service.lines("closed") == ["closed 0"]


@pytest.mark.parametrize(
    ("timeout_s", "speaks", "end"), [(30.0, True, ["all written"]), (0.2, True, ["gave up"]), (30.0, False, [])]
)
def test_who_says_that_it_still_writes_gets_the_time_and_others_are_ended(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float, speaks: bool, end: list[str]
) -> None:
    notes = str(tmp_path / "notes.txt")
    source, writer = stage("source", "Source", "front", count=1, file=notes), stage("writer", "LateWriter", "back")
    writer = msgspec.structs.replace(writer, config={"file": notes, "seconds": 1.0, "speaks": speaks})
    plan = plan_of([source, writer], [edge("source", "writer", "Prompt", "prompts")], tmp_path)
    serve = msgspec.structs.replace(plan.serve, stop_timeout_s=timeout_s)
    monkeypatch.setenv("STOP_S", "0.5")
    service = start(msgspec.structs.replace(plan, serve=serve))
    service.wait_ready()
    service.process.send_signal(signal.SIGTERM)
    service.wait_gone()
    assert service.process.returncode == 0
    assert service.lines("all written") + service.lines("gave up") == end
    said = f"Worker back.0 still writes its notes: waiting for it, {timeout_s:g} s at most (serve.stop_timeout)."
    assert (said in service.log.read_text()) is speaks


def test_a_second_signal_stops_at_once(start: Start, tmp_path: Path) -> None:
    service = start(loaded(tmp_path, calls=3, gate=str(tmp_path / "never")))
    service.wait_ready()
    until(lambda: len(service.lines("made")) == 3, "three requests are open")
    service.process.send_signal(signal.SIGINT)
    until(lambda: bool(service.lines("drain")), "the door knows")
    service.process.send_signal(signal.SIGINT)
    service.wait_gone()
    assert service.lines("answered") == []


def test_a_worker_that_hangs_is_ended_and_comes_back(start: Start, tmp_path: Path) -> None:
    service = start(loaded(tmp_path), hung_s=3.0)
    service.wait_ready()
    hung = service.workers()["middle.0"]
    hung.suspend()
    until(lambda: service.has_new("middle.0", hung.pid), "a new process")
    until(lambda: "Worker middle.0 is back." in service.log.read_text(), "back")
    assert "Worker middle.0 hasn't answered for 3 s" in service.log.read_text()
    before = len(service.lines("answered"))
    until(lambda: len(service.lines("answered")) > before + 50, "requests go round again")


def test_nothing_outlives_a_killed_supervisor(start: Start, tmp_path: Path) -> None:
    service = start(loaded(tmp_path))
    service.wait_ready()
    until(lambda: len(service.lines("answered")) > 20, "requests go round")
    assert len(service.workers()) == 3
    service.process.kill()
    service.wait_gone()


def test_a_start_up_failure_names_stage_place_and_cause(start: Start, tmp_path: Path) -> None:
    notes = str(tmp_path / "notes.txt")
    plan = plan_of(
        [stage("source", "Source", "front", file=notes), stage("broken", "Broken", "back")],
        [edge("source", "broken", "Prompt", "prompts")],
        tmp_path,
    )
    service = start(plan)
    service.wait_gone()
    assert service.process.returncode == 1
    words = "ERROR stage 'broken' (pipe.yaml:6:3): FileNotFoundError: there is no such model here"
    assert words in service.log.read_text()


def test_a_worker_that_dies_while_it_opens_is_named(start: Start, tmp_path: Path) -> None:
    notes = str(tmp_path / "notes.txt")
    plan = plan_of(
        [stage("source", "Source", "front", file=notes), stage("dying", "Dying", "back")],
        [edge("source", "dying", "Prompt", "prompts")],
        tmp_path,
    )
    service = start(plan)
    service.wait_gone()
    assert "ended by SIGKILL (out of memory?) while it opened stage 'dying'" in service.log.read_text()


def test_a_port_in_use_says_by_whom(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        plan = msgspec.structs.replace(loaded(tmp_path), serve=ServePlan(port=port))
        service = start(plan)
        service.wait_gone()
    text = service.log.read_text()
    assert f"127.0.0.1:{port} is in use by" in text and f"(process {os.getpid()})" in text
    assert "--set serve.port" in text


def test_the_folder_of_a_dead_service_is_swept(tmp_path: Path) -> None:
    from flowinfer.runtime.run_dir import RunDir, sweep

    living = RunDir(tmp_path)
    dead = tmp_path / "dead"
    dead.mkdir()
    (dead / "lock").touch()
    left = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start_time = Path(f"/proc/{left.pid}/stat").read_text().rpartition(")")[2].split()[19]
    (dead / "pids").write_text(f"{left.pid} {start_time}\n{os.getpid()} 1\n")
    assert sweep(tmp_path) == [dead]
    assert not dead.exists() and living.path.exists()
    assert left.wait(10) == -signal.SIGKILL
    living.remove()


@pytest.mark.slow
def test_memory_stays_flat_for_half_a_minute_of_a_producer_that_is_ten_times_faster(
    start: Start, tmp_path: Path
) -> None:
    notes = str(tmp_path / "notes.txt")
    plan = plan_of(
        [
            stage("source", "Source", "front", count=10_000_000, file=notes, tokens=8_000),
            stage("slow", "SlowSink", "back", file=notes, messages_per_s=100),
        ],
        [edge("source", "slow", "Prompt", "prompts")],
        tmp_path,
    )
    service = start(plan)
    service.wait_ready()
    until(lambda: len(service.lines("got")) >= 500, "five seconds of messages")
    before = {name: process.memory_info().rss for name, process in service.workers().items()}
    until(lambda: len(service.lines("got")) >= 3_000, "half a minute of messages")
    after = {name: process.memory_info().rss for name, process in service.workers().items()}
    assert all(after[name] < before[name] + 8e6 for name in before)
    assert [line.split()[1] for line in service.lines("got")[:3_000]] == [f"r{i}" for i in range(1, 3_001)]
