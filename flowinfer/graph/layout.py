"""Where each stage of a drawing stands: layers from left to right, folded into rows where the graph is long."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import networkx as nx

from flowinfer.graph.model import Graph, Wire
from flowinfer.graph.plan import API

MAX_COLUMNS = 6  # a page is about 900 px wide, and a stage with its edge 150


@dataclass(frozen=True)
class Cell:
    """Place of a stage in the grid: column from the left, row from above, and which of `stacked` it is in its cell."""

    column: int
    row: int
    slot: int = 0
    stacked: int = 1


@dataclass(frozen=True)
class Grid:
    """All places. Even rows run to the right, odd ones back to the left. `api` stands at the left side of all."""

    cells: dict[str, Cell]
    columns: int
    rows: int


def layers(graph: Graph) -> list[list[str]]:
    """Stages by the length of the longest way to them, without `api`; neighbours near the stages that feed them."""
    tree = nx.DiGraph([(w.source, w.target) for w in graph.wires if w.is_forward])
    tree.add_nodes_from(graph.stages)
    found: list[list[str]] = []
    for generation in nx.topological_generations(tree):
        stages = [name for name in graph.stages if name in generation and name != API]
        if stages:
            found.append(sorted(stages, key=lambda name: _height(graph, name, found[-1] if found else [])))
    return found


def _height(graph: Graph, name: str, before: list[str]) -> float:
    feeding = [before.index(wire.source) for wire in graph.into(name) if wire.source in before]
    return sum(feeding) / len(feeding) if feeding else 0.0


def place(graph: Graph) -> Grid:
    """A grid whose number of rows is even where it has more than one, so that the way back ends beside `api`."""
    ranks = layers(graph)
    rows = 2 * ceil(len(ranks) / (2 * MAX_COLUMNS))
    columns = max(1, ceil(len(ranks) / rows))
    cells = {}
    for index, rank in enumerate(ranks):
        row, step = divmod(index, columns)
        column = step if row % 2 == 0 else columns - 1 - step
        for slot, name in enumerate(rank):
            cells[name] = Cell(column + 1, row, slot, len(rank))
    return Grid(cells, columns + 1, rows)


def is_straight(grid: Grid, wire: Wire) -> bool:
    """True for an edge between neighbours of one row."""
    a, b = grid.cells.get(wire.source), grid.cells.get(wire.target)
    return bool(a and b and a.row == b.row and abs(a.column - b.column) == 1)
