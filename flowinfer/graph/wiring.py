"""Joins the ends of an edge by type: the output of one stage that an input of the other takes."""

from __future__ import annotations

from collections.abc import Iterable

from flowinfer.errors import Mark
from flowinfer.graph.catalog import converters
from flowinfer.graph.model import Graph, StageNode, Wire
from flowinfer.spec.edges import EdgeKey, End
from flowinfer.spec.hints import did_you_mean
from flowinfer.spec.models import Edge
from flowinfer.stage import Port

Pair = tuple[Port, Port]


def connect(graph: Graph, key: EdgeKey, options: Edge) -> None:
    """Adds the wire of an edge; without ports when its ends can't be joined."""
    known = [_exists(graph, end) for end in (key.source, key.target)]
    if not all(known):
        return
    pair = _resolve(graph, key)
    mark = key.source.mark
    path = _path(graph, key)
    out, into = pair or (None, None)
    wire = Wire(str(key), key.source.stage, key.target.stage, mark, options, path, out, into)
    twin = next((w for w in graph.wires if pair and _ends(w) == _ends(wire)), None)
    if twin:
        note = (twin.mark, "the first one is here")
        graph.problem("FI313", f"`{key}` is the same edge as `{twin.name}`.", mark, "Remove one of them.", [note])
        return
    graph.wires.append(wire)


def _ends(wire: Wire) -> tuple[object, ...]:
    names = (wire.out and wire.out.name, wire.into and wire.into.name)
    return (wire.source, wire.target, *names)


def _path(graph: Graph, key: EdgeKey) -> tuple[str, str]:
    text = next(text for text, (k, _) in graph.document.sections.edges.items() if k is key)
    return ("edges", text)


def _exists(graph: Graph, end: End) -> bool:
    if end.stage in graph.stages:
        return True
    if end.stage not in graph.document.sections.broken and "stages" not in graph.document.sections.broken:
        names = [*graph.stages, *graph.document.sections.broken]
        graph.problem("FI301", f"There is no stage `{end.stage}`.", end.mark, did_you_mean(end.stage, names))
    return False


def _resolve(graph: Graph, key: EdgeKey) -> Pair | None:
    source, target = graph.stages[key.source.stage], graph.stages[key.target.stage]
    outs = _named(graph, source, key.source, source.outputs, "output")
    ins = _named(graph, target, key.target, target.inputs, "input")
    if outs is None or ins is None:
        return None
    pairs = _fitting(outs, ins)
    if len(pairs) == 1:
        return pairs[0]
    if pairs:
        _report_ambiguous(graph, key, pairs)
    else:
        _report_misfit(graph, key, outs, ins)
    return None


def _named(
    graph: Graph, stage: StageNode, end: End, ports: tuple[Port, ...] | None, word: str
) -> tuple[Port, ...] | None:
    """The ports that an end may mean: the one it names, or all."""
    if ports is None or end.port is None:
        return ports
    found = tuple(port for port in ports if port.name == end.port)
    if not found:
        help = did_you_mean(end.port, [port.name for port in ports]) or f"It has no {word}s."
        graph.problem("FI304", f"{stage} has no {word} `{end.port}`.", end.mark, help, [(stage.mark, describe(stage))])
        return None
    return found


def _fitting(outs: Iterable[Port], ins: Iterable[Port]) -> list[Pair]:
    """Pairs whose types fit; where one input takes several types, the nearest of them."""
    best: dict[tuple[str, str], Pair] = {}
    for out in outs:
        for into in ins:
            if issubclass(out.message, into.message):
                held = best.get((out.name, into.name))
                if held is None or issubclass(into.message, held[1].message):
                    best[out.name, into.name] = (out, into)
    return list(best.values())


def _report_ambiguous(graph: Graph, key: EdgeKey, pairs: list[Pair]) -> None:
    a, b = key.source.stage, key.target.stage
    choices = [f"`{a}.{out.name} -> {b}.{into.name}`" for out, into in pairs]
    graph.problem("FI303", f"`{key}` could mean {' or '.join(choices)}.", key.source.mark, f"Write one: {choices[0]}.")


def _report_misfit(graph: Graph, key: EdgeKey, outs: tuple[Port, ...], ins: tuple[Port, ...]) -> None:
    source, target = graph.stages[key.source.stage], graph.stages[key.target.stage]
    gives, takes = _types(outs) or "nothing", _types(ins) or "nothing"
    notes: list[tuple[Mark | None, str]] = [(source.mark, describe(source)), (target.mark, describe(target))]
    message = f"`{source.name}` gives {gives}, but `{target.name}` takes {takes}."
    graph.problem("FI302", message, key.source.mark, _between(source, target, outs, ins), notes)


def _between(source: StageNode, target: StageNode, outs: tuple[Port, ...], ins: tuple[Port, ...]) -> str:
    if _fitting(target.outputs or (), source.inputs or ()):
        return f"Turn it round: `{target.name} -> {source.name}`."
    kinds = converters(outs, ins)
    return f"Put a {' or a '.join(kinds)} between them." if kinds else ""


def _types(ports: Iterable[Port]) -> str:
    return " or ".join(dict.fromkeys(port.message.__name__ for port in ports))


def describe(stage: StageNode) -> str:
    """What a stage takes and gives, in one line."""
    takes = ", ".join(f"{port.name}: {port.message.__name__}" for port in stage.inputs or ()) or "nothing"
    gives = ", ".join(f"{port.name}: {port.message.__name__}" for port in stage.outputs or ()) or "nothing"
    return f"{stage} takes {takes} and gives {gives}"
