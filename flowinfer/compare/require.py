"""What a comparison must show for the exit code to be 0: `ttft_p50 <= 1.05x, answers == same`. Pure.

A figure is held against A's (`1.05x`) or against a value (`200ms`, `30`, `60%`, `1GiB`). What counts is the figure
itself, not the interval around it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowinfer.compare.answers import Answers
from flowinfer.compare.figures import NAMES, Figure
from flowinfer.compare.verdict import about_answers, value
from flowinfer.errors import FlowInferError
from flowinfer.spec.hints import did_you_mean
from flowinfer.units import parse_bytes, parse_duration

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_CLAUSE = re.compile(r"\s*(?P<name>\w+)\s*(?P<operator><=|>=|==|<|>)\s*(?P<bound>\S+)\s*")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")
EXAMPLE = 'It looks like "ttft_p50 <= 1.05x, answers == same".'


@dataclass(frozen=True)
class Clause:
    """One requirement. relative: `bound` is a factor of A's figure."""

    text: str
    name: str
    operator: str
    bound: float
    relative: bool

    def problem(self, figures: Sequence[Figure], answers: Answers) -> str:
        """Why it isn't met; empty when it is."""
        if self.name == "answers":
            return "" if answers.same else f"{self.text}: {about_answers(answers)}"
        figure = next(figure for figure in figures if figure.name == self.name)
        if figure.b is None or (self.relative and figure.a is None):
            return f"{self.text}: {self.name} wasn't measured"
        bound = self.bound * (figure.a or 0.0) if self.relative else self.bound
        if _OPERATORS[self.operator](figure.b, bound):
            return ""
        factor = f", {figure.b / figure.a:.3f}x of A's" if self.relative and figure.a else ""
        return f"{self.text}: B's {self.name} is {value(figure, figure.b)}{factor}"


def parse(text: str) -> list[Clause]:
    """The clauses of a requirement. Raises FlowInferError naming the one that can't be read."""
    return [_clause(part.strip()) for part in text.split(",")]


def _clause(text: str) -> Clause:
    match = _CLAUSE.fullmatch(text)
    if match is None:
        raise FlowInferError(f"--require: {text!r} isn't a comparison.", help=EXAMPLE)
    name, sign, bound = match["name"], match["operator"], match["bound"]
    if name == "answers":
        if (sign, bound) != ("==", "same"):
            raise FlowInferError(f"--require: {text!r}: answers can only be `== same`.")
        return Clause(text, name, sign, 0.0, False)
    if name not in NAMES:
        known = f"Figures: {', '.join(NAMES)}, answers."
        raise FlowInferError(f"--require: there is no figure {name!r}.", help=did_you_mean(name, NAMES) or known)
    if sign == "==":
        raise FlowInferError(f"--require: {text!r}: a measured figure is never exactly equal.", help="Use <= or >=.")
    if bound.endswith("x") and _NUMBER.fullmatch(bound[:-1]):
        return Clause(text, name, sign, float(bound[:-1]), True)
    return Clause(text, name, sign, _absolute(name, bound, text), False)


def _absolute(name: str, bound: str, text: str) -> float:
    try:
        if name.startswith(("ttft", "itl", "latency")):
            return parse_duration(bound)
        if name == "memory":
            return float(parse_bytes(bound))
        if bound.endswith("%"):
            return float(bound[:-1]) / 100
        return float(bound)
    except ValueError as error:
        raise FlowInferError(
            f"--require: {text!r}: {error}.", help=f"Or a factor of A's, as 1.05x. {EXAMPLE}"
        ) from error
