"""Drawings: every stage and edge is in them, and the SVG is well-formed."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from flowinfer.graph.checker import check
from flowinfer.graph.drawing import draw
from flowinfer.graph.layout import place
from flowinfer.graph.model import Graph
from flowinfer.spec import load


@pytest.fixture(scope="module")
def graph() -> Graph:
    return check(load(Path(__file__).parents[2] / "pipelines/prod.yaml"))


def test_svg_shows_every_stage_worker_and_message(graph: Graph) -> None:
    root = ElementTree.fromstring(draw(graph, "svg"))
    texts = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {*graph.stages, "front", "prefill", "decode", "Prompt", "Sequence", "Proposal", "Tokens", "Text"} <= texts


def test_back_edges_are_dashed(graph: Graph) -> None:
    dashed = [line for line in draw(graph, "svg").split("\n") if "stroke-dasharray" in line and "marker-end" in line]
    assert len(dashed) == 1


@pytest.mark.parametrize(("form", "arrow"), [("mermaid", "-.->"), ("dot", "style=dashed")])
def test_text_forms_have_an_arrow_an_edge(graph: Graph, form: str, arrow: str) -> None:
    text = draw(graph, form)
    assert text.count(arrow) == 1
    assert sum("|" in line or "->" in line for line in text.split("\n")) == len(graph.wires)


def test_no_two_stages_stand_in_one_place(graph: Graph) -> None:
    cells = place(graph).cells
    assert len({(cell.column, cell.row, cell.slot) for cell in cells.values()}) == len(cells) == 8


def test_long_graphs_fold_and_end_beside_the_api(graph: Graph) -> None:
    grid = place(graph)
    assert (grid.rows, grid.cells["tokenize"].column, grid.cells["detokenize"].column) == (2, 1, 1)
