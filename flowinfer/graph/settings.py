"""Reads a stage's settings as its Config, with each mistake at its place in the file."""

from __future__ import annotations

from flowinfer.errors import Problem
from flowinfer.graph.model import Graph, StageNode
from flowinfer.spec.tree import Node
from flowinfer.spec.validation import SETTINGS, validate
from flowinfer.stage import StageConfig


def read_config(graph: Graph, stage: StageNode, **inherited: str) -> StageConfig | None:
    """The settings of a stage as its Config; None, with problems, when they are wrong."""
    config = stage.cls.Config if stage.cls else StageConfig
    try:
        found, problems = validate(config, _settings(graph, stage, inherited), f"stage `{stage.name}`", SETTINGS)
    except Exception as error:  # a validator of the stage's author that breaks
        problems = [Problem("FI320", f"The Config of {stage} broke: {type(error).__name__}: {error}.", stage.mark)]
        found = None
    graph.problems += problems
    return found


def _settings(graph: Graph, stage: StageNode, inherited: dict[str, str]) -> Node:
    written = graph.document.root.at("stages", stage.name, "with")
    members = dict(written.map) if written else {}
    members |= {key: Node(value, stage.mark) for key, value in inherited.items()}
    place = written or Node({}, stage.mark)
    return Node(members, place.mark, place.key or stage.mark)
