"""What a checked file comes to, on half a screen: workers with their stages, edges with types, facets and transport."""

from __future__ import annotations

from dataclasses import replace

import click

from flowinfer.graph.facets import FacetFlow
from flowinfer.graph.kv_edges import kv_transports
from flowinfer.graph.model import Graph, Wire
from flowinfer.graph.plan import API, Plan
from flowinfer.graph.planner import joined, plan_of
from flowinfer.units import format_share


def summary(graph: Graph, *, color: bool = False) -> str:
    """Text for the terminal."""
    plan = plan_of(graph)
    stages, wires = len(plan.stages) - 1, len(plan.edges)
    head = f"{graph.document.file} is right: {_count(stages, 'stage')}, {_count(wires, 'edge')}, "
    processes = sum(worker.replicas for worker in plan.workers.values())
    head += f"{_count(len(plan.workers), 'worker')} ({_count(processes, 'process')})"
    bold = (lambda text: click.style(text, bold=True)) if color else str
    return "\n".join([bold(head), *_experiment(plan), "", *_workers(graph), "", *_edges(joined(graph))])


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}{'es' if word.endswith('s') else 's'}"


def _experiment(plan: Plan) -> list[str]:
    """What an experiment does, and what arm B has of its own."""
    if plan.experiment is None:
        return []
    own = [name for name, stage in plan.stages.items() if stage.arm == "b"]
    what = f"experiment {plan.experiment.name}: {plan.experiment.mode} {format_share(plan.experiment.share)}"
    return [f"{what}; arm B has {', '.join(own) if own else 'edges'} of its own"]


def _workers(graph: Graph) -> list[str]:
    plan = plan_of(graph)
    rows: list[tuple[str, ...]] = [("worker", "device", "stages")]
    for worker in plan.workers.values():
        name = worker.name + (f" x{worker.replicas}" if worker.replicas > 1 else "")
        rows.append((name, worker.device, ", ".join(stage for stage in worker.stages)))
    return _table(rows)


def _edges(graph: Graph) -> list[str]:
    order = graph.order()
    flows = {
        arm: FacetFlow(replace(graph, wires=[wire for wire in graph.wires if wire.arm in ("", arm)])) for arm in "ab"
    }
    rows: list[tuple[str, ...]] = [("edge", "message", "by", "carries")]
    for wire in sorted(graph.wires, key=lambda wire: order.index(wire.source)):
        facets = ", ".join(sorted(flows[wire.arm or "a"].of(wire) or ()))
        rows.append((wire.name, wire.out.message.__name__ if wire.out else "", transport(graph, wire), facets))
    return _table(rows)


def transport(graph: Graph, wire: Wire) -> str:
    """How messages of this edge travel: `call` inside a worker, else ipc or tcp, and how they are shared out.

    For an edge that carries KV also how that comes, where it isn't a call.
    """
    how = "call" if graph.is_fused(wire) else graph.document.sections.network.transport
    extras: list[str] = [wire.options.dispatch] if wire.options.dispatch != "pull" else []
    extras += [f"arm {wire.arm.upper()}"] if wire.arm else []
    extras += ["back"] if wire.options.back and API not in (wire.source, wire.target) else []
    extras += [f"kv:{'|'.join(kv_transports(graph, wire))}"] if how != "call" and kv_transports(graph, wire) else []
    return " ".join([how, *extras])


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
