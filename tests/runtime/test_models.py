"""A plan's models are on this machine before anything starts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from flowinfer.errors import ModelError, StageError
from flowinfer.graph import load_plan
from flowinfer.graph.plan import Plan
from flowinfer.runtime.models import fetch_models

PIPELINES = Path(__file__).parents[2] / "pipelines"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What the plan asks of the cache: names, and whether a missing one is to be fetched."""
    from flowinfer.engine import hub

    log: list[tuple[str, bool]] = []
    monkeypatch.setattr(hub, "resolve", lambda model, *, pull=False: log.append((model, pull)))
    return log


@pytest.mark.parametrize("name", ["quickstart", "colocated", "prod"])
def test_a_model_is_fetched_once_however_many_stages_name_it(name: str, asked: list[tuple[str, bool]]) -> None:
    sets = ["vars.model=org/name", "stages.verify.with.draft=ngram"]
    fetch_models(load_plan(PIPELINES / f"{name}.yaml", sets=sets))
    assert asked == [("org/name", True)]


def test_a_graph_without_models_asks_for_none(asked: list[tuple[str, bool]]) -> None:
    fetch_models(Plan(name="plain", digest="", file="plain.yaml", stages={}, edges=(), workers={}))
    assert asked == []


def test_a_model_that_cannot_be_had_is_told_at_the_stage_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from flowinfer.engine import hub

    def missing(model: str, *, pull: bool = False) -> Path:
        raise ModelError(f"{model} can't be had: no route.", help="Check the network.")

    monkeypatch.setattr(hub, "resolve", missing)
    plan = load_plan(PIPELINES / "quickstart.yaml")
    stages = {name: msgspec.structs.replace(stage, mark="pipe.yaml:7:3") for name, stage in plan.stages.items()}
    with pytest.raises(StageError, match=r"\(pipe.yaml:7:3\): smollm2-135m can't be had: no route. Check the network."):
        fetch_models(msgspec.structs.replace(plan, stages=stages))
