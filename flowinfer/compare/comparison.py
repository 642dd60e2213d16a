"""A finished comparison as one value: what was compared, on what, and what came out. Written as JSON as it stands."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np

import flowinfer
from flowinfer.compare.answers import Answers, compare_answers
from flowinfer.compare.arms import Answer
from flowinfer.compare.figures import CONFIDENCE, NUM_RESAMPLES, Figure, Limit, figures, itl, latency, ttft
from flowinfer.compare.rounds import Group
from flowinfer.compare.verdict import headline


class Side(msgspec.Struct):
    """One side: its name, and what its requests took, in seconds, in the order in which they ran."""

    name: str
    ttft_s: list[float]
    itl_s: list[float]
    latency_s: list[float]


class Setup(msgspec.Struct, kw_only=True):
    """What a reader must know to trust or repeat the figures. changes: a unified diff of the resolved files.

    kind: a comparison, or an experiment in which a running service split or mirrored its traffic.  note: how it ended.
    """

    a: str
    b: str
    changes: str
    requests: str
    num_requests: int
    rounds: int
    in_flight: int
    limit: Limit
    real: bool
    seed: int = 0
    confidence: float = CONFIDENCE
    resamples: int = NUM_RESAMPLES
    machine: str = ""
    version: str = flowinfer.__version__
    when: str = ""
    kind: Literal["compare", "split", "mirror"] = "compare"
    share: float = 0.0
    note: str = ""


class Comparison(msgspec.Struct):
    """All that a report says."""

    headline: str
    setup: Setup
    figures: list[Figure]
    answers: Answers
    a: Side
    b: Side


def compared(groups: Sequence[Group], setup: Setup) -> Comparison:
    """The comparison of what was measured."""
    found, answers = figures(groups, setup.limit, setup.seed), compare_answers(groups)
    return Comparison(
        headline(found, answers),
        setup,
        found,
        answers,
        side_of(setup.a, [answer for group in groups for answer in group.a]),
        side_of(setup.b, [answer for group in groups for answer in group.b]),
    )


def side_of(name: str, answers: Sequence[Answer]) -> Side:
    """What the requests of one side took."""
    return Side(name, *(_measured(of, answers) for of in (ttft, itl, latency)))


def _measured(of: Callable[[Answer], float], answers: Sequence[Answer]) -> list[float]:
    values = [of(answer) for answer in answers if not answer.error]
    return [round(value, 6) for value in values if not np.isnan(value)]


def machine() -> str:
    """This machine in a few words."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
