"""The graph as SVG for documents: workers as boxes, edges with their messages, loops dashed. `layout` says where."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from flowinfer.graph.drawing import members, short_kind, wire_label, worker_title
from flowinfer.graph.layout import Cell, Grid, place
from flowinfer.graph.model import Graph, Wire
from flowinfer.graph.plan import API
from flowinfer.graph.shapes import BAND_BOTTOM, BAND_TOP, Box, Point, arc, bridges, curve, straight, without_touching

# Pixels. A gap between stages holds the longest usual label ("Sequence", "Prompt by bucket" in two lines) at 11 px.
WIDTH, HEIGHT = 112, 46
GAP_X, GAP_Y = 76, 44
MARGIN = 20
PAD = 14

INK, SOFT, PAPER = "#1f2933", "#66727f", "#ffffff"
QUEUE = "#1565c0"
BACK = "#b4540a"
FILLS = ("#f3f5f8", "#eef6ee", "#fdf4e7", "#f4effa", "#fdeeee", "#eaf6f8")
FONT = "font-family=\"Inter, 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif\""


def to_svg(graph: Graph) -> str:
    """A drawing with its own legend, readable at its natural size."""
    return "\n".join(_Drawing(graph).lines()) + "\n"


class _Drawing:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.grid: Grid = place(graph)
        self.stacks = [
            max([cell.stacked for cell in self.grid.cells.values() if cell.row == row], default=1)
            for row in range(self.grid.rows)
        ]
        self.boxes = {name: self.box(cell) for name, cell in self.grid.cells.items()}
        top, bottom = self.row_top(0), self.row_top(self.grid.rows - 1) + self.row_height(self.grid.rows - 1)
        middle = (top + bottom) / 2
        half = max(HEIGHT / 2, min((bottom - top) / 2, 90))
        self.boxes[API] = (MARGIN + PAD, middle - half, MARGIN + PAD + WIDTH * 0.6, middle + half)

    def row_height(self, row: int) -> float:
        return self.stacks[row] * HEIGHT + (self.stacks[row] - 1) * GAP_Y

    def row_top(self, row: int) -> float:
        above = sum(self.row_height(r) + BAND_TOP + BAND_BOTTOM for r in range(row))
        return MARGIN + BAND_TOP + above

    def box(self, cell: Cell) -> Box:
        left = MARGIN + PAD + WIDTH * 0.6 + GAP_X + (cell.column - 1) * (WIDTH + GAP_X)
        used = cell.stacked * HEIGHT + (cell.stacked - 1) * GAP_Y
        top = self.row_top(cell.row) + (self.row_height(cell.row) - used) / 2 + cell.slot * (HEIGHT + GAP_Y)
        return (left, top, left + WIDTH, top + HEIGHT)

    def lines(self) -> Iterator[str]:
        width = max(max(box[2] for box in self.boxes.values()) + PAD + MARGIN, 620)
        last = self.grid.rows - 1
        bottom = self.row_top(last) + self.row_height(last) + BAND_BOTTOM
        height = bottom + 34
        name = escape(self.graph.document.sections.name)
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'height="{height:.0f}" role="img" aria-label="Pipeline {name}" {FONT}>'
        )
        yield f"<title>{name}</title>"
        yield from _markers()
        yield f'<rect width="100%" height="100%" fill="{PAPER}"/>'
        for index, (worker, names) in enumerate(members(self.graph).items()):
            yield from self.worker(worker, names, FILLS[index % len(FILLS)])
        labels: list[str] = []
        for wire in self.graph.wires:
            line, label = self.wire(wire)
            yield line
            labels.append(label)
        for stage in self.graph.stages:
            yield from self.stage(stage)
        yield from labels
        yield from self.legend(bottom + 14)
        yield "</svg>"

    # ------------------------------------------------------------------------------------------------------- workers

    def worker(self, worker: str, names: list[str], fill: str) -> Iterator[str]:
        """One box a run of neighbours in a row; runs that touch are joined, so that most workers are one shape."""
        parts = self.runs(names)
        shapes = [*((part, 12) for part in parts), *((bridge, 0) for bridge in bridges(parts))]
        for box, radius in shapes:
            yield f'<rect {_size(box)} rx="{radius}" fill="{fill}" stroke="#c3ccd6" stroke-width="2"/>'
        for (left, top, right, bottom), radius in shapes:  # once more without a border: what touches becomes one
            inner = (left + 1, top + 1, right - 1, bottom - 1)
            yield f'<rect {_size(inner)} rx="{max(0, radius - 1)}" fill="{fill}"/>'
        title = escape(worker_title(self.graph, worker))
        for part in without_touching(parts):
            yield _text(part[0] + 12, part[1] + 17, title, 12, SOFT, weight=600)

    def runs(self, names: list[str]) -> list[Box]:
        """Bounding boxes of the worker's stages, cut where another worker stands between them in the row."""
        found: list[Box] = []
        for row in range(self.grid.rows):
            mine = sorted(
                {self.grid.cells[n].column for n in names if n in self.grid.cells and self.grid.cells[n].row == row}
            )
            runs: list[list[int]] = []
            for column in mine:
                if runs and self.is_free(runs[-1][-1], column, row, names):
                    runs[-1].append(column)
                else:
                    runs.append([column])
            found += [self.frame(run, row, names) for run in runs]
        left, _, right, _ = self.boxes[API]
        if API in names and sum(box[0] == left - PAD for box in found) < self.grid.rows:
            found.insert(0, (left - PAD, self.row_top(0) - BAND_TOP + 8, right + PAD, self.bottom(self.grid.rows - 1)))
        return found

    def is_free(self, first: int, last: int, row: int, names: list[str]) -> bool:
        others = (n for n, cell in self.grid.cells.items() if cell.row == row and first <= cell.column <= last)
        return all(name in names for name in others)

    def bottom(self, row: int) -> float:
        return self.row_top(row) + self.row_height(row) + BAND_BOTTOM - 10

    def frame(self, run: list[int], row: int, names: list[str]) -> Box:
        left = self.box(Cell(run[0], row))[0] - PAD
        inside = [self.boxes[n] for n, c in self.grid.cells.items() if c.row == row and c.column in run and n in names]
        whole = all(n in names for n, c in self.grid.cells.items() if c.row == row and c.column in run)
        if whole and run[0] == 1 and API in names:
            left = self.boxes[API][0] - PAD
        top = self.row_top(row) if whole else min(box[1] for box in inside)
        bottom = self.bottom(row) if whole else max(box[3] for box in inside) + PAD
        return (left, top - (BAND_TOP - 8 if whole else 24), self.box(Cell(run[-1], row))[2] + PAD, bottom)

    # -------------------------------------------------------------------------------------------------------- stages

    def stage(self, name: str) -> Iterator[str]:
        left, top, right, bottom = self.boxes[name]
        radius = 16 if name == API else 8
        yield f'<rect {_size(self.boxes[name])} rx="{radius}" fill="{PAPER}" stroke="{INK}" stroke-width="1.4"/>'
        kind = short_kind(self.graph.stages[name].kind)
        middle, centre = (left + right) / 2, (top + bottom) / 2
        if name == API or kind == name:
            yield _text(middle, centre + 5, _cut(name, 13), 14, INK, weight=600, anchor="middle")
            return
        yield _text(middle, centre - 2, _cut(name, 13), 14, INK, weight=600, anchor="middle")
        yield _text(middle, centre + 14, _cut(kind, 18), 11, SOFT, anchor="middle")

    # --------------------------------------------------------------------------------------------------------- edges

    def wire(self, wire: Wire) -> tuple[str, str]:
        """The line of an edge, and its label."""
        color = BACK if wire.options.back else INK if self.graph.is_fused(wire) else QUEUE
        path, at = self.route(wire)
        dash = ' stroke-dasharray="6 4"' if wire.options.back else ""
        width = 1.5 if self.graph.is_fused(wire) else 2.2
        mark = {INK: "ink", QUEUE: "queue", BACK: "back"}[color]
        line = f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dash} marker-end="url(#{mark})"/>'
        return line, _label(wire_label(wire), at, color, self.paper(wire))

    def paper(self, wire: Wire) -> str:
        """What the label stands on."""
        order = list(members(self.graph))
        worker = self.graph.stages[wire.source].worker or ""
        return FILLS[order.index(worker) % len(FILLS)] if self.graph.is_fused(wire) else PAPER

    def route(self, wire: Wire) -> tuple[str, Point]:
        a, b = self.boxes[wire.source], self.boxes[wire.target]
        if API in (wire.source, wire.target):
            return self.route_api(wire, a, b)
        ca, cb = self.grid.cells[wire.source], self.grid.cells[wire.target]
        if wire.options.back or (ca.row == cb.row and abs(ca.column - cb.column) != 1):
            return arc(a, b, below=wire.options.back or ca.slot > 0)
        if ca.row == cb.row:
            return straight(a, b)
        if ca.column == cb.column:
            x = (a[0] + a[2]) / 2
            return f"M{x} {a[3]} L{x} {b[1] - 2}", (x + 32, a[3] + 24)
        return curve(a, b)

    def route_api(self, wire: Wire, a: Box, b: Box) -> tuple[str, Point]:
        stage, api = (b, a) if wire.source == API else (a, b)
        y = (stage[1] + stage[3]) / 2
        y = min(max(y, api[1] + 12), api[3] - 12)
        side = (stage[0], api[1], stage[2], api[3])
        if abs(y - (stage[1] + stage[3]) / 2) > 1:
            return (
                curve((api[0], y - 1, api[2], y + 1), b)
                if wire.source == API
                else curve(a, (api[0], y - 1, api[2], y + 1))
            )
        cell = self.grid.cells[wire.target if wire.source == API else wire.source]
        if cell.column != 1:
            return (
                arc((api[0], stage[1], api[2], stage[3]), b, below=False)
                if wire.source == API
                else arc(a, (api[0], stage[1], api[2], stage[3]), below=True)
            )
        start, end = (api[2], side[0] - 2) if wire.source == API else (side[0], api[2] + 2)
        return f"M{start} {y} L{end} {y}", ((api[2] + side[0]) / 2, y - 7)

    # -------------------------------------------------------------------------------------------------------- legend

    def legend(self, y: float) -> Iterator[str]:
        transport = self.graph.document.sections.network.transport
        entries = [(INK, "", 1.5, "call inside a worker")]
        if any(not self.graph.is_fused(wire) for wire in self.graph.wires):
            entries.append((QUEUE, "", 2.2, f"queue between workers ({transport})"))
        if any(wire.options.back for wire in self.graph.wires):
            entries.append((BACK, ' stroke-dasharray="6 4"', 1.5, "back edge"))
        x = MARGIN + 4.0
        for color, dash, width, text in entries:
            yield f'<path d="M{x} {y} h30" stroke="{color}" stroke-width="{width}"{dash}/>'
            yield _text(x + 38, y + 4, text, 11.5, SOFT)
            x += 38 + 6.4 * len(text) + 28


def _markers() -> Iterator[str]:
    yield "<defs>"
    for name, color in (("ink", INK), ("queue", QUEUE), ("back", BACK)):
        shape = f'<path d="M0 0 L9 4.5 L0 9 z" fill="{color}"/>'
        place = 'refX="7.5" refY="4.5" markerWidth="9" markerHeight="9" markerUnits="userSpaceOnUse" orient="auto"'
        yield f'<marker id="{name}" {place}>{shape}</marker>'
    yield "</defs>"


def _size(box: Box) -> str:
    left, top, right, bottom = box
    return f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}"'


def _label(text: str, at: Point, color: str, paper: str) -> str:
    """In two lines where it says how messages are shared out."""
    first, _, second = text.partition(" by ")
    x, y = at
    top = _text(x, y, first, 11, color, anchor="middle", halo=paper)
    return top + (_text(x, y + 20, f"by {second}", 11, color, anchor="middle", halo=paper) if second else "")


def _text(
    x: float, y: float, text: str, size: float, color: str, *, weight: int = 400, anchor: str = "start", halo: str = ""
) -> str:
    around = f' paint-order="stroke" stroke="{halo}" stroke-width="3" stroke-linejoin="round"' if halo else ""
    style = f'font-size="{size}" font-weight="{weight}" fill="{color}" text-anchor="{anchor}"{around}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
