"""Where a prompt begins behind a hit: against a search through all that could be done."""

from __future__ import annotations

import random

import pytest

from flowinfer.cache.replay import Beginning, ReplayRule, replay_rule


def rule(mode: str, layers: int = 8, window: int = 128, block: int = 128) -> ReplayRule:
    return replay_rule(mode, layers=layers, window=window, block_tokens=block)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layers", "window", "block", "state", "exact", "bounded"),
    [
        (8, 128, 128, 1, 8, 1),
        (43, 128, 128, 1, 43, 1),
        (3, 100, 64, 2, 6, 2),
        (1, 1, 64, 1, 1, 1),
        (2, 129, 128, 1, 2, 2),
    ],
)
def test_a_replay_is_layers_times_the_window_or_one(
    layers: int, window: int, block: int, state: int, exact: int, bounded: int
) -> None:
    """Exact: the last keys of the last layer depend on nothing before."""
    found = rule("exact", layers, window, block)
    assert (found.state_blocks, found.blocks, rule("bounded", layers, window, block).blocks) == (state, exact, bounded)
    assert (exact - state) * block >= (layers - 1) * (window - 1)
    assert state * block >= window - 1


def test_dense_models_begin_behind_any_block() -> None:
    for mode in ("exact", "bounded", "off"):
        dense = rule(mode, window=0)
        assert dense.begin(7, ()) == Beginning(7) and dense.goal(2, 7, (), ()) == (7, [])
        assert dense.untouched(7, ()) == 7


def test_hits_that_a_replay_would_run_whole_are_not_adopted() -> None:
    exact, bounded, off = rule("exact"), rule("bounded"), rule("off")
    assert exact.begin(8, range(8)) == Beginning(0) and exact.begin(9, range(9)) == Beginning(9, 8)
    assert bounded.begin(1, range(1)) == Beginning(0) and bounded.begin(2, range(2)) == Beginning(2, 1)
    assert off.begin(30, range(30)) == Beginning(0) and off.begin(30, range(12)) == Beginning(30)


def test_whole_blocks_near_the_end_of_a_hit_beat_a_replay() -> None:
    partial = set(range(30)) - {24}
    assert rule("exact").begin(30, partial) == Beginning(25)
    assert rule("bounded").begin(30, partial) == Beginning(30, 1)
    assert rule("bounded").begin(26, partial) == Beginning(25)
    assert rule("off").begin(30, partial) == Beginning(25)


@pytest.mark.parametrize("mode", ["exact", "bounded", "off"])
@pytest.mark.parametrize("state_blocks", [1, 2, 3])
def test_nothing_untouched_is_ever_written(mode: str, state_blocks: int) -> None:
    """However the hit grows and whatever state comes, what is written begins behind the untouched blocks."""
    chance = random.Random(0)
    made = rule(mode, layers=3, window=64 * state_blocks, block=64)
    assert made.state_blocks == state_blocks
    for _ in range(2_000):
        num = chance.randrange(12)
        partial = {i for i in range(num) if chance.random() < 0.6}
        untouched = made.untouched(num, partial)
        assert untouched <= num
        reach = num + chance.randrange(6)
        stored = {i for i in range(untouched, reach) if chance.random() < 0.3}
        end, states = made.goal(num, reach, partial, stored)
        assert set(states) <= stored and all(i >= untouched for i in states)
        found = max(num, end)
        lacking = (partial | set(range(num, found))) - set(states)
        begin, whole = made.begin(found, lacking), made.whole_end(found, lacking)
        assert begin.first >= untouched
        assert found - begin.first == min(found - whole, found if made.blocks is None else made.blocks)


def test_state_is_read_where_it_saves_tokens() -> None:
    exact = rule("exact", layers=3)
    assert exact.goal(0, 20, (), {4, 19}) == (20, [19])
    assert exact.goal(0, 20, (), {17}) == (18, [17]), "two blocks are run instead of three"
    assert exact.goal(0, 20, (), {4}) == (20, []), "fifteen blocks are more than a replay"
    assert rule("off").goal(0, 20, (), {4}) == (5, [4])
    assert rule("off").goal(0, 20, (), ()) == (0, [])
    assert exact.goal(10, 10, range(10), {9}) == (10, [9]), "the entries are here, the state is there"
