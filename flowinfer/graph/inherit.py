"""Fills in `model`, `dtype`, `weights` and `kv_dtype` that a stage leaves open with what the graph says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flowinfer.errors import Mark
from flowinfer.graph.model import Graph, StageNode
from flowinfer.graph.settings import read_config
from flowinfer.spec.tree import Node
from flowinfer.stage import StageConfig

# Settings that may be left open, and the default that means so.
_OPEN = {"model": "", "dtype": "auto", "weights": "checkpoint", "kv_dtype": "auto"}
_OF_MODEL = ("dtype", "weights", "kv_dtype")  # written once, they hold for all stages of a model


def fill_open_settings(graph: Graph) -> None:
    """Gives stages with an open model the one named upstream, else anywhere; then those of one model its settings."""
    named = {name: stage for name, stage in graph.stages.items() if _value(stage.config, "model")}
    for stage in graph.stages.values():
        if _is_open(stage.config, "model"):
            before = graph.ancestors(stage.name)
            _fill_model(graph, stage, [s for n, s in named.items() if n in before] or list(named.values()))
    for setting in _OF_MODEL:
        for stage in graph.stages.values():
            if _is_open(stage.config, setting):
                _fill(graph, stage, setting)


def _value(config: StageConfig | None, setting: str) -> str:
    value = getattr(config, setting, "")
    return value if isinstance(value, str) and "${" not in value and value != _OPEN[setting] else ""


def _is_open(config: StageConfig | None, setting: str) -> bool:
    field = type(config).model_fields.get(setting) if config else None
    return field is not None and field.default == _OPEN[setting] == getattr(config, setting, None)


def _take(graph: Graph, stage: StageNode, setting: str, giver: StageNode) -> None:
    stage.inherited[setting] = _place(graph, giver, setting)
    values = {name: _value(stage.config, name) for name in stage.inherited if name != setting}
    stage.config = read_config(graph, stage, **values, **{setting: _value(giver.config, setting)})


def _fill(graph: Graph, stage: StageNode, setting: str) -> None:
    """Written once, it holds for all stages of its model; where two differ, the check says so.

    Of several that name it, the first behind this stage: what receives for another one has that one's engine.
    """
    model = _value(stage.config, "model")
    givers = [s for s in graph.stages.values() if _value(s.config, setting) and _value(s.config, "model") == model]
    behind = [giver for giver in givers if stage.name in graph.ancestors(giver.name)]
    if givers:
        _take(graph, stage, setting, (behind or givers)[0])


def _fill_model(graph: Graph, stage: StageNode, givers: list[StageNode]) -> None:
    models = sorted({_value(giver.config, "model") for giver in givers})
    if len(models) == 1:
        _take(graph, stage, "model", givers[0])
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
    return [
        (_place(graph, giver, "model"), f"`{giver.name}` names {_value(giver.config, 'model')}") for giver in givers
    ]


def _place(graph: Graph, giver: StageNode, setting: str) -> Mark:
    return giver.inherited.get(setting) or graph.document.value_mark("stages", giver.name, "with", setting)


def filled_root(graph: Graph) -> Node:
    """The document's tree with the settings that were filled in."""
    root = graph.document.root
    stages = dict(root.map["stages"].map) if "stages" in root.map else {}
    for name, stage in graph.stages.items():
        if stage.inherited and stage.config and name in stages:
            filled = {key: Node(_value(stage.config, key), mark) for key, mark in stage.inherited.items()}
            stages[name] = _with_settings(stages[name], filled)
    members = dict(root.map)
    if "stages" in members:
        members["stages"] = replace(members["stages"], value=stages or members["stages"].value)
    return root.with_map(members)


def _with_settings(entry: Node, filled: dict[str, Node]) -> Node:
    settings = entry.map.get("with", Node({}, entry.mark))
    members = dict(entry.map)
    members["with"] = replace(settings, value={**settings.map, **filled})
    return entry.with_map(members)
