"""Changes of a running service of plain stages in real processes: nothing lost, repeated or failed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from services import Service, Start, edge, plan_of, stage, until

from flowinfer.graph.plan import Plan, StagePlan
from flowinfer.runtime.rewire.control import ask
from flowinfer.runtime.rewire.protocol import SERVICE, Reply, Request


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "flowinfer"


class Changing:
    """A running service and the way to change it."""

    def __init__(self, service: Service, plan: Plan) -> None:
        self.service, self.plan = service, plan
        service.wait_ready()
        (found,) = (service.tmp / f"flowinfer-{os.getuid()}").glob(f"*/{SERVICE}")
        self.folder = found.parent

    def ask(self, request: Request) -> list[Reply]:
        return list(ask(self.folder, request))

    def apply(self, plan: Plan, *renew: str, drain_s: float | None = None) -> Reply:
        *_, last = self.ask(Request(do="apply", plan=plan, renew=renew, drain_s=drain_s, probation_s=0.05))
        return last

    def must_apply(self, plan: Plan, *renew: str) -> None:
        last = self.apply(plan, *renew)
        assert last.ok, (last.text, self.service.log.read_text())
        self.plan = plan

    def go_round(self, count: int = 100) -> None:
        before = len(self.service.lines("answered"))
        until(lambda: len(self.service.lines("answered")) > before + count, "requests go round")

    def check_ends(self) -> None:
        """Stops the service; every request that was made has had exactly one answer."""
        self.service.process.send_signal(signal.SIGTERM)
        self.service.wait_gone()
        assert self.service.process.returncode == 0, self.service.log.read_text()
        assert self.service.lines("failed") == []
        made = {line.split()[1] for line in self.service.lines("made")}
        answered = Counter(line.split()[1] for line in self.service.lines("answered"))
        assert made == set(answered) and set(answered.values()) == {1}
        assert self.service.lines("closed") == ["closed 0"]


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
