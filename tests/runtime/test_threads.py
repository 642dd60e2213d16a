"""Threads of workers: their number, and that those of a crowd don't spin for each other."""

from __future__ import annotations

import pytest

from flowinfer.graph.planner import share
from flowinfer.runtime.threads import ALONE, CROWDED, is_crowded, spinning


@pytest.mark.parametrize(
    ("asked", "cores", "engines", "threads"), [(0, 2, 2, 1), (0, 8, 2, 4), (0, 2, 3, 1), (3, 2, 2, 3), (0, 4, 0, 4)]
)
def test_cores_are_shared_unless_the_file_says_otherwise(asked: int, cores: int, engines: int, threads: int) -> None:
    assert share(asked, cores, engines) == threads


@pytest.mark.parametrize(
    ("workers", "cores", "crowded"),
    [
        ({"engine": (1, 2)}, 2, False),
        ({"prefill": (1, 1), "decode": (1, 1)}, 2, False),
        ({"prefill": (1, 2), "decode": (1, 2)}, 2, True),
        ({"prefill": (1, 1), "decode": (1, 2)}, 2, True),
        ({"engine": (3, 2)}, 4, True),
        ({"engine": (3, 1)}, 2, False),
        ({}, 1, False),
    ],
)
def test_more_threads_than_cores_are_a_crowd(workers: dict[str, tuple[int, int]], cores: int, crowded: bool) -> None:
    assert is_crowded(workers, cores) == crowded


def test_a_crowd_sleeps_and_others_spin_for_a_bounded_time() -> None:
    assert spinning(True, {}) == CROWDED and CROWDED["GOMP_SPINCOUNT"] == "0"
    assert spinning(False, {}) == ALONE and 0 < int(ALONE["GOMP_SPINCOUNT"]) < 300_000


def test_what_the_user_has_set_stays() -> None:
    assert spinning(True, {"GOMP_SPINCOUNT": "7"}) == CROWDED | {"GOMP_SPINCOUNT": "7"}
    assert spinning(False, {"OMP_WAIT_POLICY": "passive"}) == {}
