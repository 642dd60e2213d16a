"""Times of a step: between and beyond the profiled sizes, as stairs, and corrected by what steps took."""

from __future__ import annotations

import numpy as np
import pytest

from flowinfer.stages.spec_verify.costs import ENOUGH, StepCosts, StepTable


def table(staircase: bool = False, **kwargs: float) -> StepTable:
    return StepTable(key="test", rows=(1, 4, 16), seconds=(1.0, 1.6, 4.0), staircase=staircase, **kwargs)  # type: ignore[arg-type]


def seconds(costs: StepCosts, *rows: int, context: float = 0.0) -> list[float]:
    return costs.seconds(np.array(rows), context).tolist()


def test_times_lie_on_lines_between_the_sizes_and_beyond() -> None:
    assert seconds(StepCosts(table()), 1, 2, 4, 10, 16, 21) == pytest.approx([1.0, 1.2, 1.6, 2.8, 4.0, 5.0])


def test_captured_sizes_are_stairs_and_what_is_beyond_is_finer() -> None:
    costs = StepCosts(table(staircase=True))
    assert seconds(costs, 1, 2, 4, 5, 16) == pytest.approx([1.0, 1.6, 1.6, 4.0, 4.0])
    assert 5.0 <= seconds(costs, 21)[0] <= 6.0


def test_context_costs_by_pair() -> None:
    assert seconds(StepCosts(table(pair_s=0.001)), 4, context=100.0) == pytest.approx([2.0])


def test_a_slower_machine_is_learned_once_there_are_enough_steps() -> None:
    costs = StepCosts(table())
    for _ in range(ENOUGH - 1):
        costs.observe(4, 3.2)
    assert seconds(costs, 4) == pytest.approx([1.6])
    costs.observe(4, 3.2)
    assert seconds(costs, 1, 4, 16) == pytest.approx([2.0, 3.2, 8.0])


def test_sizes_are_corrected_apart_and_outliers_do_nothing() -> None:
    costs = StepCosts(table())
    for _ in range(8):
        costs.observe(1, 1.0)
        costs.observe(4, 3.2)
    costs.observe(1, 500.0)
    assert seconds(costs, 1, 4) == pytest.approx([1.0, 3.2])


def test_sizes_beyond_the_table_are_learned_apart() -> None:
    costs = StepCosts(table())
    for _ in range(8):
        costs.observe(128, 30.0)
        costs.observe(256, 33.0)
    assert seconds(costs, 128, 256) == pytest.approx([30.0, 33.0])


def test_sizes_without_steps_of_their_own_follow_their_neighbours() -> None:
    costs = StepCosts(table())
    for _ in range(8):
        costs.observe(4, 0.8)
        costs.observe(32, 1.0)  # the table's line says 7.2
    assert 0.8 < seconds(costs, 16)[0] <= 1.0
    assert seconds(costs, 60)[0] == pytest.approx(1.2, rel=0.02), "on the line of the last two"


def test_more_rows_never_look_cheaper() -> None:
    costs = StepCosts(table())
    for _ in range(8):
        costs.observe(16, 0.5)
        costs.observe(1, 1.0)
    assert seconds(costs, 4)[0] <= seconds(costs, 16)[0]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_not_learned(bad: float) -> None:
    costs = StepCosts(table())
    for _ in range(10):
        costs.observe(4, bad)
        costs.observe_draft(4, bad if bad else -1.0)
    assert seconds(costs, 4) == pytest.approx([1.6]) and costs.draft_seconds(4) == 0


def test_drafting_time_is_the_median_of_the_nearest_batch_size() -> None:
    costs = StepCosts(table())
    for value in (0.1, 0.1, 9.0):
        costs.observe_draft(4, value)
    assert costs.draft_seconds(5) == pytest.approx(0.1)
    assert costs.draft_seconds(1) == pytest.approx(0.1)
    assert costs.draft_seconds(16) == pytest.approx(0.4)


@pytest.mark.parametrize(
    "bad", [{"rows": (4, 1, 16)}, {"seconds": (1.0, 2.0)}, {"seconds": (1.0, -1.0, 2.0)}, {"rows": (), "seconds": ()}]
)
def test_figures_that_cannot_be_times_are_told(bad: dict[str, tuple[float, ...]]) -> None:
    assert table().usable
    assert not StepTable(**{"key": "test", "rows": (1, 4, 16), "seconds": (1.0, 1.6, 4.0)} | bad).usable  # type: ignore[arg-type]
