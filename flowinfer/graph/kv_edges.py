"""Edges that carry KV: by which transport it goes, and whether the one that a file names can be."""

from __future__ import annotations

from flowinfer.graph.agreement import unit_of
from flowinfer.graph.model import Graph, Wire
from flowinfer.graph.placement import workers
from flowinfer.graph.plan import FRONT
from flowinfer.graph.transports import AUTO, TRANSPORTS, End, fitting, why_not


def kv_transports(graph: Graph, wire: Wire) -> list[str]:
    """Names of the transports that an edge may use; [] for edges without KV, several while devices aren't known."""
    if unit_of(graph, wire) != "blocks":
        return []
    wanted = getattr(graph.stages[wire.target].config, "transport", AUTO)
    if wanted == AUTO or graph.is_fused(wire):
        return fitting(*_ends(graph, wire))
    return [wanted]


def check_transports(graph: Graph) -> None:
    """A transport by name must suit both ends."""
    for wire in graph.wires:
        target = graph.stages[wire.target]
        wanted = getattr(target.config, "transport", AUTO)
        if unit_of(graph, wire) != "blocks" or graph.is_fused(wire) or wanted not in TRANSPORTS or not target.worker:
            continue
        owner, taker = _ends(graph, wire)
        if not TRANSPORTS[wanted].is_there:
            mark = graph.document.value_mark("stages", wire.target, "with", "transport")
            message = f"transport {wanted} isn't installed here."
            help = f"Run: pip install 'flowinfer[{TRANSPORTS[wanted].extra}]'. Or remove `transport`."
            graph.problem("FI415", message, mark, help)
        elif reason := why_not(wanted, owner, taker):
            mark = graph.document.value_mark("stages", wire.target, "with", "transport")
            notes = [
                (graph.document.mark("workers", end.worker), f"`{end.worker}` runs on {end.device}")
                for end in dict.fromkeys((owner, taker))
                if end.worker != FRONT
            ]
            message = f"Keys and values can't go from `{wire.source}` to `{wire.target}` by {wanted}: {reason}."
            best = " or ".join(fitting(owner, taker))
            graph.problem("FI415", message, mark, f"Remove `transport`, and it will be {best}.", notes)


def _ends(graph: Graph, wire: Wire) -> tuple[End, End]:
    known = workers(graph)
    names = [graph.stages[stage].worker or FRONT for stage in (wire.source, wire.target)]
    owner, taker = (End(name, known[name].device if name in known else AUTO) for name in names)
    return owner, taker
