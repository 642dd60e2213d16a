"""Arms of an experiment inside a worker: what moves between workers stays in its arm, and whose credit is taken."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flowinfer.graph import load_plan
from flowinfer.graph.join import without_experiment
from flowinfer.graph.plan import EdgePlan, Plan, StagePlan, WorkerPlan
from flowinfer.message import Call, Event, HandOff, Prompt, Replay, Sampling, Sequence, Text
from flowinfer.runtime.local import LocalService
from flowinfer.runtime.rewire.controller import _unchanged
from flowinfer.runtime.worker import Worker
from flowinfer.stage import Stage

EXPERIMENT = Path(__file__).parents[2] / "pipelines" / "experiments" / "live-no-speculation.yaml"


@pytest.mark.parametrize(
    ("kind", "arm", "found"),
    [
        ("moe-decode", "", ["decode.0"]),
        ("moe-decode", "a", ["decode.0"]),
        ("moe-decode", "b", ["decode-b.0"]),
        ("prefill", "b", ["prefill.0"]),
    ],
)
def test_running_sequences_move_only_to_workers_of_their_arm(kind: str, arm: str, found: list[str]) -> None:
    peers = {"prefill.0": 1, "decode.0": 1, "decode-b.0": 1}
    worker: Any = SimpleNamespace(plan=load_plan(EXPERIMENT), peers=peers, member=SimpleNamespace(leaving=set()))
    worker._worker_of = lambda instance: instance.rpartition(".")[0]
    assert Worker.instances(worker, kind, arm) == found


class Mover(Stage):
    """Takes requests that come from elsewhere."""

    listens = (Replay, HandOff)
    heard: list[str]

    def open(self) -> None:
        self.heard = []

    def observe(self, event: Event) -> None:
        carried = event.prompt if isinstance(event, Replay) else event.sequence  # type: ignore[attr-defined]
        self.heard.append(carried.id)

    def step(self, calls: list[Call]) -> Iterable[Text]:
        return ()


def two_arms() -> Plan:
    stages = {
        name: StagePlan(name=name, kind=kind, config={}, worker="front", arm=arm)
        for name, kind, arm in (("api", "api", ""), ("say", "x", "a"), ("say-b", "x", "b"))
    }
    edges = [
        EdgePlan(name=f"{a} -> {b}", source=a, target=b, message=message, port=port, fused=True, arm=arm)
        for a, b, message, port, arm in (
            ("api", "say", "Call", "calls", "a"),
            ("api", "say-b", "Call", "calls", "b"),
            ("say", "api", "Text", "texts", "a"),
            ("say-b", "api", "Text", "texts", "b"),
        )
    ]
    workers = {"front": WorkerPlan(name="front", stages=tuple(stages))}
    return Plan(name="x", digest="", file="x.yaml", stages=stages, edges=tuple(edges), workers=workers)


def test_what_moves_here_is_heard_by_the_stages_of_its_arm_and_remembered() -> None:
    with LocalService(two_arms(), stages={"say": Mover, "say-b": Mover}, inline=True) as service:
        for event in (Replay(prompt=prompt(Prompt, "1", "")), HandOff(sequence=prompt(Sequence, "2", "b"))):
            service.group.handle(event)
        heard = {name: service.stage(name).heard for name in ("say", "say-b")}  # type: ignore[attr-defined]
        assert heard == {"say": ["1"], "say-b": ["2"]}
        assert service.group.arms == {"2": "b"}
        service.group.end(["1", "2"])
        assert service.group.arms == {}
        service.group.handle(HandOff(sequence=prompt(Sequence, "2", "b")))  # too late
        assert service.group.arms == {}


def prompt(kind: type[Any], id: str, arm: str) -> Any:
    return kind(id=id, tokens=np.zeros(2, np.int32), sampling=Sampling(), arm=arm)


@pytest.mark.parametrize("pipeline", ["prod", "colocated", "quickstart"])
def test_a_worker_of_arm_b_that_leaves_still_knows_all_that_it_is_connected_to(pipeline: str) -> None:
    over = "{with: {stages: {prefill: {with: {dtype: float32}}}}, split: 50%}"
    joint = load_plan(EXPERIMENT.parents[1] / f"{pipeline}.yaml", sets=[f"experiment={over}"])
    assert joint.experiment is not None and joint.experiment.workers
    for worker in joint.experiment.workers:
        plan = _unchanged(joint, without_experiment(joint), worker)
        for edge in plan.edges:
            assert {plan.stages[end].worker for end in (edge.source, edge.target)} <= plan.workers.keys()
        own = set(joint.workers[worker].stages)
        assert [e for e in joint.edges if {e.source, e.target} & own and e not in plan.edges] == []
