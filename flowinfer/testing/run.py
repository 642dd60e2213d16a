"""Picks how a test file is run: plain ones as one graph, others as workers in virtual time or as true processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flowinfer.errors import FlowInferError, Problem, SpecError
from flowinfer.flow.replay import by_request
from flowinfer.graph.plan import API, Plan
from flowinfer.observe.where import requests_of
from flowinfer.runtime.models import fetch_models
from flowinfer.runtime.rewire.split import split
from flowinfer.spec.tree import Node
from flowinfer.testing.checks import Outcome, Run, case_outcome, difference, run_problems, text_of
from flowinfer.testing.checkup import check
from flowinfer.testing.file import Case, PipelineTest
from flowinfer.testing.inline import Given, InlineRun
from flowinfer.testing.mocks import copied, read_recording
from flowinfer.testing.plain import run_over_http as run_plain_over_http
from flowinfer.testing.plain import run_plain
from flowinfer.testing.surgery import around, mocked

WHOLE = "the run as a whole"


@dataclass
class Prepared:
    """A test that can be run: what is run, what is sent, and what a recording says of it."""

    test: PipelineTest
    plan: Plan
    cases: Sequence[Case]
    given: Given = field(default_factory=dict)
    recorded: dict[str, str] = field(default_factory=dict)


def run_inline(path: Path) -> Iterator[Outcome]:
    """Runs a test file in this process. Raises SpecError for mistakes in it."""
    test, node = PipelineTest.read(path)
    if test.is_plain:
        yield from run_plain(test, path)
        return
    ready = prepare(test, node, path)
    run = InlineRun(ready.plan, ready.cases, test.faults, test.expect, ready.given).run()
    yield from outcomes(ready, run, _other(test, node, path))


def run_over_http(path: Path, url: str) -> Iterator[Outcome]:
    """Runs a plain test file against a running service. Raises FlowInferError for one that needs its own workers."""
    test = PipelineTest.load(path)
    if not test.is_plain:
        raise FlowInferError(f"{path} changes the service or its workers.", help="Run it inline, or with --real.")
    yield from run_plain_over_http(path, url)


def prepare(test: PipelineTest, node: Node, path: Path) -> Prepared:
    """The plan with its mocks and its cut, and the cases. Raises SpecError for what doesn't fit the graph."""
    plan = _changed(test, test.plan(path), node, path)
    ready = Prepared(test, plan, test.cases)
    if problems := check(test, plan, node, path):
        raise SpecError(problems)
    if test.replay:
        assert test.recording is not None
        _add_recorded(ready, path.parent / test.recording)
    fetch_models(plan)
    return ready


def _changed(test: PipelineTest, plan: Plan, node: Node, path: Path) -> Plan:
    for i, mock in enumerate(test.mock):
        recording = mock.recording or test.recording
        plan = _at(lambda: mocked(plan, mock, path.parent / (recording or "")), node, "mock", i)  # noqa: B023
    if test.cut is not None:
        cut = test.cut
        plan = _at(lambda: around(plan, cut), node, "cut")
    return plan


def _at(make: object, node: Node, *where: str | int) -> Plan:
    try:
        return make()  # type: ignore[operator,no-any-return]
    except FlowInferError as error:
        at = node.at(*where)
        raise SpecError([Problem("FI511", error.message, (at or node).mark, error.help)]) from error


def _add_recorded(ready: Prepared, recording: Path) -> None:
    """What came into the cut, as cases, and what left it, by request."""
    inward = {edge.name for edge in ready.plan.edges if edge.source == API}
    outward = {edge.name for edge in ready.plan.edges if edge.target == API}
    records = read_recording(str(recording))
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


def _other(test: PipelineTest, node: Node, path: Path) -> Run | None:
    """The run of the pipeline that must answer the same, without faults."""
    plan = test.other_plan(path)
    if plan is None:
        return None
    return InlineRun(_changed(test, plan, node, path), test.cases).run()


def outcomes(ready: Prepared, run: Run, other: Run | None) -> Iterator[Outcome]:
    """How each case went, and the run as a whole."""
    test = ready.test
    others = {result.name: result for result in other.results} if other else {}
    for case, result in zip(ready.cases, run.results, strict=True):
        outcome = case_outcome(case, result, others.get(case.name), test.equivalent_to or "")
        if case.name in ready.given and (said := text_of(result.body)) != ready.recorded.get(case.name, "nothing"):
            problem = difference("what came out", said, ready.recorded.get(case.name, "nothing"))
            outcome = Outcome(case.name, outcome.text, (*outcome.problems, problem))
        yield outcome
    yield Outcome(WHOLE, "", tuple(run_problems(test.expect, run)))
