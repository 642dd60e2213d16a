"""The geometry of a drawing: lines between boxes, and how boxes of one worker join. Knows no colours and no graph."""

from __future__ import annotations

BAND_TOP, BAND_BOTTOM = 40, 56  # above a row: the worker's name; below: the arcs of loops

Box = tuple[float, float, float, float]  # left, top, right, bottom
Point = tuple[float, float]


def straight(a: Box, b: Box) -> tuple[str, Point]:
    """Path and label place of a line to a neighbour."""
    ya, yb = (a[1] + a[3]) / 2, (b[1] + b[3]) / 2
    right = b[0] > a[0]
    start, end = (a[2], b[0] - 2) if right else (a[0], b[2] + 2)
    middle = (start + end) / 2
    if abs(ya - yb) < 1:
        return f"M{start} {ya} L{end} {yb}", (middle, ya - 7)
    return f"M{start} {ya} C{middle} {ya} {middle} {yb} {end} {yb}", (middle, (ya + yb) / 2 - 7)


def arc(a: Box, b: Box, *, below: bool) -> tuple[str, Point]:
    """Around what lies between two stages of a row: loops below, short cuts above."""
    if a == b:
        x = (a[0] + a[2]) / 2
        return f"M{x + 20} {a[3]} C{x + 24} {a[3] + 34} {x - 24} {a[3] + 34} {x - 20} {a[3] + 2}", (x, a[3] + 38)
    inset = 24 if b[0] > a[0] else -24
    xa, xb = (a[0] + a[2]) / 2 + inset, (b[0] + b[2]) / 2 - inset
    ya, yb = (a[3], b[3] + 2) if below else (a[1], b[1] - 2)
    depth = 28 if below else -26
    y = (max if below else min)(ya, yb) + depth
    return f"M{xa} {ya} C{xa} {y} {xb} {y} {xb} {yb}", ((xa + xb) / 2, y + (7 if below else 1))


def curve(a: Box, b: Box) -> tuple[str, Point]:
    """Path and label place of a line to a stage of another row."""
    right = b[0] > a[0]
    xa, xb = (a[2], b[0] - 2) if right else (a[0], b[2] + 2)
    ya, yb = (a[1] + a[3]) / 2, (b[1] + b[3]) / 2
    middle = (xa + xb) / 2
    return f"M{xa} {ya} C{middle} {ya} {middle} {yb} {xb} {yb}", (middle, (ya + yb) / 2 - 6)


def bridges(parts: list[Box]) -> list[Box]:
    """Pieces that join boxes of one worker in rows next to each other."""
    found = []
    for a in parts:
        for b in parts:
            left, right = max(a[0], b[0]), min(a[2], b[2])
            if a[3] <= b[1] <= a[3] + BAND_TOP and right - left > 40:
                found.append((left, a[3] - 24, right, b[1] + 24))
    return found


def without_touching(parts: list[Box]) -> list[Box]:
    """The parts that need a title: the first of each group that touch."""
    titled: list[Box] = []
    groups: list[list[Box]] = []
    for part in sorted(parts, key=lambda box: (box[1], box[0])):
        group = next((g for g in groups if any(_touch(part, other) for other in g)), None)
        if group is None:
            groups.append([part])
            titled.append(part)
        else:
            group.append(part)
    return titled


def _touch(a: Box, b: Box) -> bool:
    return a[0] <= b[2] and b[0] <= a[2] and a[1] <= b[3] + BAND_TOP and b[1] <= a[3] + BAND_TOP
