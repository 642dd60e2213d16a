"""Draft lengths over loads: by confidence never much below the better of none and fixed, and above both in between."""

from __future__ import annotations

import pytest

from flowinfer.sim.speculation import World, compare
from flowinfer.stages.spec_verify.costs import StepTable, linear_table

CPU = linear_table(0.030, 0.0036, most=1024)  # SmolLM2 on two cores: a row costs 0.12 of what a step costs anyway
GRAPHS = StepTable(
    key="graphs",
    rows=(1, 8, 32, 64, 128, 256, 512, 1024),
    seconds=tuple(1e-3 * t for t in (1.0, 1.02, 1.1, 1.3, 1.8, 2.9, 5.2, 10.0)),
    staircase=True,
)
WORLDS = {
    "a CPU": World(CPU, draft_s=0.002, draft_row_s=0.0003),
    "graphs on a GPU": World(GRAPHS, draft_s=0.0002, draft_row_s=1e-6),
    "learned acceptance": World(CPU, draft_s=1e-4, noise=None),
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_confidence_is_near_the_best_at_every_load_and_above_at_one(world: World) -> None:
    speeds = compare(world, steps=120)
    others = [speeds["none"], speeds["fixed 5"]]
    gains = [speeds["confidence"][load] / max(other[load] for other in others) for load in speeds["none"]]
    assert min(gains) > 0.97
    assert max(gains) > 1.03


def test_fixed_lengths_lose_in_large_batches_and_win_in_small_ones() -> None:
    speeds = compare(WORLDS["a CPU"], steps=60)
    assert speeds["fixed 5"][1] > 1.2 * speeds["none"][1]
    assert speeds["fixed 5"][128] < 0.95 * speeds["none"][128]


def test_causal_budgets_cost_little() -> None:
    speeds = compare(WORLDS["graphs on a GPU"], steps=120)
    for load, best in speeds["confidence"].items():
        assert speeds["two steps old"][load] > 0.8 * best
