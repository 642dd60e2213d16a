"""Changes a plan for a test: stages that a recording speaks for, a part without the rest. Runs nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec
import networkx as nx

from flowinfer.errors import FlowInferError
from flowinfer.flow.replay import cut as cut_part
from flowinfer.graph.plan import API, FRONT, EdgePlan, Plan, StagePlan, WorkerPlan
from flowinfer.spec.hints import did_you_mean
from flowinfer.testing.file import Cut, Mock
from flowinfer.testing.mocks import kind_of


def mocked(plan: Plan, mock: Mock, recording: Path) -> Plan:
    """The plan with one stage, named as the first of those that it replaces, that speaks from the recording."""
    part = _between(plan, mock.first, mock.last or mock.first)
    inward = [edge for edge in plan.edges if edge.target in part and edge.source not in part]
    outward = [edge for edge in plan.edges if edge.source in part and edge.target not in part]
    if unread := [edge.name for edge in (*inward, *outward) if edge.message == "Sequence"]:
        raise FlowInferError(
            f"{unread[0]} carries keys and values, which aren't recorded.",
            help="Mock all stages from the one that computes them to the one that reads them.",
        )
    worker = mock.worker or plan.stages[mock.first].worker
    if worker not in plan.workers:
        raise FlowInferError(f"There is no worker {worker!r}.", help=did_you_mean(worker, plan.workers))
    ports = _ports(inward)
    stage = StagePlan(
        name=mock.first,
        kind=kind_of("Mock", {port: edge.message for edge, port in ports}, _messages(outward)),
        config={
            "recording": str(recording.resolve()),
            "inward": [edge.name for edge in inward],
            "outward": [edge.name for edge in outward],
            "speed": 0.0 if mock.speed == "max" else mock.speed,
        },
        worker=worker,
        mark=plan.stages[mock.first].mark,
    )
    edges = {edge.name: edge for edge in plan.edges if not (edge.source in part and edge.target in part)}
    for edge, port in ports:
        edges[edge.name] = msgspec.structs.replace(edge, target=stage.name, port=port, unit="messages")
    for edge in outward:
        edges[edge.name] = msgspec.structs.replace(edges[edge.name], source=stage.name)
    kept = {
        name: stage if name == mock.first else old
        for name, old in plan.stages.items()
        if name not in part or name == mock.first
    }
    return _placed(plan, kept, edges.values())


def around(plan: Plan, cut: Cut) -> Plan:
    """The part of the plan that a cut leaves, with a stage around it in the place of the api."""
    part = cut_part(plan, cut.first or "", cut.last or "")
    messages = [edge.message for edge in part.inward]
    if twice := [message for message in messages if messages.count(message) > 1]:
        raise FlowInferError(f"Several edges carry {twice[0]} into the cut.", help="Cut elsewhere.")
    if not part.inward or not part.outward:
        raise FlowInferError("Nothing comes into the cut, or nothing leaves it.", help="Cut elsewhere.")
    ports = _ports(part.outward)
    kind = kind_of("Outside", {port: edge.message for edge, port in ports}, messages)
    worker = plan.stages[API].worker if API in plan.stages else FRONT
    stages = {**part.plan.stages, API: StagePlan(name=API, kind=kind, config={}, worker=worker)}
    edges = [*part.plan.edges, *(msgspec.structs.replace(edge, source=API) for edge in part.inward)]
    edges += [msgspec.structs.replace(edge, target=API, port=port, unit="messages", back=False) for edge, port in ports]
    return _placed(plan, stages, edges)


def _between(plan: Plan, first: str, last: str) -> frozenset[str]:
    for name in (first, last):
        if name not in plan.stages or name == API:
            known = [stage for stage in plan.stages if stage != API]
            raise FlowInferError(f"There is no stage {name!r} to mock.", help=did_you_mean(name, known))
    graph = nx.DiGraph((edge.source, edge.target) for edge in plan.edges if API not in (edge.source, edge.target))
    graph.add_nodes_from(name for name in plan.stages if name != API)
    part = ({first} | nx.descendants(graph, first)) & ({last} | nx.ancestors(graph, last))
    if not part:
        raise FlowInferError(f"No way leads from {first!r} to {last!r}.", help="Name them in the order of the graph.")
    return frozenset(part)


def _ports(edges: Collection[EdgePlan]) -> list[tuple[EdgePlan, str]]:
    """The edges with a port of its own for each; two parameters of one stage can't share a name."""
    names: list[str] = []
    for edge in edges:
        taken = names.count(edge.port)
        names.append(edge.port if not taken else f"{edge.port}_{'more_' * taken}".rstrip("_"))
    return list(zip(edges, names, strict=True))


def _messages(edges: Iterable[EdgePlan]) -> list[str]:
    return list(dict.fromkeys(edge.message for edge in edges))


def _placed(plan: Plan, stages: dict[str, StagePlan], edges: Iterable[EdgePlan]) -> Plan:
    """The plan of these stages and edges; workers that have none left are gone."""
    workers: dict[str, WorkerPlan] = {}
    for name, worker in plan.workers.items():
        own = [stage for stage in worker.stages if stage in stages and stages[stage].worker == name]
        own += [stage.name for stage in stages.values() if stage.worker == name and stage.name not in own]
        own = [stage for stage in own if stage != API] + [API] * (API in own)
        if own:
            workers[name] = msgspec.structs.replace(worker, stages=tuple(own))
    fused = [
        msgspec.structs.replace(edge, fused=stages[edge.source].worker == stages[edge.target].worker) for edge in edges
    ]
    return msgspec.structs.replace(plan, stages=stages, edges=tuple(fused), workers=workers)
