"""A change on probation: what it replaced stays open and idle, and is what runs again when the change is taken back."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from changing import Changing
from services import Start, edge, loaded, plan_of, stage, until

from flowinfer.graph.plan import Plan
from flowinfer.runtime.rewire.control import ask
from flowinfer.runtime.rewire.protocol import Manner, Reply, Request


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def with_answerer(plan: Plan, **config: object) -> Plan:
    found = plan.stages["answer"]
    changed = msgspec.structs.replace(found, config=found.config | config)
    return msgspec.structs.replace(plan, stages=plan.stages | {"answer": changed})


def one_worker(tmp: Path) -> Plan:
    notes = str(tmp / "notes.txt")
    edges = [
        ("api", "relay", "Call", "calls"),
        ("relay", "answer", "Call", "calls"),
        ("answer", "api", "Text", "texts"),
    ]
    return plan_of(
        [
            stage("api", "Door", "front", file=notes, open=16),
            stage("relay", "CallRelay", "front"),
            stage("answer", "NotedAnswerer", "front", file=notes, delay=0.02, version=1),
        ],
        [msgspec.structs.replace(edge(*ends, 64), fused=True) for ends in edges],
        tmp,
    )


def recalled(change: Changing, request: Request) -> Reply:
    """Makes a change, and asks for a rollback as soon as its probation begins."""
    last = Reply()
    for reply in ask(change.folder, request):
        if reply.text.startswith("probation"):
            (said,) = change.ask(Request(do="rollback"))
            assert said.ok, said.text
        last = reply
    return last


def steps_of(change: Changing) -> list[str]:
    return [step.step for step in change.ask(Request(do="history"))[-1].steps]


def test_a_rollback_on_probation_brings_back_the_very_stage_that_was_replaced(start: Start, tmp_path: Path) -> None:
    plan = one_worker(tmp_path)
    change = Changing(start(plan), plan)
    change.go_round()
    new = with_answerer(plan, version=2)
    last = recalled(change, Request(do="apply", plan=new, manner=Manner(probation_s=60)))
    assert not last.ok and "somebody asked for it" in last.text
    assert change.status().stages["answer"].config["version"] == 1
    change.go_round()
    assert change.service.lines("opens") == ["opens 1", "opens 2"]
    until(lambda: change.service.lines("closes") == ["closes 2"], "the new stage is closed, and only that")
    change.must_apply(new)  # and it can still be changed
    change.go_round()
    assert change.service.lines("closes") == ["closes 2", "closes 1"]
    assert steps_of(change).count("balance") == 2
    change.check_ends()


def test_a_rollback_on_probation_brings_back_the_very_worker_that_was_replaced(start: Start, tmp_path: Path) -> None:
    plan = loaded(tmp_path, open=16)
    answer = stage("answer", "HoldingAnswerer", "back", delay=0.02, broken=False)
    plan = msgspec.structs.replace(plan, stages=plan.stages | {"answer": answer})
    change = Changing(start(plan), plan)
    change.go_round()
    pid = change.service.workers()["back.0"].pid
    last = recalled(change, Request(do="apply", plan=plan, renew=("answer",), manner=Manner(probation_s=60)))
    assert not last.ok and "somebody asked for it" in last.text
    workers = change.service.workers()
    assert workers["back.0"].pid == pid and "back.1" not in workers
    change.go_round()
    change.must_apply(plan, "answer")
    assert "back.0" not in change.service.workers()
    assert "imbalance" not in steps_of(change)
    change.check_ends()


def test_a_scaled_up_worker_goes_again_when_that_is_taken_back(start: Start, tmp_path: Path) -> None:
    plan = loaded(tmp_path, open=16)
    change = Changing(start(plan), plan)
    change.go_round()
    middle = msgspec.structs.replace(plan.workers["middle"], replicas=2)
    two = msgspec.structs.replace(plan, workers=plan.workers | {"middle": middle})
    last = recalled(change, Request(do="apply", plan=two, manner=Manner(probation_s=60)))
    assert not last.ok and change.status().workers["middle"].replicas == 1
    assert {name for name in change.service.workers() if name.startswith("middle")} == {"middle.0"}
    change.go_round()
    change.check_ends()


def test_a_change_that_makes_answers_slow_is_taken_back(start: Start, tmp_path: Path) -> None:
    plan = one_worker(tmp_path)
    change = Changing(start(plan), plan)
    change.go_round(400)  # long enough to know how fast it usually is
    slow = with_answerer(plan, delay=1.0)
    *_, last = change.ask(Request(do="apply", plan=slow, manner=Manner(probation_s=60)))
    assert not last.ok and "first tokens take" in last.text
    assert change.status().stages["answer"].config["delay"] == 0.02
    *_, last = change.ask(Request(do="apply", plan=slow, manner=Manner(probation_s=3, max_latency=1_000)))
    assert last.ok, last.text
    change.check_ends()
