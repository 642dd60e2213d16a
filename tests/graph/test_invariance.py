"""batch_invariant in a file: what is refused, and what a plan and a change say of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowinfer.graph import invariance
from flowinfer.graph.checker import check
from flowinfer.graph.diff import compare
from flowinfer.graph.kernel_set import kernel_set
from flowinfer.graph.planner import load_plan
from flowinfer.runtime.loading import load_class
from flowinfer.spec import load

PROD = Path(__file__).parents[2] / "pipelines" / "prod.yaml"
ON = "batch_invariant=true"
MINI, DENSE = "vars.model=flowinfer-mini", "vars.model=smollm2-135m"


def messages(*sets: str) -> list[str]:
    return [problem.message for problem in check(load(PROD, sets=[ON, *sets])).problems]


def test_a_plan_names_its_kernels_only_where_they_are_asked_for() -> None:
    assert load_plan(PROD).kernels == ""
    assert load_plan(PROD, sets=[ON]).kernels == kernel_set(invariance.device_kind("auto"))


def test_kernel_sets_of_devices_differ() -> None:
    assert kernel_set("cpu") != kernel_set("cuda")
    assert len(kernel_set("cpu")) < 60


def test_one_type_of_device_by_any_name_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "count_gpus", lambda: 0)
    assert messages(DENSE, "workers.decode.device=cpu") == []
    monkeypatch.setattr(invariance, "count_gpus", lambda: 2)
    (message,) = messages(DENSE, "workers.decode.device=cpu")
    assert "on one device type" in message


def test_deepseek_v4_keeps_it_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert messages(MINI) == []
    monkeypatch.setattr(invariance, "count_gpus", lambda: 1)
    assert messages(MINI) == []


def test_a_running_service_does_not_take_the_switch() -> None:
    plans = load_plan(PROD), load_plan(PROD, sets=[ON])
    (change,) = compare(*plans, lambda stage: load_class(stage.kind)).changes
    assert (change.path, change.kind) == ("batch_invariant", "refused")
