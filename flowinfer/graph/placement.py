"""Which worker runs which stage, and whether the workers and the network between them can do so."""

from __future__ import annotations

import ipaddress
from collections.abc import Set

from flowinfer.graph.model import Graph, Wire
from flowinfer.graph.plan import API, FRONT
from flowinfer.spec.hints import did_you_mean
from flowinfer.spec.models import Worker


def place_stages(graph: Graph) -> None:
    """Sets the worker of each stage; None where its place leads nowhere."""
    for name in graph.stages:
        graph.stages[name].worker = _worker_of(graph, name)


def workers(graph: Graph) -> dict[str, Worker]:
    """All workers by name; `front` is always there."""
    return graph.workers or {FRONT: Worker(), **graph.document.sections.workers}


def _worker_of(graph: Graph, name: str) -> str | None:
    """Follows `with` from stage to stage. A problem is reported by the stage that it starts from."""
    seen: list[str] = []
    here = name
    while True:
        if here in seen:
            if here == name:
                mark = graph.document.value_mark("stages", name, "place", "with")
                graph.problem("FI403", f"The place of `{name}` depends on itself: {' -> '.join([*seen, here])}.", mark)
            return None
        seen.append(here)
        entry = graph.document.sections.stages.get(here)
        if entry is None or entry.place is None:
            return FRONT if entry or here == API else None
        if entry.place.worker is not None:
            return _known_worker(graph, here, entry.place.worker, report=here == name)
        beside = entry.place.with_ or ""
        if beside not in graph.stages:
            if here == name and beside not in graph.document.sections.broken:
                mark = graph.document.value_mark("stages", name, "place", "with")
                graph.problem("FI402", f"There is no stage `{beside}`.", mark, did_you_mean(beside, graph.stages))
            return None
        here = beside


def _known_worker(graph: Graph, stage: str, worker: str, report: bool) -> str | None:
    known = [*workers(graph), *(graph.document.root.map["workers"].map if "workers" in graph.document.root.map else ())]
    if worker in known:
        return worker
    if "workers" in graph.document.sections.broken:
        return None
    if report:
        mark = graph.document.value_mark("stages", stage, "place", "worker")
        help = did_you_mean(worker, known) or f"Add it under workers: `{worker}:`."
        graph.problem("FI401", f"There is no worker `{worker}`.", mark, help)
    return None


def check_workers(graph: Graph) -> None:
    """Workers without stages, and a front that can't be doubled."""
    used = {stage.worker for stage in graph.stages.values()}
    complete = all(stage.worker for stage in graph.stages.values()) and not graph.document.sections.broken
    for name, worker in workers(graph).items():
        if name not in used and complete:
            mark = graph.document.mark("workers", name)
            graph.problem(
                "FI404", f"No stage runs in the worker `{name}`.", mark, f"Place one there, or write `{name}: !drop`."
            )
        if name == FRONT and worker.replicas > 1:
            mark = graph.document.value_mark("workers", name, "replicas")
            help = "Move the stages that need more processes into a worker of their own."
            graph.problem("FI411", "`front` holds the HTTP server and can't have replicas.", mark, help)


def check_wires(graph: Graph, reported: Set[frozenset[str]] = frozenset()) -> None:
    """Messages that can't leave their worker, loops that do, and replicas that would tear a stream apart.

    reported: pairs of stages of which it has been said that they belong into one worker.
    """
    placed = [w for w in graph.wires if graph.stages[w.source].worker and graph.stages[w.target].worker]
    apart = [wire for wire in placed if not graph.is_fused(wire)]
    torn = [wire for wire in apart if wire.out and wire.out.message.local and not wire.options.back]
    for wire in torn:
        if {wire.source, wire.target} not in reported:
            _report_local(graph, wire)
    for wire in placed:
        if wire.options.back:
            _check_loop(graph, wire, torn)
    for wire in apart:
        _check_replicas(graph, wire)


def _report_local(graph: Graph, wire: Wire) -> None:
    source, target = graph.stages[wire.source], graph.stages[wire.target]
    kind = wire.out.message.__name__ if wire.out else ""
    message = f"{kind} stays in device memory, but `{source.name}` and `{target.name}` run in different workers."
    notes = [(stage.mark, f"`{stage.name}` runs in `{stage.worker}`") for stage in (source, target)]
    graph.problem("FI405", message, wire.mark, f"Write `place: {{with: {source.name}}}` in `{target.name}`.", notes)


def _check_loop(graph: Graph, wire: Wire, torn: list[Wire]) -> None:
    ahead = graph.reach(wire.target, follow=lambda w: w.is_forward)
    loop = ahead & (graph.ancestors(wire.source) | {wire.source})
    elsewhere = sorted(name for name in loop if graph.stages[name].worker != graph.stages[wire.target].worker)
    if not elsewhere or any(w.source in loop and w.target in loop for w in torn):
        return
    notes = [(graph.stages[n].mark, f"`{n}` runs in `{graph.stages[n].worker}`") for n in (wire.target, *elsewhere)]
    message = f"The loop that `{wire.name}` closes leaves its worker at `{elsewhere[0]}`."
    graph.problem("FI406", message, wire.mark, f"Write `place: {{with: {wire.target}}}` in `{elsewhere[0]}`.", notes)


def _check_replicas(graph: Graph, wire: Wire) -> None:
    """A message that speaks of many requests can't be sent where each of them is served."""
    name = graph.stages[wire.target].worker or FRONT
    worker = workers(graph).get(name, Worker())
    if wire.out is None or worker.replicas == 1 or name == FRONT or "id" in wire.out.message.__struct_fields__:
        return
    kind = wire.out.message.__name__
    message = (
        f"{kind} carries many requests at once, so it can't be shared out over {worker.replicas} replicas of `{name}`."
    )
    notes = [(graph.document.mark("workers", name), f"`{name}` has {worker.replicas} replicas")]
    graph.problem("FI412", message, wire.mark, f"Place `{wire.target}` in a worker without replicas.", notes)


def check_network(graph: Graph) -> None:
    """TCP off this host needs keys; what only TCP uses is refused beside ipc."""
    network, document = graph.document.sections.network, graph.document
    if network.transport == "ipc":
        for key in ("bind", "curve"):
            if document.root.at("network", key):
                mark, help = document.mark("network", key), "Write `transport: tcp`, or remove it."
                graph.problem("FI410", f"`{key}` has no meaning with the transport ipc.", mark, help)
    elif network.curve is None and not _is_loopback(network.bind):
        message = f"tcp on {network.bind} without keys: anyone who reaches it could send messages to the workers."
        help = "Add `curve: {public_key: ..., secret_key_file: ...}`, or bind to 127.0.0.1."
        graph.problem("FI409", message, document.value_mark("network", "bind"), help)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
