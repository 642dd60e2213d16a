"""Mistakes of a test file that only its graph shows: what isn't there, and faults that can't be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from flowinfer.errors import FlowInferError, Problem
from flowinfer.graph.plan import API, Plan
from flowinfer.message import type_registry
from flowinfer.observe.catalog import BY_NAME
from flowinfer.observe.where import compile_where
from flowinfer.spec.hints import did_you_mean
from flowinfer.spec.tree import Node
from flowinfer.testing.faults import instance_of
from flowinfer.testing.file import Fault, PipelineTest
from flowinfer.testing.messages import made_message

SUFFIXES = ("_bucket", "_count", "_sum")


def check(test: PipelineTest, plan: Plan, node: Node, path: Path) -> list[Problem]:
    """Every mistake. plan: what is run, with mocks and cut."""
    return [
        *_recordings(test, node, path),
        *(problem for i, fault in enumerate(test.faults) for problem in _fault(fault, plan, node, i)),
        *_expectations(test, plan, node),
        *_cases(test, plan, node),
    ]


def _problem(code: str, message: str, node: Node, *path: str | int, help: str = "") -> Problem:
    """At the value of this path, or what is nearest to it."""
    at = node.at(*path)
    while at is None and path:
        path = path[:-1]
        at = node.at(*path)
    return Problem(code, message, (at or node).mark, help)


def _recordings(test: PipelineTest, node: Node, path: Path) -> Iterator[Problem]:
    for i, mock in enumerate(test.mock):
        name = mock.recording or test.recording
        if name is None:
            text = "The mock has no recording, and the file names none."
            yield _problem("FI506", text, node, "mock", i, help="recording: x.flow, as `flowinfer record` writes it.")
    for name, where in [
        (test.recording, ("recording",)),
        *((m.recording, ("mock", i, "recording")) for i, m in enumerate(test.mock)),
    ]:
        if name is not None and not (path.parent / name).exists():
            text = f"There is no recording {name}."
            yield _problem("FI506", text, node, *where, help=f"flowinfer record {test.pipeline} -o {name} makes one.")


def _fault(fault: Fault, plan: Plan, node: Node, index: int) -> Iterator[Problem]:
    at = ("faults", index, fault.kind)
    if fault.kind == "kill":
        if not instance_of(plan, fault.target):
            names = [*plan.workers, *(name for name in plan.stages if name != API)]
            text = f"There is no stage, worker or instance {fault.target!r} to kill."
            yield _problem("FI503", text, node, *at, help=did_you_mean(fault.target, names))
        elif fault.edge is not None:
            yield from _trigger(fault, plan, node, index)
        return
    if fault.kind == "full_disk":
        yield from _disk(fault, plan, node, *at)
        return
    yield from _edge(fault.target, plan, node, *at)
    edge = next((edge for edge in plan.edges if edge.name == fault.target), None)
    if edge is not None and fault.kind != "delay" and _is_call(plan, edge.source, edge.target):
        what = "credit" if fault.kind == "drop_credit" else "frames"
        worker = plan.stages[edge.source].worker
        text = f"{edge.name} has no {what}: both ends are in the worker {worker!r}, where an edge is a call."
        yield _problem("FI504", text, node, *at, help="Place one of them elsewhere, or strike another edge.")


def _trigger(fault: Fault, plan: Plan, node: Node, index: int) -> Iterator[Problem]:
    assert fault.edge is not None
    found = list(_edge(fault.edge, plan, node, "faults", index, "edge"))
    yield from found
    edge = next((edge for edge in plan.edges if edge.name == fault.edge), None)
    worker = instance_of(plan, fault.target).rpartition(".")[0]
    if edge is not None and worker not in (plan.stages[edge.source].worker, plan.stages[edge.target].worker):
        text = f"{edge.name} neither begins nor ends in the worker {worker!r}, which is to die with its message."
        yield _problem("FI505", text, node, "faults", index, "edge", help="Name an edge of that worker.")


def _disk(fault: Fault, plan: Plan, node: Node, *at: str | int) -> Iterator[Problem]:
    if fault.target not in plan.stages:
        names = [name for name in plan.stages if name != API]
        yield _problem(
            "FI503", f"There is no stage {fault.target!r}.", node, *at, help=did_you_mean(fault.target, names)
        )
        return
    tiers = plan.stages[fault.target].config.get("tiers") or {}
    if not tiers.get("disk"):
        text = f"The stage {fault.target!r} has no disk tier that could be full."
        yield _problem("FI503", text, node, *at, help="Set its tiers: {disk: {path: ..., size: ...}}.")


def _is_call(plan: Plan, source: str, target: str) -> bool:
    return plan.stages[source].worker == plan.stages[target].worker


def _edge(name: str, plan: Plan, node: Node, *at: str | int) -> Iterator[Problem]:
    names = [edge.name for edge in plan.edges]
    if name not in names:
        help = did_you_mean(name, names) or f"Edges: {', '.join(names)}."
        yield _problem("FI502", f"There is no edge {name!r} in what is run.", node, *at, help=help)


def _expectations(test: PipelineTest, plan: Plan, node: Node) -> Iterator[Problem]:
    if test.expect is None:
        return
    kinds = {edge.name: edge.message for edge in plan.edges}
    for written in node.at("expect", "edges").map if node.at("expect", "edges") else ():  # type: ignore[union-attr]
        name = " -> ".join(part.strip() for part in written.split("->"))
        yield from _edge(name, plan, node, "expect", "edges", written)
        wanted = test.expect.edges.get(name)
        if wanted is not None and wanted.where and name in kinds:
            yield from _where(wanted.where, kinds[name], node, "expect", "edges", written, "where")
        if wanted is not None and wanted.order is not None and not test.replay:
            yield from _names(wanted.order, test, node, "expect", "edges", written, "order")
    if test.expect.order is not None and not test.replay:
        yield from _names(test.expect.order, test, node, "expect", "order")
    for name in test.expect.restarts:
        if not instance_of(plan, name):
            help = did_you_mean(name, [*plan.workers, *plan.stages])
            yield _problem(
                "FI503", f"There is no stage, worker or instance {name!r}.", node, "expect", "restarts", name, help=help
            )
    known = [name + suffix for name in BY_NAME for suffix in ("", *SUFFIXES)]
    for name in test.expect.metrics:
        if name not in known:
            text = f"There is no metric {name!r}."
            yield _problem("FI508", text, node, "expect", "metrics", name, help=did_you_mean(name, list(BY_NAME)))


def _names(order: Iterable[str], test: PipelineTest, node: Node, *at: str | int) -> Iterator[Problem]:
    known = [case.name for case in test.cases]
    for i, name in enumerate(order):
        if name not in known:
            yield _problem("FI507", f"No case is called {name!r}.", node, *at, i, help=did_you_mean(name, known))


def _where(text: str, kind: str, node: Node, *at: str | int) -> Iterator[Problem]:
    try:
        compile_where(text, type_registry.get(kind))
    except FlowInferError as error:
        yield _problem("FI509", error.message.removeprefix("--where, "), node, *at, help=error.help)


def _cases(test: PipelineTest, plan: Plan, node: Node) -> Iterator[Problem]:
    inward = [edge for edge in plan.edges if edge.source == API]
    outward = [edge for edge in plan.edges if edge.target == API]
    for i, case in enumerate(test.cases):
        if case.message is not None and test.cut is None:
            text = f"Case {case.name!r} is a message, which only a cut takes."
            yield _problem("FI510", text, node, "cases", i, "message", help="Give chat or prompt, or a cut.")
        if case.message is not None and test.cut is not None:
            try:
                made_message(inward[0].message, case.name, case.message)
            except FlowInferError as error:
                yield _problem("FI510", error.message, node, "cases", i, "message", help=error.help)
        if case.message is None and test.cut is not None and inward[0].message != "Call":
            text = f"Case {case.name!r} is a request, but {inward[0].name} carries {inward[0].message}."
            yield _problem("FI510", text, node, "cases", i, help="Give a `message` with fields of it.")
        if case.expect is not None and case.expect.where is not None:
            if test.cut is None:
                text = "`where` looks at messages that leave a cut, and there is none."
                yield _problem("FI510", text, node, "cases", i, "expect", "where")
            elif len(outward) == 1:
                yield from _where(case.expect.where, outward[0].message, node, "cases", i, "expect", "where")
