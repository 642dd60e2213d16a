"""Plots as SVG text: intervals of change, and shares of requests by time. Small on purpose: a report needs no more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from flowinfer.compare.figures import Figure
from flowinfer.compare.verdict import change

A, B, INK, SOFT, LINE, GOOD, BAD = "#66727f", "#1565c0", "#1f2933", "#66727f", "#d8dee5", "#2e7d32", "#b4540a"
WIDTH = 860
Point = tuple[float, float]


def intervals(figures: Sequence[Figure]) -> str:
    """A row a figure: its change as a dot on its 95 % interval; green where B is better, orange where it's worse."""
    rows = [figure for figure in figures if figure.change is not None]
    reach = max([0.05, *(abs(bound) for row in rows for bound in (row.change, row.low, row.high) if bound is not None)])
    reach = min(reach, 2.0)
    left, right, height = 280, WIDTH - 210, 26
    middle, scale = (left + right) / 2, (right - left) / 2 / (reach * 1.05)

    def x(share: float) -> float:
        return middle + max(-reach, min(reach, share)) * scale

    total = height * len(rows) + 34
    out = [_open(total), _line(middle, 4, middle, total - 28, SOFT, 1)]
    for tick in nice_ticks(-reach, reach, 6):
        out += [_line(x(tick), 4, x(tick), total - 28, LINE, 0.6), _text(x(tick), total - 12, f"{tick * 100:+.0f} %")]
    for number, row in enumerate(rows):
        y, colour = 18 + number * height, {"A": BAD, "B": GOOD, "": SOFT}[row.better]
        out.append(_text(left - 14, y + 4, row.title, "end", INK))
        if row.low is not None and row.high is not None:
            out.append(_line(x(row.low), y, x(row.high), y, colour, 4))
        out.append(f'<circle cx="{x(row.change or 0):.1f}" cy="{y}" r="5" fill="{colour}"/>')
        out.append(_text(right + 14, y + 4, change(row), "start", INK))
    return "".join([*out, "</svg>"])


def distribution(title: str, a: Sequence[float], b: Sequence[float]) -> str:
    """Share of requests that took up to so many milliseconds, for both sides."""
    if not a or not b:
        return ""
    sides = [[(value * 1e3, (i + 1) / len(side)) for i, value in enumerate(sorted(side))] for side in (a, b)]
    return _chart(title, "ms", sides, ("A", "B"), (A, B), steps=True, percent=True)


def sequence(title: str, a: Sequence[float], b: Sequence[float]) -> str:
    """Milliseconds of each request in the order in which they ran, so that a drift of the machine shows."""
    sides = [[(float(i + 1), value * 1e3) for i, value in enumerate(side)] for side in (a, b)]
    return _chart(title, "request", sides, ("A", "B"), (A, B)) if a and b else ""


def scatter(title: str, x_name: str, points: Sequence[Point], names: Sequence[str], line: Sequence[Point] = ()) -> str:
    """Named points: what each choice costs in one figure and gains in another; `line` joins some of them."""
    return _chart(title, x_name, [[point] for point in points], names, [B] * len(points), dots=True, line=line)


def _chart(
    title: str,
    x_name: str,
    sides: Sequence[Sequence[Point]],
    names: Sequence[str],
    colours: Sequence[str],
    *,
    steps: bool = False,
    percent: bool = False,
    dots: bool = False,
    line: Sequence[Point] = (),
) -> str:
    height, left, right, top, bottom = 280, 64, WIDTH - 40, 34, 236
    xs, ys = [p[0] for side in sides for p in side], [p[1] for side in sides for p in side]
    x_low, x_high = _range(xs, from_zero=not dots)
    y_low, y_high = (0.0, 1.0) if percent else _range(ys, from_zero=not dots)

    def at(point: Point) -> str:
        x = left + (point[0] - x_low) / (x_high - x_low) * (right - left)
        return f"{x:.1f} {bottom - (point[1] - y_low) / (y_high - y_low) * (bottom - top):.1f}"

    out = [_open(height), _text(left, 18, title, "start", INK, 14)]
    for tick in nice_ticks(x_low, x_high, 8):
        out.append(_text(float(at((tick, y_low)).split()[0]), bottom + 18, f"{tick:g}"))
    for tick in nice_ticks(y_low, y_high, 5):
        y = float(at((x_low, tick)).split()[1])
        out += [_line(left, y, right, y, LINE, 0.8), _text(left - 8, y + 4, _label(tick, percent), "end")]
    out.append(_text(right, bottom + 36, x_name, "end"))
    if len(line) > 1:
        out.append(_path([at(point) for point in line], LINE, steps=False))
    for number, (side, name, colour) in enumerate(zip(sides, names, colours, strict=True)):
        if dots:
            x, y = (float(part) for part in at(side[0]).split())
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')
            out.append(_text(x + 8, y - 6, name, "start" if x < (left + right) / 2 else "end", INK))
            continue
        out.append(_path([at(point) for point in side], colour, steps))
        out.append(_text(right - 60 + number * 40, 18, name, "start", colour, 14))
    return "".join([*out, "</svg>"])


def _path(points: Sequence[str], colour: str, steps: bool) -> str:
    """Steps go right before they go up, as a distribution does."""
    way = f"M{points[0]}"
    for point in points[1:]:
        x, y = point.split()
        way += f"H{x}V{y}" if steps else f"L{point}"
    return f'<path d="{way}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _range(values: Sequence[float], *, from_zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if from_zero:
        return 0.0, high * 1.02 or 1.0
    pad = (high - low) * 0.12 or abs(high) * 0.1 or 1.0
    return low - pad, high + pad


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from low to high."""
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _label(tick: float, percent: bool) -> str:
    return f"{tick * 100:.0f} %" if percent else f"{tick:g}"


def _open(height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        'font-family="Inter, Helvetica, Arial, sans-serif">'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> str:
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = SOFT, size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}>{escape(text)}</text>"
