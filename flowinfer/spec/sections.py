"""The sections of a document as typed values, each validated on its own so that one mistake hides no other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowinfer.errors import Mark, Problem
from flowinfer.spec import models
from flowinfer.spec.edges import EdgeKey, parse_edge
from flowinfer.spec.hints import closest, did_you_mean
from flowinfer.spec.models import Edge, Experiment, Network, Serve, StageEntry, Worker
from flowinfer.spec.tree import Node
from flowinfer.spec.validation import STRUCTURE, validate

SECTIONS = tuple(models.Spec.model_fields)
API = "api"


@dataclass(frozen=True)
class Sections:
    """What of the file is well-formed. broken: names of stages and sections that aren't: nothing follows."""

    name: str = "service"
    batch_invariant: bool = False
    serve: Serve = field(default_factory=Serve)
    network: Network = field(default_factory=Network)
    experiment: Experiment | None = None
    workers: dict[str, Worker] = field(default_factory=dict)
    stages: dict[str, StageEntry] = field(default_factory=dict)
    edges: dict[str, tuple[EdgeKey, Edge]] = field(default_factory=dict)
    broken: frozenset[str] = frozenset()
    broken_edges: frozenset[str] = frozenset()


def read_sections(root: Node, file: str, sources: Mapping[str, str]) -> tuple[Sections, list[Problem]]:
    """The well-formed parts of a document, and what is wrong with the others."""
    reader = _SectionReader(root, file, sources)
    return reader.read(), reader.problems


class _SectionReader:
    """Validates each part of the document on its own, so that one mistake hides no other."""

    def __init__(self, root: Node, file: str, sources: Mapping[str, str]) -> None:
        self.root = root
        self.top = Mark(file, 1, 1)
        self.lines = {name: text.split("\n") for name, text in sources.items()}
        self.problems: list[Problem] = []
        self.broken: set[str] = set()
        self.broken_edges: set[str] = set()

    def read(self) -> Sections:
        self.check_keys()
        return Sections(
            name=self.name(),
            batch_invariant=self.switch("batch_invariant"),
            serve=self.section("serve", Serve) or Serve(),
            network=self.section("network", Network) or Network(),
            experiment=self.section("experiment", Experiment),
            workers={name: w for name in self.members("workers") if (w := self.worker(name))},
            stages={name: s for name in self.members("stages") if (s := self.stage(name))},
            edges={name: e for name in self.members("edges") if (e := self.edge(name))},
            broken=frozenset(self.broken),
            broken_edges=frozenset(self.broken_edges),
        )

    def problem(self, code: str, message: str, mark: Mark, help: str = "") -> None:
        self.problems.append(Problem(code, message, mark, help))

    def check_keys(self) -> None:
        for key, node in self.root.map.items():
            if key not in SECTIONS:
                self.problem("FI201", f"A pipeline file has no `{key}`.", node.where, did_you_mean(key, SECTIONS))
        version = self.root.map.get("flowinfer")
        if version is None:
            self.problem(
                "FI202", "The file lacks `flowinfer`, the version of its format.", self.top, "Add `flowinfer: 1`."
            )
        elif version.value != 1 or isinstance(version.value, bool):
            message = f"This FlowInfer reads version 1 of the format, not {version.plain()!r}."
            self.problem("FI215", message, version.mark, "Write `flowinfer: 1`, or install a newer FlowInfer.")
        extends = self.root.map.get("extends")
        if extends and not isinstance(extends.value, str):
            self.problem("FI203", "`extends` names one file.", extends.mark)
        stages = self.root.map.get("stages")
        if stages is None or not stages.value:
            self.problem("FI202", "The file has no stages.", stages.where if stages else self.top)

    def name(self) -> str:
        node = self.root.map.get("name")
        return (
            node.value if node and isinstance(node.value, str) and self.good_name(node.value, node.mark) else "service"
        )

    def good_name(self, name: str, mark: Mark) -> bool:
        if re.fullmatch(models.NAME_PATTERN, name):
            return True
        help = "Start with a letter a-z; then letters, digits, - and _, at most 63 in all."
        self.problem("FI212", f"`{name}` can't be a name.", mark, help)
        return False

    def switch(self, key: str) -> bool:
        node = self.root.map.get(key)
        if node is None or node.value is None:
            return False
        if not isinstance(node.value, bool):
            self.problem("FI203", f"`{key}` is true or false, not {node.plain()!r}.", node.mark)
            return False
        return node.value

    def section(self, key: str, model: type[Any]) -> Any:
        node = self.root.map.get(key)
        if node is None or node.value is None:
            return None
        found, problems = validate(model, node, f"`{key}`", STRUCTURE)
        self.problems += problems
        return found

    def members(self, key: str) -> list[str]:
        node = self.root.map.get(key)
        if node is None or isinstance(node.value, dict) or node.value is None:
            return list(node.map) if node else []
        self.broken.add(key)
        self.problem("FI203", f"`{key}` must be a map of names.", node.mark)
        return []

    def worker(self, name: str) -> Worker | None:
        node = self.root.map["workers"].map[name]
        if not self.good_name(name, node.where):
            return None
        worker, problems = validate(Worker, _empty_as_map(node), f"worker `{name}`", STRUCTURE)
        self.problems += problems
        return worker or Worker()  # its name stands, so nothing that is placed in it is wrong as well

    def stage(self, name: str) -> StageEntry | None:
        node = self.root.map["stages"].map[name]
        if name == API:
            help = "It is always there: connect it, and give the stage another name."
            self.problem("FI214", "`api` is the name of the service's own front.", node.where, help)
        elif self.good_name(name, node.where):
            stage, problems = validate(StageEntry, _empty_as_map(node), f"stage `{name}`", STRUCTURE)
            self.problems += [self.add_hint(problem, name) for problem in problems]
            if stage:
                return stage
        self.broken.add(name)
        return None

    def add_hint(self, problem: Problem, name: str) -> Problem:
        """A stage without `use` is often a misspelt name in an overlay."""
        if problem.code != "FI202" or "use" in self.root.map["stages"].map[name].map:
            return problem
        others = [other for other, node in self.root.map["stages"].map.items() if "use" in node.map]
        help = f"Did you mean `{near}`?" if (near := closest(name, others)) else "Write `use: KIND`."
        return Problem(problem.code, problem.message, problem.mark, help)

    def edge(self, text: str) -> tuple[EdgeKey, Edge] | None:
        node = self.root.map["edges"].map[text]
        key = parse_edge(text, node.where, quoted=self.is_quoted(node.where))
        if key is None:
            self.broken_edges.add(text)
            help = "Write `a -> b`, or `a.output -> b.input`."
            self.problem("FI213", f"`{text}` isn't an edge.", node.where, help)
            return None
        edge, problems = validate(Edge, _empty_as_map(node), f"edge `{key}`", STRUCTURE)
        self.problems += problems
        return key, edge or Edge(back=_says_back(node))

    def is_quoted(self, mark: Mark) -> bool:
        lines = self.lines.get(mark.file, [])
        return mark.line <= len(lines) and lines[mark.line - 1][mark.column - 1 : mark.column] in ('"', "'")


def _says_back(node: Node) -> bool:
    back = node.at("back")
    return back is not None and back.value is True


def _empty_as_map(node: Node) -> Node:
    return Node({}, node.mark, node.key) if node.value is None else node
