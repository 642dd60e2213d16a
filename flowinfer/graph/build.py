"""From a document to the typed graph: finds each stage's class, reads its settings, joins ports by type."""

from __future__ import annotations

from flowinfer.errors import FlowInferError
from flowinfer.graph.inherit import fill_open_settings
from flowinfer.graph.model import Graph, StageNode, api_node
from flowinfer.graph.placement import place_stages
from flowinfer.graph.plan import API
from flowinfer.graph.settings import read_config
from flowinfer.graph.wiring import connect
from flowinfer.spec import Document
from flowinfer.spec.models import StageEntry
from flowinfer.spec.registry import StageNotFound, canonical, is_local, load_stage
from flowinfer.stage import ports


def build_graph(document: Document) -> Graph:
    """The graph of a document, with the problems met on the way (those of the document included)."""
    graph = Graph(document, {API: api_node(document)}, problems=list(document.problems))
    for name, entry in document.sections.stages.items():
        graph.stages[name] = _stage(graph, name, entry)
    for key, edge in document.sections.edges.values():
        connect(graph, key, edge)
    fill_open_settings(graph)
    for stage in graph.stages.values():
        _read_contract(graph, stage)
    place_stages(graph)
    return graph


def _stage(graph: Graph, name: str, entry: StageEntry) -> StageNode:
    document = graph.document
    use = document.value_mark("stages", name, "use")
    kind = canonical(entry.use, document.base(use)) if is_local(entry.use) else entry.use
    node = StageNode(name, kind, document.mark("stages", name))
    try:
        node.cls = load_stage(entry.use, base=document.base(use), allow_local=document.allow_local)
        node.inputs, node.outputs = ports(node.cls)
    except StageNotFound as error:
        graph.problem(error.code, error.message, use, error.help)
    except FlowInferError as error:
        graph.problem("FI320", error.message, use, error.help)
    if node.cls:
        node.config = read_config(graph, node)
    return node


def _read_contract(graph: Graph, stage: StageNode) -> None:
    if stage.config is None:
        return
    try:
        stage.contract = stage.config.contract()
    except Exception as error:  # the stage's author's code, which must not end a check in a traceback
        message = f"The contract of {stage} can't be read: {type(error).__name__}: {error}."
        graph.problem("FI320", message, stage.mark)
        return
    unknown = set(stage.contract.needs) - {port.name for port in stage.inputs or ()}
    if unknown and stage.inputs is not None:
        message = f"The contract of {stage} needs something of `{min(unknown)}`, which isn't one of its inputs."
        graph.problem("FI320", message, stage.mark, "Name the parameters of its step() in needs.")
