"""Fills in a `model` that a stage leaves open: the one model that the stages before it name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flowinfer.errors import Mark
from flowinfer.graph.model import Graph, StageNode
from flowinfer.graph.settings import read_config
from flowinfer.spec.tree import Node
from flowinfer.stage import StageConfig


def fill_models(graph: Graph) -> None:
    """Gives each stage with an empty `model: str = ""` the model that is named upstream, else anywhere in the graph."""
    named = {name: stage for name, stage in graph.stages.items() if _model(stage.config)}
    for stage in graph.stages.values():
        if _is_open(stage.config):
            before = graph.ancestors(stage.name)
            _fill(graph, stage, [s for n, s in named.items() if n in before] or list(named.values()))


def _model(config: StageConfig | None) -> str:
    value = getattr(config, "model", "")
    return value if isinstance(value, str) and "${" not in value else ""


def _is_open(config: StageConfig | None) -> bool:
    field = type(config).model_fields.get("model") if config else None
    return field is not None and field.default == "" and getattr(config, "model", None) == ""


def _fill(graph: Graph, stage: StageNode, givers: list[StageNode]) -> None:
    models = sorted({_model(giver.config) for giver in givers})
    if len(models) == 1:
        stage.inherited = _place(graph, givers[0])
        stage.config = read_config(graph, stage, model=models[0])
        return
    written = graph.document.value_mark("stages", stage.name, "with", "model")
    mark = written if graph.document.root.at("stages", stage.name, "with", "model") else stage.mark
    if not models:
        if all(other.config or other.name == "api" for other in graph.stages.values()):
            message = f"{stage} needs a model, and no other stage names one."
            graph.problem("FI216", message, mark, "Write `with: {model: smollm2-135m}`.")
    else:
        message = f"{stage} could take {' or '.join(models)}."
        graph.problem("FI216", message, mark, f"Write `with: {{model: {models[0]}}}`.", _notes(graph, givers))
    stage.config = None


def _notes(graph: Graph, givers: Iterable[StageNode]) -> list[tuple[Mark | None, str]]:
    return [(_place(graph, giver), f"`{giver.name}` names {_model(giver.config)}") for giver in givers]


def _place(graph: Graph, giver: StageNode) -> Mark:
    return graph.document.value_mark("stages", giver.name, "with", "model")


def filled_root(graph: Graph) -> Node:
    """The document's tree with the models that were filled in."""
    root = graph.document.root
    stages = dict(root.map["stages"].map) if "stages" in root.map else {}
    for name, stage in graph.stages.items():
        if stage.inherited and stage.config and name in stages:
            stages[name] = _with_model(stages[name], Node(_model(stage.config), stage.inherited))
    members = dict(root.map)
    if "stages" in members:
        members["stages"] = replace(members["stages"], value=stages or members["stages"].value)
    return root.with_map(members)


def _with_model(entry: Node, model: Node) -> Node:
    settings = entry.map.get("with", Node({}, entry.mark))
    filled = replace(settings, value={**settings.map, "model": model})
    members = dict(entry.map)
    members["with"] = filled
    return entry.with_map(members)
