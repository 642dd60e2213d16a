"""A test that can be run: its plan with mocks and cut, its cases, and what a recording says of them. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flowinfer.errors import FlowInferError, Problem, SpecError
from flowinfer.flow.replay import by_request
from flowinfer.graph.plan import API, Plan
from flowinfer.message import Message
from flowinfer.observe.where import requests_of
from flowinfer.runtime.models import fetch_models
from flowinfer.runtime.rewire.split import split
from flowinfer.spec.tree import Node
from flowinfer.testing.answers import copied, read_recording
from flowinfer.testing.checkup import check
from flowinfer.testing.file import Case, PipelineTest
from flowinfer.testing.surgery import around, mocked

Given = dict[str, list[tuple[float, Message]]]  # messages of a recording by request, with seconds after the first


@dataclass
class Prepared:
    """A test that can be run: what is run, what is sent, and what a recording says of it."""

    test: PipelineTest
    plan: Plan
    cases: Sequence[Case]
    given: Given = field(default_factory=dict)
    recorded: dict[str, str] = field(default_factory=dict)


def prepare(test: PipelineTest, node: Node, path: Path) -> Prepared:
    """The plan with its mocks and its cut, and the cases. Raises SpecError for what doesn't fit the graph."""
    plan = changed(test, test.plan(path), node, path)
    ready = Prepared(test, plan, test.cases)
    if problems := check(test, plan, node, path):
        raise SpecError(problems)
    if test.replay:
        assert test.recording is not None
        _add_recorded(ready, path.parent / test.recording)
    fetch_models(plan)
    return ready


def changed(test: PipelineTest, plan: Plan, node: Node, path: Path) -> Plan:
    for i, mock in enumerate(test.mock):
        recording = mock.recording or test.recording
        plan = _at(lambda: mocked(plan, mock, path.parent / (recording or "")), node, "mock", i)  # noqa: B023
    if test.cut is not None:
        cut = test.cut
        plan = _at(lambda: around(plan, cut), node, "cut")
    return plan


def _at(make: Callable[[], Plan], node: Node, *where: str | int) -> Plan:
    try:
        return make()
    except FlowInferError as error:
        at = node.at(*where)
        raise SpecError([Problem("FI511", error.message, (at or node).mark, error.help)]) from error


def _add_recorded(ready: Prepared, recording: Path) -> None:
    """What came into the cut, as cases, and what left it, by request."""
    inward = {edge.name for edge in ready.plan.edges if edge.source == API}
    outward = {edge.name for edge in ready.plan.edges if edge.target == API}
    records = read_recording(str(recording), inward | outward)
    began: dict[str, float] = {}
    for record in records:
        for request in requests_of(record.message) if record.edge in inward else ():
            mine, _ = split(copied(record.message), {request})
            assert mine is not None
            after = record.at - began.setdefault(request, record.at)
            ready.given.setdefault(request, []).append((after, mine))
    recorded = [Case.model_construct(name=name, message={}, at=at) for name, at in began.items()]
    ready.cases = [*ready.cases, *recorded]
    ready.recorded = by_request(record.message for record in records if record.edge in outward)
