"""Makes one plan of both arms of an experiment: what differs is there twice, everything else is shared.

Arm B's own stages are named `NAME-b`; those that hold weights or memory run in workers of their own, so that their
death is no concern of arm A.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter

import msgspec

from flowinfer.graph.arms import SUFFIX, Twin
from flowinfer.graph.inherit import filled_root
from flowinfer.graph.model import Graph, StageNode, Wire
from flowinfer.graph.placement import workers
from flowinfer.graph.plan import API, FRONT, EdgePlan, ExperimentPlan, Plan, StagePlan, WorkerPlan
from flowinfer.spec.models import Experiment, Worker
from flowinfer.spec.show import to_yaml


def join_arms(a: Plan, b: Plan, graph: Graph, twin: Twin) -> Plan:
    """The plan of both arms."""
    return _Joint(a, b, graph, twin).plan()


class _Joint:
    def __init__(self, a: Plan, b: Plan, graph: Graph, twin: Twin) -> None:
        self.a, self.b, self.graph, self.twin = a, b, graph, twin
        found = graph.document.sections.experiment
        assert found is not None, "there are two arms"
        self.experiment: Experiment = found
        self.names = {name: name + SUFFIX if name in a.stages else name for name in twin.own}
        self.workers = {name: self.worker_of(twin.graph.stages[name]) for name in twin.own}

    def worker_of(self, stage: StageNode) -> str:
        """Where a stage of arm B runs: what is light stays in its worker at the door, the rest goes into its own."""
        worker = stage.worker or FRONT
        if self.experiment.workers == "shared" or worker not in self.a.workers:
            return worker
        siblings = [self.twin.graph.stages[name] for name in self.twin.own]
        heavy = [other for other in siblings if other.worker == worker and is_heavy(other)]
        at_door = worker == self.a.stages[API].worker
        moves = stage in heavy if at_door else bool(heavy)
        return worker + SUFFIX if moves else worker

    def plan(self) -> Plan:
        edges = tuple(self.edges())
        stages = self.stages(edges)
        workers = dict(self.all_workers(stages))
        edges = tuple(
            msgspec.structs.replace(edge, fused=stages[edge.source].worker == stages[edge.target].worker)
            for edge in edges
        )
        added = tuple(name for name in workers if name not in self.a.workers)
        plan = ExperimentPlan(
            name=self.experiment.name,
            mode="split" if self.experiment.split is not None else "mirror",
            share=self.experiment.split if self.experiment.split is not None else self.experiment.mirror or 0.0,
            base=self.a.digest,
            digest=hashlib.sha256(f"{self.a.digest} {self.b.digest}".encode()).hexdigest()[:16],
            changes=self.changes(),
            workers=added,
        )
        api = stages[API]
        config = api.config | {"experiment": self.settings(plan)}
        return msgspec.structs.replace(
            self.a,
            digest=_digest(self.a, self.b, self.experiment),
            stages=stages | {API: msgspec.structs.replace(api, config=config)},
            edges=edges,
            workers=workers,
            experiment=plan,
        )

    def settings(self, plan: ExperimentPlan) -> dict[str, object]:
        """What the gateway must know."""
        written = self.experiment.model_dump(
            mode="json", by_alias=True, exclude={"with_", "split", "mirror", "workers"}
        )
        return written | {
            "mode": plan.mode,
            "share": plan.share,
            "digest": plan.digest,
            "service": self.a.name,
            "workers": list(plan.workers),
            "workers_a": [name for name in self.a.workers if self.is_left(name)],
            "changes": plan.changes,
        }

    def is_left(self, worker: str) -> bool:
        """True for a worker of arm A whose stages all have a counterpart in arm B, or none."""
        shared = self.a.stages.keys() & self.b.stages.keys() - self.twin.own
        return not shared.intersection(self.a.workers[worker].stages)

    def changes(self) -> str:
        texts = []
        for graph in (self.graph, self.twin.graph):
            root = filled_root(graph)
            texts.append(to_yaml(root.with_map({k: v for k, v in root.map.items() if k != "experiment"})).splitlines())
        of_a, of_b = texts
        return "\n".join(difflib.unified_diff(of_a, of_b, "A", "B", n=1, lineterm=""))

    # -- stages --------------------------------------------------------------------------------------------------------

    def stages(self, edges: Iterable[EdgePlan]) -> dict[str, StagePlan]:
        """Each stage behind those that feed it."""
        only_a = {name for name in self.a.stages if name not in self.b.stages or name in self.twin.own}
        found = {
            name: msgspec.structs.replace(stage, arm="a") if name in only_a else stage
            for name, stage in self.a.stages.items()
        }
        for name in self.b.stages:
            if name in self.twin.own:
                new, worker = self.names[name], self.workers[name]
                found[new] = msgspec.structs.replace(self.b.stages[name], name=new, worker=worker, arm="b")
        return {name: found[name] for name in _in_order(found, edges)}

    # -- edges ---------------------------------------------------------------------------------------------------------

    def edges(self) -> Iterator[EdgePlan]:
        """A's, each for both arms where B has the same, then B's own."""
        theirs = [self.renamed(edge) for edge in self.b.edges]
        same = [_what(edge) for edge in theirs]
        for edge in self.a.edges:
            yield edge if _what(edge) in same else msgspec.structs.replace(edge, arm="a")
        mine, names = [_what(edge) for edge in self.a.edges], {edge.name for edge in self.a.edges}
        for edge in theirs:
            if _what(edge) not in mine:
                name = f"{edge.name} (b)" if edge.name in names else edge.name
                yield msgspec.structs.replace(edge, name=name, arm="b")

    def renamed(self, edge: EdgePlan) -> EdgePlan:
        """An edge of B between the stages as they are named here."""
        ends = [self.names.get(end, end) for end in (edge.source, edge.target)]
        parts = [part.strip().partition(".") for part in edge.name.split("->")]
        name = " -> ".join(end + dot + port for end, (_, dot, port) in zip(ends, parts, strict=True))
        return msgspec.structs.replace(edge, name=name, source=ends[0], target=ends[1])

    # -- workers -------------------------------------------------------------------------------------------------------

    def all_workers(self, stages: dict[str, StagePlan]) -> Iterator[tuple[str, WorkerPlan]]:
        names = dict.fromkeys([*self.a.workers, *(stage.worker for stage in stages.values())])
        for name in names:
            own = tuple(stage.name for stage in stages.values() if stage.worker == name)
            base = self.a.workers.get(name) or self.new_worker(name)
            yield name, msgspec.structs.replace(base, name=name, stages=own)

    def new_worker(self, name: str) -> WorkerPlan:
        """As that of arm A from which it comes, one instance unless the arm asks for more.

        Arm A keeps its cores and its memory as if there were no experiment, so that its figures stay its own.
        """
        old = name if name in self.b.workers else name.removesuffix(SUFFIX)
        theirs, mine = self.b.workers[old], self.a.workers.get(old)
        if mine is None:
            return theirs
        replicas = theirs.replicas if theirs.replicas != mine.replicas else 1
        return msgspec.structs.replace(theirs, replicas=replicas, threads=mine.threads, tier_bytes=mine.tier_bytes)


def _what(edge: EdgePlan) -> EdgePlan:
    """An edge without its name and without what follows from where its ends run."""
    return msgspec.structs.replace(edge, name="", fused=False)


def is_heavy(stage: StageNode) -> bool:
    """It holds weights, memory or credit of its requests."""
    contract = stage.contract
    if contract is None:
        return False
    if contract.held or contract.reserves or contract.units or (contract.model and contract.model.weights):
        return True
    return any(port.message.local for port in (*(stage.inputs or ()), *(stage.outputs or ())))


def _in_order(stages: dict[str, StagePlan], edges: Iterable[EdgePlan]) -> list[str]:
    """Upstream first; among equals as they are given, so that equal files give equal plans."""
    sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(stages, ()))
    for edge in edges:
        if not edge.back and edge.target != API:
            sorter.add(edge.target, edge.source)
    sorter.prepare()
    place, order = {name: index for index, name in enumerate(stages)}, list[str]()
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=place.__getitem__)
        sorter.done(*ready)
        order += ready
    return order


def _digest(a: Plan, b: Plan, experiment: Experiment) -> str:
    settings = experiment.model_dump_json(exclude={"with_"})
    return hashlib.sha256(f"{a.digest} {b.digest} {settings}".encode()).hexdigest()[:16]


def without_experiment(plan: Plan) -> Plan:
    """Arm A alone."""
    if plan.experiment is None:
        return plan
    stages = {name: msgspec.structs.replace(stage, arm="") for name, stage in plan.stages.items() if stage.arm != "b"}
    api = stages[API]
    stages[API] = msgspec.structs.replace(api, config={k: v for k, v in api.config.items() if k != "experiment"})
    return msgspec.structs.replace(
        plan,
        digest=plan.experiment.base,
        stages=stages,
        edges=tuple(msgspec.structs.replace(edge, arm="") for edge in plan.edges if edge.arm != "b"),
        workers={
            name: msgspec.structs.replace(worker, stages=tuple(stage for stage in worker.stages if stage in stages))
            for name, worker in plan.workers.items()
            if name not in plan.experiment.workers
        },
        experiment=None,
    )


def arm_of(plan: Plan, arm: str) -> tuple[dict[str, StagePlan], list[EdgePlan]]:
    """The stages and edges that messages of this arm meet: everything that isn't the other one's."""
    stages = {name: stage for name, stage in plan.stages.items() if stage.arm in ("", arm)}
    return stages, [edge for edge in plan.edges if edge.arm in ("", arm)]


def drawn(plan: Plan, graph: Graph, twin: Twin) -> Graph:
    """Both arms as one graph, to be drawn. Where they part, edges tell their arm."""
    joint = Graph(graph.document)
    origin = {name + SUFFIX if name in graph.stages else name: name for name in twin.own}
    for name, stage in plan.stages.items():
        if name in graph.stages and stage.arm != "b":
            joint.stages[name] = graph.stages[name]
            continue
        node = twin.graph.stages[origin.get(name, name)]
        joint.stages[name] = StageNode(
            name, node.kind, node.mark, node.cls, node.inputs, node.outputs, node.config, node.contract, stage.worker
        )
    wires = {(wire.source, wire.target, wire.into and wire.into.name): wire for wire in twin.graph.wires}
    wires |= {(wire.source, wire.target, wire.into and wire.into.name): wire for wire in graph.wires}
    for edge in plan.edges:
        ends = (origin.get(edge.source, edge.source), origin.get(edge.target, edge.target), edge.port)
        wire = wires[ends]
        options = wire.options.model_copy(update={"dispatch": edge.dispatch})
        joint.wires.append(
            Wire(edge.name, edge.source, edge.target, wire.mark, options, wire.path, wire.out, wire.into, edge.arm)
        )
    written = workers(graph)
    joint.workers = {
        name: written.get(name) or Worker(device=worker.device, replicas=worker.replicas)
        for name, worker in plan.workers.items()
    }
    return joint
