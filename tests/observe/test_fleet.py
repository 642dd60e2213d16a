"""Counters of a worker go on over its deaths; levels end with it."""

from __future__ import annotations

from flowinfer.observe.fleet import Fleet
from flowinfer.observe.metrics import Sample

WORKER = "decode.0"


def life(generation: int) -> list[Sample]:
    """What a worker's generation says: 5 drafts of its own, 7 free blocks, and how often it was started again."""
    return [
        ("flowinfer:spec_drafts_total", {}, 5.0),
        ("flowinfer:kv_blocks_free", {}, 7.0),
        ("flowinfer:worker_restarts_total", {"worker": WORKER}, float(generation - 1)),
    ]


def after(deaths: int, *, alive: bool) -> dict[str, float]:
    fleet = Fleet()
    for generation in range(1, deaths + 1):
        fleet.update(WORKER, life(generation))
        fleet.down(WORKER)
    if alive:
        fleet.update(WORKER, life(deaths + 1))
    return {name: value for name, _, value in fleet.samples()[WORKER]}


def test_counts_add_up_over_generations_and_restarts_stay_what_they_are() -> None:
    seen = after(3, alive=True)
    assert seen["flowinfer:spec_drafts_total"] == 20.0
    assert seen["flowinfer:worker_restarts_total"] == 3.0
    assert seen["flowinfer:kv_blocks_free"] == 7.0


def test_a_dead_worker_keeps_its_counts_and_has_no_levels() -> None:
    seen = after(2, alive=False)
    assert seen["flowinfer:spec_drafts_total"] == 10.0
    assert "flowinfer:kv_blocks_free" not in seen
