"""Settings that a running service takes in place, in every process."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from changing import Changing
from services import Start, loaded, until

from flowinfer.graph.diff import compare
from flowinfer.graph.plan import Plan
from flowinfer.observe.logs import read
from flowinfer.runtime.loading import load_class


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def with_levels(plan: Plan, service: str, **workers: str) -> Plan:
    changed = {name: msgspec.structs.replace(plan.workers[name], log_level=level) for name, level in workers.items()}
    serve = msgspec.structs.replace(plan.serve, log_level=service)
    return msgspec.structs.replace(plan, serve=serve, workers=plan.workers | changed)


def test_the_log_level_is_changed_in_place_for_the_service_or_one_worker(start: Start, tmp_path: Path) -> None:
    plan = loaded(tmp_path)
    change = Changing(start(plan), plan)

    def who(level: str) -> set[str]:
        return {line.worker for line in read(change.folder) if line.level == level}

    change.go_round()
    assert who("DEBUG") == set()
    new = with_levels(plan, "debug", back="error")
    assert {(c.path, c.kind) for c in compare(plan, new, lambda stage: load_class(stage.kind)).changes} == {
        ("serve.log_level", "live"),
        ("workers.back.log_level", "live"),
    }
    pids = {name: process.pid for name, process in change.service.workers().items()}
    change.must_apply(new)
    until(lambda: who("DEBUG") == {"front.0", "middle.0"}, "those two tell more")
    assert {name: process.pid for name, process in change.service.workers().items()} == pids
    change.check_ends()
