"""Is every port connected, every stage reached, every loop closed on purpose, every answer given once?"""

from __future__ import annotations

from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from flowinfer.errors import Mark
from flowinfer.graph.model import Graph, StageNode, Wire
from flowinfer.graph.plan import API
from flowinfer.stage import Port


def check_ports(graph: Graph) -> None:
    """Every input fed, every output taken, every stage reachable from the api."""
    if graph.has_gaps or len(graph.stages) == 1:
        return
    loose = _check_api(graph)
    for stage in graph.stages.values():
        if stage.name == API:
            continue
        if not _is_mentioned(graph, stage.name):
            help = f"Add its edges, or remove it; {_port_list(stage)}."
            graph.problem("FI312", f"{stage} isn't connected.", stage.mark, help)
            loose.add(stage.name)
        elif _check_inputs(graph, stage) | _check_outputs(graph, stage):
            loose.add(stage.name)
    _check_reachable(graph, loose)


def _is_mentioned(graph: Graph, name: str) -> bool:
    edges = graph.document.sections.edges.values()
    return any(name in (key.source.stage, key.target.stage) for key, _ in edges)


def _is_certain(graph: Graph, stage: str, *, into: bool) -> bool:
    """False while an edge on this side is broken, since it may be the one that is missed."""
    wires = graph.into(stage) if into else graph.out_of(stage)
    return all(wire.out is not None for wire in wires)


def _check_api(graph: Graph) -> set[str]:
    """Stages that hang on nothing because the api has no edge."""
    mark = graph.document.mark("edges")
    if not any(key.source.stage == API for key, _ in graph.document.sections.edges.values()):
        help = _first(graph, lambda s: _feeds(graph.stages[API].outputs, s.inputs), "`api -> {}`")
        graph.problem("FI308", "Nothing takes the calls of `api`, so no request would be served.", mark, help)
        return set(graph.stages)
    if not any(key.target.stage == API for key, _ in graph.document.sections.edges.values()):
        help = _first(graph, lambda s: _feeds(s.outputs, graph.stages[API].inputs), "`{} -> api`")
        graph.problem("FI308", "Nothing leads back to `api`, so no request would be answered.", mark, help)
    return set()


def _first(graph: Graph, fits: object, text: str) -> str:
    names = [s.name for s in graph.stages.values() if s.name != API and callable(fits) and fits(s)]
    return f"Add {text.format(names[0])}." if names else ""


def _feeds(outs: Iterable[Port] | None, ins: Iterable[Port] | None) -> bool:
    ins = tuple(ins or ())
    return any(issubclass(out.message, into.message) for out in outs or () for into in ins)


def _check_inputs(graph: Graph, stage: StageNode) -> bool:
    if not _is_certain(graph, stage.name, into=True):
        return False
    fed = {wire.into.name for wire in graph.into(stage.name) if wire.into}
    api = graph.stages[API] if not any(graph.out_of(API)) else None  # which has been said
    missing = [p for p in _by_name(stage.inputs) if p.name not in fed and not (api and _feeds(api.outputs, [p]))]
    for port in missing:
        message = f"Nothing feeds the input `{port.name}` of {stage}."
        giver = next((s for s in graph.stages.values() if s is not stage and _feeds(s.outputs, [port])), None)
        help = f"Add `{giver.name} -> {stage.name}`." if giver else f"It takes {port.message.__name__}."
        graph.problem("FI305", message, stage.mark, help)
    return bool(missing)


def _check_outputs(graph: Graph, stage: StageNode) -> bool:
    if not _is_certain(graph, stage.name, into=False):
        return False
    taken = {wire.out.name for wire in graph.out_of(stage.name) if wire.out}
    api = graph.stages[API] if not any(graph.into(API)) else None  # which has been said
    missing = [p for p in stage.outputs or () if p.name not in taken and not (api and _feeds([p], api.inputs))]
    for port in missing:
        message = f"Nothing takes the output `{port.name}` of {stage}."
        taker = next((s for s in graph.stages.values() if s is not stage and _feeds([port], s.inputs)), None)
        help = f"Add `{stage.name} -> {taker.name}`." if taker else f"It gives {port.message.__name__}."
        graph.problem("FI306", message, stage.mark, help)
    return bool(missing)


def _by_name(ports: Iterable[Port] | None) -> Iterable[Port]:
    return {port.name: port for port in ports or ()}.values()


def _check_reachable(graph: Graph, loose: set[str]) -> None:
    reached = graph.reach(API)
    for stage in (stage for name, stage in graph.stages.items() if name not in reached):
        before = graph.reach(stage.name, back=True)
        if all(_is_certain(graph, name, into=True) for name in before) and not before & loose:
            message = f"No request ever reaches {stage}."
            graph.problem("FI307", message, stage.mark, "Lead a path from `api` to it, or remove it.")


def _port_list(stage: StageNode) -> str:
    takes = " or ".join(p.message.__name__ for p in stage.inputs or ()) or "nothing"
    gives = " and ".join(p.message.__name__ for p in stage.outputs or ()) or "nothing"
    return f"it takes {takes} and gives {gives}"


def check_loops(graph: Graph) -> None:
    """Loops without a back edge, and back edges without a loop."""
    forward = [wire for wire in graph.wires if wire.is_forward and wire.out]
    while cycle := _cycle(graph, forward):
        closing = _closing(graph, forward, cycle)
        message = f"{' -> '.join(cycle)} is a loop, and none of its edges says so."
        help = f"If `{closing.name}` closes it on purpose, write `{closing.name}: {{back: true}}`."
        graph.problem("FI310", message, closing.mark, help)
        forward.remove(closing)
    for wire in graph.wires:
        if wire.options.back and wire.source not in graph.reach(wire.target, follow=lambda w: w.is_forward):
            message = f"`{wire.name}` is a back edge, but nothing leads from `{wire.target}` to `{wire.source}`."
            mark = graph.document.mark(*wire.path, "back")
            graph.problem("FI311", message, mark, "Remove `back: true`, or add the way there.")


def _cycle(graph: Graph, forward: list[Wire]) -> list[str]:
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for wire in forward:
        sorter.add(wire.target, wire.source)
    try:
        sorter.prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _closing(graph: Graph, forward: list[Wire], cycle: list[str]) -> Wire:
    """The edge of a loop that was written last among those that go against the order of the stages."""
    steps = set(pairwise(cycle))
    wires = [wire for wire in forward if (wire.source, wire.target) in steps]
    place = {name: index for index, name in enumerate(graph.stages)}
    against = [wire for wire in wires if place[wire.source] >= place[wire.target]]
    return (against or wires)[-1]


def check_answers(graph: Graph) -> None:
    """An output with two consumers sends to both; if both lead to the api, a request would be answered twice."""
    for stage in graph.stages.values():
        for port in stage.outputs or ():
            wires = [w for w in graph.out_of(stage.name) if w.out and w.out.name == port.name and not w.options.back]
            if len(wires) < 2:
                continue
            answering = [w for w in wires if API in graph.reach(w.target)]
            if len(answering) > 1:
                _report_double(graph, port, answering)


def _report_double(graph: Graph, port: Port, wires: list[Wire]) -> None:
    first, second = wires[0], wires[1]
    notes: list[tuple[Mark | None, str]] = [(first.mark, f"`{first.name}` takes the same messages")]
    message = f"`{second.name}` would answer each request a second time: `{port.name}` goes to both consumers."
    graph.problem("FI314", message, second.mark, "Keep one of them on the way to `api`.", notes)
