"""Says in plain sentences what a comparison found. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from flowinfer.compare.answers import Answers
from flowinfer.compare.figures import Figure, unit_of
from flowinfer.units import format_bytes

_WORDS = {  # when B is better, when B is worse
    "ttft": ("sooner", "later"),
    "itl": ("faster", "slower"),
    "latency": ("faster", "slower"),
    "tokens": ("more", "fewer"),
    "goodput": ("more", "fewer"),
    "hit": ("more", "fewer"),
    "accepted": ("more", "fewer"),
    "errors": ("fewer", "more"),
    "memory": ("less", "more"),
}


def headline(figures: Sequence[Figure], answers: Answers) -> str:
    """The one sentence to remember."""
    figure = next(figure for figure in figures if figure.name == "latency_p50")
    return f"{_speed(figure)}; {about_answers(answers)}."


def _speed(figure: Figure) -> str:
    if figure.change is None:
        return "Nothing was measured"
    if figure.low is None or figure.high is None:
        return f"Too few groups of requests for a verdict (B {figure.change * 100:+.0f} % at p50): raise --rounds"
    if not figure.told_apart:
        return f"No difference can be told at p50 (95 % interval {_span(figure)})"
    # Slower by its change; faster by the share of time that is saved.
    low, high = sorted((abs(figure.low), abs(figure.high)))
    word = "faster" if figure.change < 0 else "slower"
    return f"B is {abs(figure.change) * 100:.0f} % {word} at p50, 95 % interval {low * 100:.0f} to {high * 100:.0f}"


def about_answers(answers: Answers) -> str:
    """What is to be said about the answers, without a full stop."""
    if not answers.num_pairs:
        return "each arm answered other requests"
    failed = f"; failed: {len(answers.failed_a)} of A, {len(answers.failed_b)} of B"
    tail = failed if answers.failed_a or answers.failed_b else ""
    if not answers.differences:
        return f"all {answers.num_pairs} answers are the same{tail}" if not tail else f"no two answers differ{tail}"
    first = min(answers.differences, key=lambda difference: difference.at)
    return (
        f"answers differ in {len(answers.differences)} of {answers.num_pairs}, first at {first.unit} {first.at}{tail}"
    )


def sentence(figure: Figure) -> str:
    """The verdict on one figure."""
    if figure.change is None and figure.a == 0 and figure.b is not None:
        return "none on either side" if figure.b == 0 else "B alone has any"
    if figure.change is None:
        return "with --real only" if figure.name == "memory" else "not measured"
    if figure.low is None:
        return "no interval"
    if not figure.told_apart:
        return "can't be told apart"
    more, fewer = _WORDS[figure.name.split("_")[0]]
    word = more if figure.better == "B" else fewer
    return f"B {amount(figure)} {word}"


def amount(figure: Figure) -> str:
    """The size of the change, without its sign."""
    size = abs(figure.change or 0) * 100
    if figure.unit == "share":
        return f"{size:.1f} points"
    return f"{size:.0f} %" if size >= 1 else f"{size:.1f} %"


def change(figure: Figure) -> str:
    """The change with its sign and interval."""
    if figure.change is None:
        return "-"
    sign = "points" if figure.unit == "share" else "%"
    return f"{figure.change * 100:+.1f} {sign}" + (f" [{_span(figure)}]" if figure.low is not None else "")


def _span(figure: Figure) -> str:
    assert figure.low is not None and figure.high is not None
    return f"{figure.low * 100:+.1f} to {figure.high * 100:+.1f}"


def in_words(name: str, number: float | None) -> str:
    """A value of the figure of this name."""
    return value(Figure(name, name, unit_of(name), True, None, None), number)


def value(figure: Figure, number: float | None) -> str:
    """A value in the notation that people read."""
    if number is None:
        return "-"
    if figure.unit == "s":
        return f"{number * 1e3:.1f} ms" if number < 10 else f"{number:.2f} s"
    if figure.unit == "share":
        return f"{number * 100:.1f} %"
    if figure.unit == "bytes":
        return format_bytes(round(number / 2**20) * 2**20)
    return f"{number:.3g} {figure.unit}"
