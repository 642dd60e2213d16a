"""The typed graph: stages with ports, settings and contract, joined by wires. Answers questions and judges nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from flowinfer.errors import Mark, Problem
from flowinfer.graph.plan import API, FRONT
from flowinfer.message import Call, Text
from flowinfer.spec import Document
from flowinfer.spec.models import Edge, Worker
from flowinfer.stage import Contract, Port, Stage, StageConfig

if TYPE_CHECKING:
    from flowinfer.graph.arms import Twin


@dataclass
class StageNode:
    """One stage. What couldn't be found out is None: ports of an unknown kind, contract of wrong settings."""

    name: str
    kind: str
    mark: Mark
    cls: type[Stage] | None = None
    inputs: tuple[Port, ...] | None = None
    outputs: tuple[Port, ...] | None = None
    config: StageConfig | None = None
    contract: Contract | None = None
    worker: str | None = FRONT
    inherited: dict[str, Mark] = field(default_factory=dict)  # settings left open, and where their value was written

    def __str__(self) -> str:
        return f"`{self.name}`" if self.name == self.kind else f"`{self.name}` ({self.kind})"


@dataclass(frozen=True)
class Wire:
    """An edge. out and into are None when its ends don't fit or aren't known."""

    name: str
    source: str
    target: str
    mark: Mark
    options: Edge
    path: tuple[str, str]  # of the edge in the document
    out: Port | None = None
    into: Port | None = None
    arm: str = ""  # of an experiment; "" is both

    @property
    def is_forward(self) -> bool:
        """False for what closes a loop: back edges, and the way back to the client."""
        return not self.options.back and self.target != API


@dataclass
class Graph:
    """Stages by name, `api` included, and wires in the order of the file.

    twin: arm B of its experiment.  workers: where they aren't those of the document.
    """

    document: Document
    stages: dict[str, StageNode] = field(default_factory=dict)
    wires: list[Wire] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    twin: Twin | None = None
    workers: dict[str, Worker] = field(default_factory=dict)

    def problem(
        self, code: str, message: str, mark: Mark | None, help: str = "", notes: Iterable[tuple[Mark | None, str]] = ()
    ) -> None:
        """Adds one mistake."""
        self.problems.append(Problem(code, message, mark, help, tuple(notes)))

    @property
    def has_gaps(self) -> bool:
        """True when an edge of the file leads nowhere, so that what seems unconnected may be its other end."""
        sections = self.document.sections
        ends = {end.stage for key, _ in sections.edges.values() for end in (key.source, key.target)}
        return bool(sections.broken_edges or ends - self.stages.keys() or {"edges", "stages"} & sections.broken)

    def into(self, stage: str) -> Iterator[Wire]:
        """Wires that end in this stage."""
        return (wire for wire in self.wires if wire.target == stage)

    def out_of(self, stage: str) -> Iterator[Wire]:
        """Wires that start in this stage."""
        return (wire for wire in self.wires if wire.source == stage)

    def is_fused(self, wire: Wire) -> bool:
        """True when both ends run in one worker."""
        source, target = self.stages.get(wire.source), self.stages.get(wire.target)
        return source is not None and target is not None and source.worker == target.worker

    def order(self) -> list[str]:
        """Stages so that each stands behind those that feed it, `api` first. Raises CycleError."""
        sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(self.stages, ()))
        for wire in self.wires:
            if wire.is_forward and wire.out:
                sorter.add(wire.target, wire.source)
        place = {name: index for index, name in enumerate(self.stages)}
        return [name for name in _stable(sorter, place) if name in self.stages]

    def is_acyclic(self) -> bool:
        """True when every loop is closed by a back edge."""
        try:
            self.order()
        except CycleError:
            return False
        return True

    def reach(self, start: str, *, back: bool = False, follow: Callable[[Wire], bool] = lambda _: True) -> set[str]:
        """Stages that can be reached from `start` (against the wires with `back`), itself included."""
        found, todo = {start}, [start]
        while todo:
            here = todo.pop()
            for wire in self.into(here) if back else self.out_of(here):
                there = wire.source if back else wire.target
                if there not in found and follow(wire):
                    found.add(there)
                    todo.append(there)
        return found

    def ancestors(self, stage: str) -> set[str]:
        """Stages that a message may have passed before it comes here."""
        return self.reach(stage, back=True, follow=lambda wire: wire.is_forward) - {stage}


def api_node(document: Document) -> StageNode:
    """The front: gives calls, takes text. Its class lives in `serve`, which a check has no use for."""
    mark = document.mark("serve") if document.root.at("serve") else document.mark("edges")
    node = StageNode(API, API, mark, inputs=(Port("texts", Text),), outputs=(Port("call", Call),))
    node.contract = Contract()
    return node


def _stable(sorter: TopologicalSorter[str], place: dict[str, int]) -> Iterator[str]:
    """Ready stages in the order of the file, so that equal files give equal plans."""
    sorter.prepare()
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=lambda name: place.get(name, len(place)))
        sorter.done(*ready)
        yield from ready
