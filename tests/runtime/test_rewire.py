"""Changes of a running service of plain stages in real processes: nothing lost, repeated or failed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import psutil
import pytest
from changing import Changing
from services import Start, edge, loaded, plan_of, stage, until

from flowinfer.graph.plan import Plan, StagePlan
from flowinfer.runtime.rewire.control import ask
from flowinfer.runtime.rewire.journal import Journal
from flowinfer.runtime.rewire.protocol import Manner, Reply, Request


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "flowinfer"


def with_config(plan: Plan, name: str, **config: object) -> Plan:
    found = plan.stages[name]
    return msgspec.structs.replace(
        plan, stages=plan.stages | {name: msgspec.structs.replace(found, config=found.config | config)}
    )


def with_stage(plan: Plan, new: StagePlan) -> Plan:
    return msgspec.structs.replace(plan, stages=plan.stages | {new.name: new})


def in_one_worker(tmp: Path) -> Plan:
    """The door, a relay and a slow answerer, all in the front worker."""
    return plan_of(
        [
            stage("api", "Door", "front", file=str(tmp / "notes.txt"), open=32),
            stage("relay", "CallRelay", "front"),
            stage("answer", "LateAnswerer", "front", delay=0.02),
        ],
        [
            msgspec.structs.replace(edge("api", "relay", "Call", "calls", 64), fused=True),
            msgspec.structs.replace(edge("relay", "answer", "Call", "calls", 64), fused=True),
            msgspec.structs.replace(edge("answer", "api", "Text", "texts", 64), fused=True),
        ],
        tmp,
    )


def test_twenty_swaps_and_live_changes_lose_nothing(start: Start, tmp_path: Path) -> None:
    plan = in_one_worker(tmp_path)
    change = Changing(start(plan), plan)
    change.go_round()
    for number in range(10):
        change.must_apply(change.plan, "answer")
        change.must_apply(with_config(change.plan, "answer", delay=0.01 + 0.001 * number))
    change.go_round()
    assert "epoch 21" in change.ask(Request(do="history"))[-1].steps[-1].text
    change.check_ends()


def test_a_stage_is_put_on_an_edge_and_taken_off_again(start: Start, tmp_path: Path) -> None:
    plan = in_one_worker(tmp_path)
    change = Changing(start(plan), plan)
    change.go_round()
    fused = [msgspec.structs.replace(edge(*ends, "Call", "calls", 64), fused=True) for ends in _WITH]
    more = msgspec.structs.replace(
        with_stage(plan, stage("second", "CallRelay", "front")),
        edges=(plan.edges[0], *fused, plan.edges[2]),
        workers={"front": msgspec.structs.replace(plan.workers["front"], stages=("api", "relay", "second", "answer"))},
    )
    for _ in range(2):
        change.must_apply(more)
        change.go_round(50)
        change.must_apply(plan)
        change.go_round(50)
    change.check_ends()


_WITH = (("relay", "second"), ("second", "answer"))


def test_a_worker_is_scaled_up_replaced_and_scaled_down(start: Start, tmp_path: Path) -> None:
    plan = loaded(tmp_path, open=32)
    change = Changing(start(plan), plan)
    change.go_round()
    middle = plan.workers["middle"]
    two = msgspec.structs.replace(plan, workers=plan.workers | {"middle": msgspec.structs.replace(middle, replicas=2)})
    change.must_apply(two)
    assert {"middle.0", "middle.1"} <= change.service.workers().keys()
    change.go_round()
    change.must_apply(plan)
    assert "middle.1" not in change.service.workers()
    change.go_round()
    change.check_ends()


def test_a_worker_that_holds_its_requests_is_replaced_beside_itself(start: Start, tmp_path: Path) -> None:
    plan = with_stage(loaded(tmp_path, open=32), stage("answer", "HoldingAnswerer", "back", delay=0.05))
    change = Changing(start(plan), plan)
    change.go_round()
    first = change.service.workers()["back.0"].pid
    change.must_apply(plan, "answer")
    assert [name for name in change.service.workers() if name.startswith("back.")] == ["back.1"]
    change.must_apply(with_stage(plan, stage("answer", "HoldingAnswerer", "back", delay=0.01, broken=False)))  # live
    change.go_round()
    assert not psutil.pid_exists(first)
    change.check_ends()


def test_the_dispatch_of_an_edge_between_workers_changes_under_load(start: Start, tmp_path: Path) -> None:
    plan = loaded(tmp_path, open=32)
    middle = msgspec.structs.replace(plan.workers["middle"], replicas=2)
    plan = msgspec.structs.replace(plan, workers=plan.workers | {"middle": middle})
    change = Changing(start(plan), plan)
    change.go_round()
    for dispatch, lanes in (("hash", ("",)), ("bucket", ("short", "long")), ("pull", ("",))):
        first = msgspec.structs.replace(plan.edges[0], dispatch=dispatch, lanes=lanes, key="id")
        change.must_apply(msgspec.structs.replace(plan, edges=(first, *plan.edges[1:])))
        change.go_round()
    assert not any(step.step == "pause" for step in change.ask(Request(do="history"))[-1].steps)
    change.check_ends()


@pytest.mark.parametrize(("step", "victim"), [("prepare", "middle.0"), ("drain", "middle.0"), ("drain", "back.0")])
def test_a_worker_that_is_killed_in_a_change_leaves_one_whole_epoch(
    start: Start, tmp_path: Path, step: str, victim: str
) -> None:
    plan = with_stage(loaded(tmp_path, open=16), stage("answer", "HoldingAnswerer", "back", delay=0.2))
    change = Changing(start(plan), plan)
    change.go_round(20)
    workers, killed, last = change.service.workers(), False, Reply()
    for reply in ask(change.folder, Request(do="apply", plan=plan, renew=("answer",), manner=Manner(probation_s=0.05))):
        if reply.text.startswith(step) and not killed:
            workers[victim].kill()
            killed = True
        last = reply
    until(lambda: not workers[victim].is_running(), "it's dead")
    (status,) = change.ask(Request(do="status"))
    assert killed and status.plan is not None
    assert status.plan.epoch == (2 if last.ok else 1)
    until(lambda: {"front.0", "middle.0"} <= change.service.workers().keys(), "all workers are there")
    change.go_round()
    assert len([name for name in change.service.workers() if name.startswith("back.")]) == 1
    assert {line.split()[3] for line in change.service.lines("failed")} <= {"worker_died"}


def test_what_cannot_start_is_refused_and_nothing_has_changed(start: Start, tmp_path: Path) -> None:
    plan = in_one_worker(tmp_path)
    change = Changing(start(plan), plan)
    change.go_round()
    bad = with_stage(plan, stage("answer", "BrokenAnswerer", "front"))
    refused = change.apply(bad)
    assert not refused.ok and "there is no such model here" in refused.text
    port = msgspec.structs.replace(plan, serve=msgspec.structs.replace(plan.serve, port=1))
    assert "serve.port" in change.apply(port).text
    assert "Nothing differs" in change.apply(plan).text
    (status,) = change.ask(Request(do="status"))
    assert status.plan is not None and status.plan.epoch == 1
    change.go_round()
    change.check_ends()


def test_a_stage_that_breaks_on_probation_is_taken_back(start: Start, tmp_path: Path) -> None:
    plan = in_one_worker(tmp_path)
    change = Changing(start(plan), plan)
    change.go_round()
    reverted = change.apply(with_config(plan, "answer", broken=True))
    assert not reverted.ok and "that can't be" in reverted.text
    assert {step.step for step in change.ask(Request(do="history"))[-1].steps} >= {"rollback", "failed"}
    failed = len(change.service.lines("failed"))
    change.go_round()
    assert len(change.service.lines("failed")) == failed
    assert failed > 0


def test_old_requests_are_failed_at_the_deadline(start: Start, tmp_path: Path) -> None:
    plan = with_config(in_one_worker(tmp_path), "answer", delay=1_000.0)
    plan = with_config(plan, "api", open=3, calls=3)
    change = Changing(start(plan), plan)
    until(lambda: len(change.service.lines("made")) == 3, "three requests are open")
    assert change.apply(plan, "answer", drain="0.1").ok
    until(lambda: len(change.service.lines("failed")) == 3, "they are told")
    assert all(line.split()[2:] == ["503", "rewired"] for line in change.service.lines("failed"))


def test_what_does_not_fit_beside_pauses_the_service_and_comes_back(start: Start, tmp_path: Path) -> None:
    plan = loaded(tmp_path, open=4)
    change = Changing(start(plan), plan)
    change.go_round()
    threads = msgspec.structs.replace(plan.workers["back"], threads=2)
    change.must_apply(msgspec.structs.replace(plan, workers=plan.workers | {"back": threads}))
    change.go_round()
    assert change.service.lines("failed") == []
    broken = with_stage(change.plan, stage("answer", "BrokenAnswerer", "back"))
    broken = msgspec.structs.replace(broken, workers=plan.workers)
    assert "The service runs as before" in change.apply(broken).text
    change.go_round()
    last = change.ask(Request(do="rollback", manner=Manner(probation_s=0.05)))[-1]
    assert last.ok and last.plan is not None and last.plan.workers["back"].threads == 1
    change.go_round()


def test_the_journal_outlives_a_killed_controller_and_nothing_is_left(
    start: Start, tmp_path: Path, state: Path
) -> None:
    plan = with_config(in_one_worker(tmp_path), "answer", delay=1_000.0)
    change = Changing(start(plan), plan)
    until(lambda: len(change.service.lines("made")) == 32, "requests are open")
    asking = ask(change.folder, Request(do="apply", plan=plan, renew=("answer",)))
    assert any(reply.text.startswith("drain") for reply in iter(lambda: next(asking), None))
    change.service.process.kill()
    change.service.wait_gone()
    unfinished = [step.step for step in Journal("test", state).unfinished()]
    assert unfinished[0] == "begin" and unfinished[-1] == "drain"
    again = start(plan)
    again.wait_ready()
    assert "The last run ended in the step 'drain' of a change" in again.log.read_text()
    assert Journal("test", state).unfinished() == []
    again.process.kill()
    again.wait_gone()
