"""Runs both sides over the same requests in turn, so that whatever drifts on the machine strikes both alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from flowinfer.compare.arms import Answer, Arm
from flowinfer.compare.asks import Ask


class Group(msgspec.Struct):
    """Requests that were sent at once, with the answers of both sides; the unit that is resampled."""

    round: int
    asks: list[Ask]
    a: list[Answer]
    b: list[Answer]


def run_rounds(
    a: Arm, b: Arm, asks: Sequence[Ask], *, rounds: int, in_flight: int, progress: Callable[[int], None]
) -> list[Group]:
    """All requests `rounds` times, in groups of `in_flight`: A, B, then B, A, and so on.

    Each round has a cache salt of its own: what an earlier round cached helps neither side, what requests of a round
    share does. A first group on both sides warms up and isn't counted.
    """
    parts = [asks[start : start + in_flight] for start in range(0, len(asks), in_flight)]
    for arm in (a, b):
        arm.answer(parts[0], "warm-up")
    groups: list[Group] = []
    for number in range(rounds):
        for part in parts:
            sides = [a, b] if len(groups) % 2 == 0 else [b, a]
            answers = {id(side): side.answer(part, f"round-{number}") for side in sides}
            groups.append(Group(number, list(part), answers[id(a)], answers[id(b)]))
            progress(len(part))
    return groups
