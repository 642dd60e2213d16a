"""Runs both sides over the same requests in turn, so that whatever drifts on the machine strikes both alike."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

import msgspec

from flowinfer.compare.arms import Answer, Arm
from flowinfer.compare.asks import Ask


class Group(msgspec.Struct):
    """Requests that were sent at once, with the answers of both sides; the unit that is resampled.

    memory: bytes that both sides held behind it, where that can be told.
    """

    round: int
    asks: list[Ask]
    a: list[Answer]
    b: list[Answer]
    memory: tuple[int, int] | None = None


def run_rounds(
    a: Arm, b: Arm, asks: Sequence[Ask], *, rounds: int, in_flight: int, progress: Callable[[int], None]
) -> list[Group]:
    """All requests `rounds` times, in groups of `in_flight`: A, B, then B, A, and so on.

    Each round of a side has a cache salt of its own: what an earlier round, an earlier run or the other side cached
    (on a disk that they share, say) helps neither, what requests of a round share does. A first group on both sides
    warms up and isn't counted.
    """
    parts = [asks[start : start + in_flight] for start in range(0, len(asks), in_flight)]
    run = uuid.uuid4().hex[:8]
    for arm in (a, b):
        arm.answer(parts[0], f"{run}-warm-up")
    groups: list[Group] = []
    for number in range(rounds):
        for part in parts:
            sides = [a, b] if len(groups) % 2 == 0 else [b, a]
            salt = {id(a): f"{run}-a-{number}", id(b): f"{run}-b-{number}"}
            answers = {id(side): side.answer(part, salt[id(side)]) for side in sides}
            held = a.memory(), b.memory()
            memory = (held[0], held[1]) if held[0] is not None and held[1] is not None else None
            groups.append(Group(number, list(part), answers[id(a)], answers[id(b)], memory))
            progress(len(part))
    return groups
