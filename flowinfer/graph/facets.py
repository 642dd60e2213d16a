"""Follows facets along every path: what a message is sure to carry where it arrives, and what its consumer needs."""

from __future__ import annotations

from collections.abc import Iterable

from flowinfer.errors import Mark
from flowinfer.graph.catalog import adders
from flowinfer.graph.model import Graph, StageNode, Wire
from flowinfer.message import Prompt
from flowinfer.stage import Port

Facets = frozenset[str] | None  # None: not known, since a stage before is broken; anything may be there
GIVEN = {Prompt: frozenset({"tokens"})}  # by the type alone


class FacetFlow:
    """The facets of every wire of an acyclic graph. On several paths, those that all of them bring."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.order = graph.order()
        self._of: dict[tuple[str, str], Facets] = {}
        for name in self.order:
            stage = graph.stages[name]
            for out in stage.outputs or ():
                self._of[name, out.name] = self._output(stage, out)

    def of(self, wire: Wire) -> Facets:
        """What every message on this wire carries."""
        return self._of.get((wire.source, wire.out.name)) if wire.out else None

    def _output(self, stage: StageNode, out: Port) -> Facets:
        if stage.contract is None:
            return None
        given = frozenset().union(*(facets for kind, facets in GIVEN.items() if issubclass(out.message, kind)))
        passing = self.passing(stage.name, out)
        passed = _common(self.of(wire) for wire in passing) if passing or not self.graph.has_gaps else None
        return None if passed is None else (passed | given | stage.contract.adds) - stage.contract.drops

    def passing(self, stage: str, out: Port) -> list[Wire]:
        """Wires whose messages come out again here: facets stay on a message while its type only gets narrower."""
        return [
            wire
            for wire in self.graph.into(stage)
            if wire.is_forward and (wire.into is None or issubclass(out.message, wire.into.message))
        ]

    def sources(self, wire: Wire, facet: str) -> list[StageNode]:
        """The nearest stages upstream of a wire that add this facet."""
        stage = self.graph.stages[wire.source]
        if stage.contract and facet in stage.contract.adds:
            return [stage]
        found = [s for w in (self.passing(wire.source, wire.out) if wire.out else ()) for s in self.sources(w, facet)]
        return list({s.name: s for s in found}.values())


def _common(sets: Iterable[Facets]) -> Facets:
    """What all paths bring; a path of which nothing is known may bring anything."""
    every = list(sets)
    known = [facets for facets in every if facets is not None]
    if known:
        return frozenset.intersection(*known)
    return None if every else frozenset()


def check_facets(graph: Graph, flow: FacetFlow) -> None:
    """Every facet that a consumer needs must come on every path."""
    missed: set[tuple[str, str]] = set()  # stage and facet: what stands behind it lacks the facet for the same reason
    for wire in sorted(graph.wires, key=lambda wire: flow.order.index(wire.source)):
        target = graph.stages[wire.target]
        has = flow.of(wire)
        if target.contract is None or wire.into is None or has is None:
            continue
        for facet in sorted(target.contract.needs.get(wire.into.name, frozenset()) - has):
            before = {wire.source, *graph.ancestors(wire.source)}
            if not any((name, facet) in missed for name in before):
                _report(graph, flow, wire, facet)
            missed.add((wire.target, facet))


def _report(graph: Graph, flow: FacetFlow, wire: Wire, facet: str) -> None:
    target = graph.stages[wire.target]
    has = flow.of(wire) or frozenset()
    path = " -> ".join(_lacking_path(flow, wire, facet))
    notes: list[tuple[Mark | None, str]] = [
        (target.mark, f"{target} needs `{facet}` on its input `{wire.into.name if wire.into else ''}`"),
        (graph.stages[wire.source].mark, f"on the way {path} messages carry {_list(has)}"),
    ]
    message = f"`{target.name}` needs `{facet}`, but what comes from `{wire.source}` doesn't carry it."
    graph.problem("FI309", message, wire.mark, _help(graph, target, facet), notes)


def _lacking_path(flow: FacetFlow, wire: Wire, facet: str) -> list[str]:
    """One way from the start to this wire's end on which nobody adds the facet."""
    path = [wire.target, wire.source]
    while wire.out is not None:
        before = flow.passing(wire.source, wire.out) or [w for w in flow.graph.into(wire.source) if w.is_forward]
        lacking = [w for w in before if facet not in (flow.of(w) or frozenset())]
        if not lacking or lacking[0].source in path:
            break
        wire = lacking[0]
        path.append(wire.source)
    return path[::-1]


def _help(graph: Graph, target: StageNode, facet: str) -> str:
    here = [s for s in graph.stages.values() if s.contract and facet in s.contract.adds and s is not target]
    if here:
        return f"{here[0]} adds `{facet}`: put it before `{target.name}`."
    kinds = adders(facet)
    return f"A {' or a '.join(kinds)} upstream adds it." if kinds else f"Put a stage upstream that adds `{facet}`."


def _list(facets: frozenset[str]) -> str:
    return ", ".join(f"`{facet}`" for facet in sorted(facets)) or "no facets"
