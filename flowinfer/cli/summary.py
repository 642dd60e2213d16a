"""What a checked file comes to, on half a screen: workers with their stages, edges with types, facets and transport."""

from __future__ import annotations

import click

from flowinfer.graph.facets import FacetFlow
from flowinfer.graph.model import Graph, Wire
from flowinfer.graph.plan import API
from flowinfer.graph.planner import plan_of


def summary(graph: Graph, *, color: bool = False) -> str:
    """Text for the terminal."""
    plan = plan_of(graph)
    stages, wires = len(plan.stages) - 1, len(plan.edges)
    head = f"{graph.document.file} is right: {_count(stages, 'stage')}, {_count(wires, 'edge')}, "
    processes = sum(worker.replicas for worker in plan.workers.values())
    head += f"{_count(len(plan.workers), 'worker')} ({_count(processes, 'process')})"
    bold = (lambda text: click.style(text, bold=True)) if color else str
    return "\n".join([bold(head), "", *_workers(graph), "", *_edges(graph)])


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}{'es' if word.endswith('s') else 's'}"


def _workers(graph: Graph) -> list[str]:
    plan = plan_of(graph)
    rows: list[tuple[str, ...]] = [("worker", "device", "stages")]
    for worker in plan.workers.values():
        name = worker.name + (f" x{worker.replicas}" if worker.replicas > 1 else "")
        rows.append((name, worker.device, ", ".join(stage for stage in worker.stages)))
    return _table(rows)


def _edges(graph: Graph) -> list[str]:
    flow = FacetFlow(graph)
    rows: list[tuple[str, ...]] = [("edge", "message", "by", "carries")]
    for wire in sorted(graph.wires, key=lambda wire: flow.order.index(wire.source)):
        facets = ", ".join(sorted(flow.of(wire) or ()))
        rows.append((wire.name, wire.out.message.__name__ if wire.out else "", transport(graph, wire), facets))
    return _table(rows)


def transport(graph: Graph, wire: Wire) -> str:
    """How messages of this edge travel: `call` inside a worker, else ipc or tcp, and how they are shared out."""
    how = "call" if graph.is_fused(wire) else graph.document.sections.network.transport
    extras: list[str] = [wire.options.dispatch] if wire.options.dispatch != "pull" else []
    extras += ["back"] if wire.options.back and API not in (wire.source, wire.target) else []
    return " ".join([how, *extras])


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
