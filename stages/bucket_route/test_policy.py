"""Buckets by length, and the dispatch of buckets to workers."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.errors import RequestError
from flowinfer.stages.bucket_route.policy import QUANTUM_MS, BucketDispatch, BucketPolicy

LANES = ("short", "medium", "long", "huge")
COSTS = {"short": 10.0, "medium": 400.0, "long": 4_000.0, "huge": 60_000.0}
lanes = st.sampled_from(LANES)
waiting_lanes = st.dictionaries(lanes, st.floats(0, 1e6))


@pytest.mark.parametrize(
    ("num_tokens", "bucket"), [(0, "short"), (1, "short"), (10, "short"), (11, "long"), (100, "long")]
)
def test_a_bound_belongs_to_its_bucket(num_tokens: int, bucket: str) -> None:
    assert BucketPolicy({"short": 10, "long": 100}).choose(num_tokens) == bucket


def test_beyond_the_last_bound_the_error_names_bucket_and_limit() -> None:
    with pytest.raises(RequestError, match=r"101 prompt tokens; this service takes at most 100 .*'long'") as caught:
        BucketPolicy({"short": 10, "long": 100}).choose(101)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


@given(st.integers(1, 12))
def test_every_lane_has_a_home_and_shares_differ_by_one_at_most(instances: int) -> None:
    dispatch = BucketDispatch(LANES, instances)
    homes = [lane for i in range(instances) for lane in dispatch.home(i)]
    counts = [homes.count(lane) for lane in LANES]
    assert min(counts) >= 1 and max(counts) - min(counts) <= 1


@given(st.integers(1, 6), waiting_lanes, st.sets(st.tuples(st.integers(0, 5), lanes)), st.sets(st.integers(0, 5)))
def test_a_choice_is_possible_and_is_made_whenever_it_must_be(
    instances: int, waiting: dict[str, float], ready: set[tuple[int, str]], idle: set[int]
) -> None:
    dispatch = BucketDispatch(LANES, instances)
    pairs = {(i, lane) for i, lane in ready if lane in waiting and i < instances}
    wanted = {(i, lane) for i, lane in pairs if lane in dispatch.home(i) or i in idle}
    choice = dispatch.choose(waiting, ready, idle)
    assert (choice in wanted) if wanted else choice is None


def test_an_idle_worker_takes_from_another_bucket_and_a_busy_one_does_not() -> None:
    dispatch = BucketDispatch(LANES, 4)
    ready = [(0, "huge"), (1, "huge")]
    assert dispatch.home(0) == ("short",)
    assert dispatch.choose({"huge": 1e5}, ready, idle=[0]) == (0, "huge")
    assert dispatch.choose({"huge": 1e5}, ready, idle=[]) is None


def test_an_idle_worker_prefers_its_own_bucket() -> None:
    dispatch = BucketDispatch(LANES, 4)
    every = [(i, lane) for i in range(4) for lane in LANES]
    assert dispatch.choose(dict.fromkeys(LANES, 10.0), every, idle=[2]) == (2, "long")


def test_a_dead_worker_passes_its_share_on() -> None:
    dispatch = BucketDispatch(LANES, 2)
    assert dispatch.home(1) == ("medium", "huge")
    dispatch.resize([0])
    assert set(dispatch.home(0)) == set(LANES) and dispatch.home(1) == ()
    assert dispatch.choose({"huge": 1e5}, [(0, "huge"), (1, "huge")], idle=[]) == (0, "huge")


def test_without_workers_nothing_is_chosen() -> None:
    dispatch = BucketDispatch(LANES, 0)
    assert dispatch.choose({"short": 1.0}, [(0, "short")], idle=[0]) is None


@settings(max_examples=50)
@given(st.dictionaries(lanes, st.floats(1, 1e5), min_size=2), st.integers(1, 300))
def test_one_worker_gives_backlogged_buckets_equal_time_up_to_one_head_each(
    costs: dict[str, float], sends: int
) -> None:
    dispatch = BucketDispatch(LANES, 1)
    ready = [(0, lane) for lane in LANES]
    spent: dict[str, float] = defaultdict(float)
    for _ in range(sends):
        choice = dispatch.choose(costs, ready, idle=[])
        assert choice is not None
        spent[choice[1]] += costs[choice[1]]
    times = [spent[lane] for lane in costs]
    assert max(times) - min(times) <= 2 * max(costs.values()) + 2 * QUANTUM_MS


def test_a_short_prompt_is_sent_next_even_when_long_ones_have_waited_for_hours() -> None:
    dispatch = BucketDispatch(LANES, 1)
    ready = [(0, lane) for lane in LANES]
    long_ones = {lane: COSTS[lane] for lane in ("medium", "long", "huge")}
    for _ in range(1000):
        dispatch.choose(long_ones, ready, idle=[])
    order = [dispatch.choose(COSTS, ready, idle=[]) for _ in range(4)]
    assert (0, "short") in order


def test_a_bucket_saves_nothing_up_while_it_is_empty() -> None:
    dispatch = BucketDispatch(("a", "b"), 1)
    ready = [(0, "a"), (0, "b")]
    for _ in range(100):
        dispatch.choose({"a": 1.0, "b": 1e9}, ready, idle=[])
    dispatch.choose({"a": 1.0}, ready, idle=[])
    sent = [dispatch.choose({"a": 1.0, "b": 10 * QUANTUM_MS}, ready, idle=[]) for _ in range(100)]
    assert (0, "b") not in sent
