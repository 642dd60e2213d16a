"""Speculation without a model: what schedules of draft lengths give at a load, by drafts that hold by chance.

Each stream changes between easy text (code that repeats itself) and hard text (prose). A drafter knows how likely its
drafts hold but for some noise; a step takes the time of its rows, drafting that of its sequences. The schedules are
those that spec-verify runs, behind its calibration.

Legend: n streams, D drafts of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowinfer.stages.spec_verify.calibration import Calibration
from flowinfer.stages.spec_verify.costs import StepCosts, StepTable
from flowinfer.stages.spec_verify.drafts import DraftSchedule, FixedLength
from flowinfer.stages.spec_verify.schedule import Budget, ConfidenceLength, PositionAcceptance

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """table: true step times.  draft_s: of drafting, and draft_row_s of each sequence in it.

    easy, hard: chance of a draft to hold in either text.  changes: of a stream's text at a step.
    noise: deviation of the drafter's log-odds; None: it says nothing, and acceptance is learned.
    jitter: deviation of a step's time, relative.
    """

    table: StepTable
    draft_s: float = 0.0
    draft_row_s: float = 0.0
    num_drafts: int = 5
    easy: float = 0.93
    hard: float = 0.45
    changes: float = 0.03
    noise: float | None = 0.5
    jitter: float = 0.05


def ways(world: World) -> dict[str, Callable[[], DraftSchedule | None]]:
    """The schedules to compare; None drafts nothing. Costs begin with a table that is wrong by a half."""
    table = world.table
    slower = tuple(1.5 * seconds for seconds in table.seconds)
    wrong = StepTable(key="", rows=table.rows, seconds=slower, staircase=table.staircase)

    def confidence(budget: Budget) -> DraftSchedule:
        return ConfidenceLength(StepCosts(wrong), budget)

    return {
        "none": lambda: None,
        f"fixed {world.num_drafts}": FixedLength,
        "confidence": lambda: confidence("newest"),
        "two steps old": lambda: confidence("two_steps_old"),
        "early stop": lambda: confidence("early_stop"),
    }


def tokens_per_second(world: World, schedule: DraftSchedule | None, streams: int, steps: int, seed: int = 0) -> float:
    """Of `steps` steps over so many streams."""
    random = np.random.default_rng(seed)
    true = StepCosts(world.table)
    learned, calibration = PositionAcceptance(streams, world.num_drafts), Calibration()
    columns = np.arange(world.num_drafts)
    slots = np.arange(streams, dtype=np.int32)
    is_easy = random.random(streams) < 0.5
    tokens, seconds = 0, 0.0
    for step in range(steps):
        is_easy ^= random.random(streams) < world.changes
        lengths, held = np.zeros(streams, np.int64), np.zeros(streams, np.int64)
        if schedule is not None and schedule.looks(learned.of(slots)[:, 0], step):
            chances = _chances(world, is_easy, random)
            told = _told(chances, world.noise or 0.0, random).astype(np.float32)
            confidences = learned.of(slots) if world.noise is None else calibration.apply(told).astype(np.float64)
            lengths = schedule.choose(confidences, np.full(streams, world.num_drafts))
            held = np.logical_and.accumulate(random.random(chances.shape) < chances, axis=1).sum(1)
            trials = np.minimum(np.minimum(held, lengths) + 1, world.num_drafts)  # as far as tokens come
            learned.learn(slots, np.minimum(held, trials).astype(np.int32), trials.astype(np.int32))
            tested = columns < trials[:, None]
            calibration.learn(told[tested], (columns < held[:, None])[tested])
            drafting = world.draft_s + world.draft_row_s * streams
            schedule.drafted(streams, drafting)
            seconds += drafting
        rows = streams + int(lengths.sum())
        took = float(true.seconds(np.array([rows]))[0]) * float(np.exp(random.normal(0, world.jitter)))
        if schedule is not None:
            schedule.timed(rows, took, 0.0, plain=rows == streams)
        seconds += took
        tokens += streams + int(np.minimum(held, lengths).sum())
    return tokens / seconds


def compare(world: World, loads: tuple[int, ...] = (1, 8, 32, 128), steps: int = 400) -> dict[str, dict[int, float]]:
    """Tokens a second of each way at each load."""
    return {
        name: {streams: tokens_per_second(world, make(), streams, steps) for streams in loads}
        for name, make in ways(world).items()
    }


def _chances(world: World, is_easy: NDArray[np.bool_], random: np.random.Generator) -> F64:
    """True chance of each draft to hold if those before it do, [n, D]: later ones are harder, and all differ."""
    text = np.where(is_easy, world.easy, world.hard)[:, None] * 0.97 ** np.arange(world.num_drafts)
    return _told(text, 1.0, random)


def _told(chances: F64, noise: float, random: np.random.Generator) -> F64:
    scores = np.log(chances / (1 - chances)) + random.normal(0, noise, chances.shape)
    told: F64 = 1 / (1 + np.exp(-scores))
    return told
