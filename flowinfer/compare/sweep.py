"""Many settings of one graph under the same requests: the cells of the grid, and the file that remembers them.

A cell takes over what runs where its settings fit beside it, else it is loaded by itself; cells are run in an order
that needs few starts. A cell is known by its settings, the resolved document and the requests: a sweep that was killed
goes on behind the last line, and one over another file or mix begins anew.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec

from flowinfer.compare.answers import compare_answers
from flowinfer.compare.arms import Answer, Arm
from flowinfer.compare.asks import Ask
from flowinfer.compare.figures import Limit, figures
from flowinfer.compare.rounds import Group
from flowinfer.errors import FlowInferError
from flowinfer.graph.diff import ORDER, Loader, compare
from flowinfer.graph.plan import Plan


class Axis(msgspec.Struct, frozen=True):
    """One setting and the values to try, as they are written."""

    path: str
    values: tuple[str, ...]


class Cell(msgspec.Struct):
    """One finished cell: figures by name as in a comparison, and its answers, to hold against those of other cells.

    how: it came to run by a start, or by a live or warm change of the cell before.
    """

    key: str
    sets: dict[str, str]
    figures: dict[str, float | None]
    texts: list[str]
    failed: list[str]
    how: str = "start"

    @property
    def name(self) -> str:
        """The values alone."""
        return ", ".join(self.sets.values())

    def num_differing(self, other: Cell) -> int:
        """How many answers differ from the other cell's."""
        return sum(a != b for a, b in zip(self.texts, other.texts, strict=True))


def parse_axis(text: str) -> Axis:
    """`stages.verify.with.tokens=1,3,5`; commas inside brackets don't part values. Raises FlowInferError."""
    path, sign, rest = text.partition("=")
    values = tuple(_split(rest))
    if not (path and sign) or not all(values) or len(set(values)) != len(values):
        raise FlowInferError(
            f"-x {text!r} names no values to try.", help="It looks like stages.verify.with.tokens=1,3,5."
        )
    return Axis(path, values)


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def cells(axes: Sequence[Axis], *, paired: bool = False) -> list[dict[str, str]]:
    """Settings of each cell: every combination, the last axis fastest; paired: the first values, the second, ..."""
    lengths = {len(axis.values) for axis in axes}
    if paired and len(lengths) > 1:
        raise FlowInferError(
            "--paired needs as many values on each axis.", help="Leave it out to try every combination."
        )
    rows = zip(*(axis.values for axis in axes), strict=True) if paired else itertools.product(*(a.values for a in axes))
    return [dict(zip((axis.path for axis in axes), row, strict=True)) for row in rows]


def order(plans: Sequence[Plan], load: Loader) -> list[int]:
    """In which order to run the cells of these plans: from each to the nearest that is left, for few starts."""
    left, found = list(range(len(plans))), [0] if plans else []
    left = left[1:]
    while left:
        here = plans[found[-1]]
        nearest = min(left, key=lambda index: (ORDER.index(compare(here, plans[index], load).kind), index))
        left.remove(nearest)
        found.append(nearest)
    return found


def key_of(
    digest: str,
    sets: dict[str, str],
    asks: Sequence[Ask],
    rounds: int,
    in_flight: int,
    limit: Limit,
    real: bool = False,
) -> str:
    """What names a cell; digest is that of its plan."""
    what = msgspec.json.encode([digest, sets, list(asks), rounds, in_flight, limit, real])
    return hashlib.sha256(what).hexdigest()[:16]


def run_cell(arm: Arm, asks: Sequence[Ask], rounds: int, in_flight: int, salt: str = "") -> list[Group]:
    """All requests `rounds` times; both sides of the groups are this arm. A first group warms up.

    salt: keeps what other cells have cached in the same service from this one.
    """
    parts = [list(asks[start : start + in_flight]) for start in range(0, len(asks), in_flight)]
    arm.answer(parts[0], f"{salt} warm-up")
    groups = []
    for number in range(rounds):
        for part in parts:
            answers = arm.answer(part, f"{salt} round-{number}")
            held = arm.memory()
            groups.append(Group(number, part, answers, answers, None if held is None else (held, held)))
    return groups


def finished(key: str, sets: dict[str, str], groups: Sequence[Group], limit: Limit, how: str = "start") -> Cell:
    """The cell of what was measured."""
    found = figures(groups, limit)
    answers: list[Answer] = [answer for group in groups for answer in group.a]
    failed = compare_answers(groups).failed_a
    return Cell(key, sets, {figure.name: figure.a for figure in found}, [a.text for a in answers], failed, how)


def front(found: Sequence[Cell], cost: str = "latency_p50", gain: str = "tokens_per_s") -> list[Cell]:
    """Cells that no other beats in both figures: the choices that make sense (Pareto), cheapest first."""
    measured = [(c.figures[cost], c.figures[gain], c) for c in found]
    points = sorted(((x, -y, number) for number, (x, y, _) in enumerate(measured) if x is not None and y is not None))
    best, chosen = float("inf"), []
    for _, lost, number in points:
        if lost < best:
            best = lost
            chosen.append(measured[number][2])
    return chosen


def read_cells(path: Path) -> dict[str, Cell]:
    """Finished cells of a file, by key; a last line that was cut off is passed over."""
    found: dict[str, Cell] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            cell = msgspec.json.decode(line, type=Cell)
        except msgspec.DecodeError:
            continue
        found[cell.key] = cell
    return found


def append_cell(path: Path, cell: Cell) -> None:
    """Adds a line, on a line of its own even behind one that was cut off."""
    cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("ab") as file:
        file.write(b"\n" * cut + msgspec.json.encode(cell) + b"\n")
