"""Which stages arm B of an experiment has of its own, and whether both arms can stand in one service.

A stage of arm B is one of its own where it differs from A's, and where it can't do without one that does: stages that
share a batch or settings with it. One plan of both is made in `graph.join`.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowinfer.graph.model import Graph, StageNode, Wire
from flowinfer.graph.plan import API
from flowinfer.spec.models import Worker

SUFFIX = "-b"


@dataclass(frozen=True)
class Twin:
    """The checked graph of arm B, beside that of arm A. own: its stages that A's requests don't pass."""

    graph: Graph
    own: frozenset[str]


def check_arms(graph: Graph, other: Graph) -> Twin:
    """What arm B (`other`) has of its own. Adds to the graph's problems what keeps it from standing beside arm A."""
    document, experiment = graph.document, graph.document.sections.experiment
    assert experiment is not None, "there are two arms"
    own = _own_stages(graph, other)
    mark = document.mark("experiment")
    if not own and _edges(graph) == _edges(other):
        help = "Change a stage or an edge under `with`."
        graph.problem("FI322", f"Arm B of `{experiment.name}` is the same as arm A.", mark, help)
    for section in ("serve", "network"):
        if getattr(document.sections, section) != getattr(other.document.sections, section):
            message = f"An arm of an experiment can't change `{section}`, which both arms share."
            graph.problem("FI218", message, mark, "Leave the variables alone that it names.")
    for name in sorted(own & graph.stages.keys()):
        if name + SUFFIX in graph.stages or name + SUFFIX in other.stages:
            taken = graph.stages.get(name + SUFFIX) or other.stages[name + SUFFIX]
            message = f"Arm B's own `{name}` would be named `{name}{SUFFIX}`, and there is a stage of that name."
            graph.problem("FI323", message, taken.mark, "Give that stage another name.")
    twin = Twin(other, own)
    _check_marked(graph, twin)
    return twin


# ------------------------------------------------------------------------------------------------- what has to be apart


def _own_stages(a: Graph, b: Graph) -> frozenset[str]:
    """Stages of B that aren't A's: those that differ, and what must be with them."""
    own = {name for name in b.stages if name != API and _differs(a, b, name)}
    while more := {name for name in b.stages.keys() - own - {API} if _goes_along(a, b, name, own)}:
        own |= more
    return frozenset(own)


def _differs(a: Graph, b: Graph, name: str) -> bool:
    mine, theirs = a.stages.get(name), b.stages[name]
    if mine is None or (mine.kind, mine.worker, mine.config) != (theirs.kind, theirs.worker, theirs.config):
        return True
    workers = [graph.document.sections.workers.get(theirs.worker or "", Worker()) for graph in (a, b)]
    return workers[0] != workers[1]


def _goes_along(a: Graph, b: Graph, name: str, own: set[str]) -> bool:
    stage = b.stages[name]
    others = [b.stages[other] for other in own]
    if any(_stay_together(stage, other) for other in others):
        return True
    reads = stage.contract.reads if stage.contract else frozenset()
    if reads & {other.kind for other in others}:
        return True
    for wire in (*b.into(name), *b.out_of(name)):
        there = wire.target if wire.source == name else wire.source
        if there in own and ((wire.out and wire.out.message.local) or wire.options.back):
            return True
    return _parts_steps(a, b, name, own)


def _stay_together(stage: StageNode, other: StageNode) -> bool:
    """They work on one memory, as those that share a batch."""
    if stage.worker != other.worker or stage.contract is None or other.contract is None:
        return False
    return other.kind in stage.contract.beside or stage.kind in other.contract.beside


def _parts_steps(a: Graph, b: Graph, name: str, own: set[str]) -> bool:
    """It would have to part messages of many requests by their arm, in a worker that doesn't know their requests."""
    stage = b.stages[name]
    if stage.worker == b.stages[API].worker:
        return False
    old = {_ends(wire) for wire in a.out_of(name)}
    branching = [wire for wire in b.out_of(name) if wire.target in own or _ends(wire) not in old]
    return any(wire.out and "id" not in wire.out.message.__struct_fields__ for wire in branching)


def _ends(wire: Wire) -> tuple[str, str, str, object]:
    return wire.source, wire.target, wire.into.name if wire.into else "", wire.options


def _edges(graph: Graph) -> set[tuple[str, str, str, object]]:
    return {_ends(wire) for wire in graph.wires}


def _check_marked(graph: Graph, twin: Twin) -> None:
    """A message that crosses workers on its way to where the arms part must be able to carry its arm."""
    parting = _parting(graph, twin)
    for wire in graph.wires:
        fields = wire.out.message.__struct_fields__ if wire.out else ("id", "arm")
        if graph.is_fused(wire) or "id" not in fields or "arm" in fields or wire.target in twin.own:
            continue
        if parting & graph.reach(wire.target, follow=lambda wire: wire.is_forward):
            kind = wire.out.message.__name__ if wire.out else ""
            message = f"{kind} has no field `arm`, so behind `{wire.name}` nobody would know a request's arm."
            help = f"Give {kind} a field `arm: str`, or place `{wire.target}` beside `{wire.source}`."
            graph.problem("FI324", message, wire.mark, help)


def _parting(graph: Graph, twin: Twin) -> set[str]:
    """Shared stages behind which the arms go different ways."""
    differing = _edges(graph) ^ _edges(twin.graph)
    parting = {source for source, *_ in differing if source not in twin.own and source in graph.stages}
    return parting | {
        wire.source for wire in twin.graph.wires if wire.target in twin.own and wire.source not in twin.own
    }
