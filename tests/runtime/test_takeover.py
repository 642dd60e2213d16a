"""A supervisor that dies is followed by another one; what runs goes on, and what it was changing is ended or undone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import psutil
import pytest
from changing import Changing
from services import Start, loaded, until

from flowinfer.graph.plan import NetworkPlan, Plan
from flowinfer.runtime.rewire.protocol import Request


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_requests_go_on_while_one_controller_follows_another(start: Start, tmp_path: Path) -> None:
    plan = loaded(tmp_path)
    change = Changing(start(plan, kept=True), plan)
    change.go_round()
    before = {name: process.pid for name, process in change.service.workers().items()}
    change.kill_controller()
    change.go_round()
    assert {name: process.pid for name, process in change.service.workers().items()} == before
    assert change.ask(Request(do="history"))[-1].steps[-1].step == "takeover"
    assert "was ended by SIGKILL. The workers go on" in change.service.log.read_text()
    change.check_ends()


def test_the_next_controller_supervises_changes_and_ends_as_the_first(start: Start, tmp_path: Path) -> None:
    plan = loaded(tmp_path)
    change = Changing(start(plan, kept=True, hung_s=3.0), plan)
    change.kill_controller()
    killed = change.service.workers()["middle.0"]
    killed.kill()  # it's no child of this controller
    until(lambda: change.service.has_new("middle.0", killed.pid), "a new process")
    words = "Worker middle.0 died: worker middle.0 was ended by SIGKILL"
    until(lambda: words in change.service.log.read_text(), "told")
    hung = change.service.workers()["back.0"]
    hung.suspend()
    until(lambda: change.service.has_new("back.0", hung.pid), "a new process")
    until(lambda: change.service.log.read_text().count("is back.") == 2, "both are back")
    change.go_round()
    change.must_apply(plan, "relay")
    change.kill_controller()
    change.go_round()
    assert change.status().epoch == 2
    assert change.ask(Request(do="rollback"))[-1].text == "There is no change to take back."
    change.check_ends(allowed=frozenset({"worker_died"}))


@pytest.mark.slow
def test_a_worker_that_dies_without_a_controller_comes_back(start: Start, tmp_path: Path) -> None:
    plan = loaded(tmp_path)
    change = Changing(start(plan, kept=True), plan)
    change.go_round()
    victim = change.service.workers()["middle.0"]
    os.kill(change.controller, signal.SIGSTOP)  # it can't see it
    victim.kill()
    until(lambda: victim.status() == psutil.STATUS_ZOMBIE, "it's dead")
    change.kill_controller()
    until(lambda: change.service.has_new("middle.0", victim.pid), "a new process")
    change.go_round()
    change.check_ends(allowed=frozenset({"worker_died"}))


@pytest.mark.slow
def test_a_worker_that_is_still_opening_joins_the_next_controller(start: Start, tmp_path: Path) -> None:
    plan, gate = loaded(tmp_path), tmp_path / "gate"
    blocked = msgspec.structs.replace(plan.stages["relay"], kind="altered:Blocked", config={"gate": str(gate)})
    plan = msgspec.structs.replace(plan, stages=plan.stages | {"relay": blocked})
    gate.touch()
    change = Changing(start(plan, kept=True), plan)
    change.go_round()
    gate.unlink()
    change.service.workers()["middle.0"].kill()
    until(lambda: change.service.log.read_text().count("middle.0: opening relay") == 2, "it starts again")
    opening = change.service.workers()["middle.0"].pid
    change.kill_controller()
    gate.touch()
    until(lambda: "Worker middle.0 is back." in change.service.log.read_text(), "it's there")
    assert change.service.workers()["middle.0"].pid == opening
    change.go_round()
    change.must_apply(plan, "answer")
    change.check_ends(allowed=frozenset({"worker_died"}))


@pytest.mark.slow
def test_a_stop_that_comes_between_two_controllers_drains(start: Start, tmp_path: Path) -> None:
    plan = loaded(tmp_path, calls=3, gate=str(tmp_path / "gate"))
    change = Changing(start(plan, kept=True), plan)
    until(lambda: len(change.service.lines("made")) == 3, "three requests are open")
    change.service.process.send_signal(signal.SIGTERM)
    until(lambda: bool(change.service.lines("drain")), "the door knows")
    os.kill(change.controller, signal.SIGKILL)
    until(lambda: change.num_resumed() == 1, "another controller")
    assert change.service.process.poll() is None
    (tmp_path / "gate").touch()
    change.service.wait_gone()
    assert change.service.process.returncode == 0, change.service.log.read_text()
    assert len(change.service.lines("answered")) == 3


def test_a_keeper_that_dies_before_the_service_has_started_leaves_nothing(start: Start, tmp_path: Path) -> None:
    plan = loaded(tmp_path)
    blocked = msgspec.structs.replace(
        plan.stages["relay"], kind="altered:Blocked", config={"gate": str(tmp_path / "gate")}
    )
    service = start(msgspec.structs.replace(plan, stages=plan.stages | {"relay": blocked}), kept=True)
    until(lambda: "middle.0: opening relay" in service.log.read_text(), "it's opening")
    service.workers()
    service.process.kill()
    service.wait_gone()


@pytest.mark.slow
def test_a_controller_that_hangs_cannot_hold_up_a_second_signal(start: Start, tmp_path: Path) -> None:
    plan = loaded(tmp_path, calls=3, gate=str(tmp_path / "never"))
    change = Changing(start(plan, kept=True), plan)
    until(lambda: len(change.service.lines("made")) == 3, "three requests are open")
    controller = psutil.Process(change.controller)
    controller.suspend()
    change.service.process.send_signal(signal.SIGTERM)
    change.service.process.send_signal(signal.SIGINT)
    change.service.wait_gone()
    assert not controller.is_running()


@pytest.mark.slow
def test_a_full_disk_refuses_a_change_and_ends_nothing(start: Start, tmp_path: Path) -> None:
    plan = loaded(tmp_path)
    change = Changing(start(plan, kept=True), plan)
    change.go_round()
    (journal,) = (tmp_path / "state" / "flowinfer").iterdir()
    journal.unlink()
    journal.symlink_to("/dev/full")
    fresh = change.folder / "state.json.new"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to("/dev/full")
    victim = change.service.workers()["middle.0"]
    victim.kill()
    until(lambda: change.service.has_new("middle.0", victim.pid), "a new process")
    until(lambda: "nobody could take over from here" in change.service.log.read_text(), "it's told")
    refused = change.apply(plan, "relay")
    assert not refused.ok and "can't be written: No space left on device" in refused.text
    change.go_round()
    change.check_ends(allowed=frozenset({"worker_died"}))


def test_ctrl_c_which_reaches_keeper_and_controller_counts_once(start: Start, tmp_path: Path) -> None:
    plan = loaded(tmp_path, calls=3, gate=str(tmp_path / "gate"))
    change = Changing(start(plan, kept=True), plan)
    until(lambda: len(change.service.lines("made")) == 3, "three requests are open")
    for pid in (change.controller, change.service.process.pid):
        os.kill(pid, signal.SIGINT)
    until(lambda: bool(change.service.lines("drain")), "the door knows")
    (tmp_path / "gate").touch()
    change.service.wait_gone()
    assert change.service.process.returncode == 0
    assert len(change.service.lines("answered")) == 3


def test_nothing_outlives_a_killed_keeper(start: Start, tmp_path: Path) -> None:
    plan = loaded(tmp_path)
    change = Changing(start(plan, kept=True), plan)
    change.go_round(20)
    assert len(change.service.workers()) == 3
    change.service.process.kill()
    change.service.wait_gone()


@pytest.mark.slow
def test_a_controller_that_dies_again_and_again_ends_the_service_with_the_cause(start: Start, tmp_path: Path) -> None:
    plan = loaded(tmp_path)
    change = Changing(start(plan, kept=True), plan)
    for _ in range(4):
        change.kill_controller()
    change.go_round(20)
    os.kill(change.controller, signal.SIGKILL)
    change.service.wait_gone()
    assert change.service.process.returncode == 128 + signal.SIGKILL
    assert "was ended by SIGKILL, the 5th time within 60 s: the service ends" in change.service.log.read_text()


def test_a_service_that_cannot_start_ends_with_its_cause(start: Start, tmp_path: Path) -> None:
    from services import edge, plan_of, stage

    plan = plan_of(
        [stage("source", "Source", "front", file=str(tmp_path / "notes.txt")), stage("broken", "Broken", "back")],
        [edge("source", "broken", "Prompt", "prompts")],
        tmp_path,
    )
    service = start(plan, kept=True)
    service.wait_gone()
    assert service.process.returncode == 1
    assert "there is no such model here" in service.log.read_text()


def with_altered(tmp: Path) -> Plan:
    plan = loaded(tmp)
    altered = msgspec.structs.replace(
        plan.stages["relay"], kind="altered:Altered", config={"changed": str(tmp / "new")}
    )
    return msgspec.structs.replace(plan, stages=plan.stages | {"relay": altered})


@pytest.mark.slow
def test_a_worker_of_other_code_is_turned_away_while_the_others_serve_on(start: Start, tmp_path: Path) -> None:
    plan = with_altered(tmp_path)
    change = Changing(start(plan), plan)
    change.go_round()
    before = change.service.workers()
    (tmp_path / "new").touch()
    before["middle.0"].kill()
    words = (
        "worker middle.0 runs another FlowInfer than the service, whose code was changed meanwhile. Put the old code"
    )
    until(lambda: change.service.log.read_text().count(words) >= 2, "it's told each time")
    now = change.service.workers()
    assert all(now[name].pid == before[name].pid for name in ("front.0", "back.0"))
    refused = change.apply(with_replicas(plan, 2))
    assert not refused.ok and "isn't ready" in refused.text
    (tmp_path / "new").unlink()
    until(lambda: "Worker middle.0 is back." in change.service.log.read_text(), "the old code is back")
    change.go_round()
    (tmp_path / "new").touch()
    refused = change.apply(with_replicas(plan, 2))
    assert not refused.ok and "runs another FlowInfer than the service" in refused.text
    change.go_round()
    change.check_ends(allowed=frozenset({"worker_died"}))


def with_replicas(plan: Plan, count: int) -> Plan:
    middle = msgspec.structs.replace(plan.workers["middle"], replicas=count)
    return msgspec.structs.replace(plan, workers=plan.workers | {"middle": middle})


@pytest.mark.slow
def test_a_controller_of_other_code_starts_all_workers_anew(start: Start, tmp_path: Path) -> None:
    plan = loaded(tmp_path)
    change = Changing(start(plan, kept=True), plan)
    change.go_round()
    before = {process.pid for process in change.service.workers().values()}
    state = change.folder / "state.json"
    left = msgspec.json.decode(state.read_bytes())
    state.write_bytes(msgspec.json.encode(left | {"schema": "0123456789abcdef"}))
    change.kill_controller()
    assert (
        "FlowInfer was changed since the service started: all workers are started anew"
        in change.service.log.read_text()
    )
    change.go_round()
    assert not before & {process.pid for process in change.service.workers().values()}
    change.service.process.send_signal(signal.SIGTERM)
    change.service.wait_gone()
    assert change.service.process.returncode == 0


@pytest.mark.slow
def test_workers_that_listen_on_tcp_are_found_again(start: Start, tmp_path: Path) -> None:
    plan = msgspec.structs.replace(loaded(tmp_path), network=NetworkPlan(transport="tcp"))
    change = Changing(start(plan, kept=True), plan)
    change.go_round()
    change.kill_controller()
    change.go_round()
    change.must_apply(plan, "relay")
    change.check_ends()


def test_a_controller_that_dies_before_the_service_has_started_leaves_nothing(start: Start, tmp_path: Path) -> None:
    plan = loaded(tmp_path)
    blocked = msgspec.structs.replace(
        plan.stages["relay"], kind="altered:Blocked", config={"gate": str(tmp_path / "gate")}
    )
    service = start(msgspec.structs.replace(plan, stages=plan.stages | {"relay": blocked}), kept=True)
    until(lambda: "middle.0: opening relay" in service.log.read_text(), "it's opening")
    service.workers()
    (controller,) = psutil.Process(service.process.pid).children()
    controller.kill()
    service.wait_gone()
    assert service.process.returncode == 128 + signal.SIGKILL
    assert "was ended by SIGKILL before the service had started" in service.log.read_text()
