"""Prompts go where their prefix is, unless the wait there costs more than the prefix saves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowinfer.stages.cache_lookup.placement import leading_run, place

names = st.lists(st.sampled_from([f"prefill.{i}" for i in range(8)]), min_size=2, max_size=8, unique=True)


def test_the_first_owner_is_the_holder_of_its_run() -> None:
    assert leading_run([]) == ("", 0)
    assert leading_run(["a", "a", "b", "a"]) == ("a", 2)


def test_the_holder_gets_it_while_its_queue_is_shorter_than_twice_what_it_saves() -> None:
    assert place({"a": 19.0, "b": 0.0}, "a", saved=10.0, key=b"k") == "a"
    assert place({"a": 21.0, "b": 0.0}, "a", saved=10.0, key=b"k") == "b"


def test_a_holder_that_is_gone_counts_for_nothing() -> None:
    assert place({"b": 3.0, "c": 1.0}, "a", saved=10.0, key=b"k") == "c"


@given(names, st.binary(min_size=16, max_size=16))
def test_a_loss_moves_only_what_the_lost_one_had(workers: list[str], key: bytes) -> None:
    idle = dict.fromkeys(workers, 0.0)
    chosen = place(idle, "", 0.0, key)
    for lost in workers:
        if lost != chosen:
            assert place({name: 0.0 for name in workers if name != lost}, "", 0.0, key) == chosen


@given(names, st.binary(min_size=16, max_size=16))
def test_a_newcomer_takes_only_for_itself(workers: list[str], key: bytes) -> None:
    chosen = place(dict.fromkeys(workers[1:], 0.0), "", 0.0, key)
    assert place(dict.fromkeys(workers, 0.0), "", 0.0, key) in (chosen, workers[0])


def test_starts_are_spread_over_idle_workers() -> None:
    workers = [f"prefill.{i}" for i in range(4)]
    chosen = [place(dict.fromkeys(workers, 0.0), "", 0.0, i.to_bytes(16, "big")) for i in range(400)]
    assert all(70 <= chosen.count(name) <= 130 for name in workers)
