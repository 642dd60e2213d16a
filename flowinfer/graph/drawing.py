"""The graph as Mermaid or DOT text, or as SVG (by `svg`)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flowinfer.graph.model import Graph, Wire
from flowinfer.graph.placement import workers
from flowinfer.graph.plan import API


def draw(graph: Graph, form: str) -> str:
    """The graph as `svg`, `mermaid` or `dot`, with both arms of an experiment. It must have been checked."""
    if graph.twin is not None:
        from flowinfer.graph.planner import joined

        graph = joined(graph)
    if form == "svg":
        from flowinfer.graph.svg import to_svg

        return to_svg(graph)
    return "\n".join(_mermaid(graph) if form == "mermaid" else _dot(graph)) + "\n"


def worker_title(graph: Graph, name: str) -> str:
    """`prefill ×2 · cuda:0`."""
    worker = workers(graph)[name]
    title = name + (f" ×{worker.replicas}" if worker.replicas > 1 else "")
    return title + (f" · {worker.device}" if worker.device != "auto" else "")


def members(graph: Graph) -> dict[str, list[str]]:
    """Stages of each worker that has any."""
    groups: dict[str, list[str]] = {}
    for stage in graph.stages.values():
        groups.setdefault(stage.worker or "", []).append(stage.name)
    return groups


def wire_label(wire: Wire) -> str:
    """The message, and how it's shared out where that isn't the default."""
    kind = wire.out.message.__name__ if wire.out else ""
    arm = f"{wire.arm.upper()}: " if wire.arm else ""
    return arm + kind + (f" by {wire.options.dispatch}" if wire.options.dispatch != "pull" else "")


def short_kind(kind: str) -> str:
    """A local file's kind without its folders."""
    return kind.rsplit("/", 1)[-1]


def _mermaid(graph: Graph) -> Iterator[str]:
    yield "flowchart LR"
    for worker, names in members(graph).items():
        yield f'  subgraph w_{_id(worker)}["{worker_title(graph, worker)}"]'
        for name in names:
            kind = short_kind(graph.stages[name].kind)
            label = name if kind == name else f"{name}<br/><small>{kind}</small>"
            yield f"    {_id(name)}" + (f'(["{label}"])' if name == API else f'["{label}"]')
        yield "  end"
    for wire in graph.wires:
        arrow = "-.->" if wire.options.back else "-->" if graph.is_fused(wire) else "==>"
        yield f'  {_id(wire.source)} {arrow}|"{wire_label(wire)}"| {_id(wire.target)}'


def _id(name: str) -> str:
    """`end` and other words of Mermaid can't be ids."""
    return "s_" + re.sub(r"[^a-z0-9_]", "_", name)


def _dot(graph: Graph) -> Iterator[str]:
    yield f'digraph "{graph.document.sections.name}" {{'
    yield '  rankdir=LR; node [shape=box, style="rounded,filled", fillcolor=white, fontname="Helvetica"];'
    yield '  edge [fontname="Helvetica", fontsize=10];'
    for worker, names in members(graph).items():
        yield f'  subgraph "cluster_{worker}" {{ label="{worker_title(graph, worker)}"; fontname="Helvetica";'
        for name in names:
            kind = short_kind(graph.stages[name].kind)
            label = name if kind == name else f"{name}\\n{kind}"
            yield f'    "{name}" [label="{label}"];'
        yield "  }"
    for wire in graph.wires:
        style = (
            ", style=dashed, constraint=false" if wire.options.back else "" if graph.is_fused(wire) else ", penwidth=2"
        )
        yield f'  "{wire.source}" -> "{wire.target}" [label="{wire_label(wire)}"{style}];'
    yield "}"
