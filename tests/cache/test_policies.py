"""Evictions keep what they are given, give it up once, and the learning one learns."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.cache.policies.density import HitDensity
from flowinfer.cache.policies.eviction import LRU, Eviction
from flowinfer.cache.policies.expiry import SlidingExpiry
from flowinfer.sim.replay import replay
from flowinfer.sim.trace import Trace, TraceRequest

MAKERS: dict[str, Callable[[int], Eviction]] = {"lru": lambda num_blocks: LRU(), "density": HitDensity}
each_eviction = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@each_eviction
def test_the_tail_goes_before_the_head_and_the_old_before_the_new(make: Callable[[int], Eviction]) -> None:
    eviction = make(10)
    eviction.put([b"a", b"b", b"c"])
    eviction.put([b"d", b"e", b"f"])
    eviction.take(b"a")
    eviction.put([b"a"])
    assert [eviction.pop() for _ in range(6)] == [b"c", b"b", b"f", b"e", b"d", b"a"]


@each_eviction
def test_an_empty_one_has_nothing_to_evict(make: Callable[[int], Eviction]) -> None:
    with pytest.raises(KeyError):
        make(10).pop()


@each_eviction
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "take", "pop", "clear"]), st.integers(0, 30), st.integers(1, 5)), max_size=80
    )
)
@settings(max_examples=60)
def test_names_leave_once_and_only_those_that_came(
    make: Callable[[int], Eviction], steps: list[tuple[str, int, int]]
) -> None:
    eviction, there, used = make(8), set(), set()
    for action, at, count in steps:
        if action == "put":
            names = [bytes([i]) for i in range(at, at + count) if bytes([i]) not in there]
            eviction.put(names)
            there.update(names)
            used.difference_update(names)
        elif action == "take" and there:
            name = sorted(there)[at % len(there)]
            eviction.take(name)
            there.remove(name)
            used.add(name)
        elif action == "pop" and there:
            there.remove(eviction.pop())  # KeyError: it wasn't there
        elif action == "clear":
            assert sorted(eviction.clear()) == sorted(there)
            there.clear()
        assert len(eviction) == len(there)


def chats_among_documents(num_requests: int = 3_000) -> Trace:
    """40 chats of 8 blocks that come back again and again, between long documents that never do."""
    rng, requests = random.Random(0), []
    for number in range(num_requests):
        if rng.random() < 0.5:
            chat = rng.randrange(40)
            path = [(0, chat, depth) for depth in range(8)]
        else:
            path = [(1, number, depth) for depth in range(24)]
        requests.append(TraceRequest(float(number), 0, 0, tuple(repr(step).encode() for step in path)))
    return Trace("chats", 64, requests)


def test_density_learns_that_documents_never_come_back() -> None:
    trace = chats_among_documents()
    lru, density = (replay(trace, 400, make(400)).hits for make in MAKERS.values())
    assert lru < 0.6 * trace.num_blocks * 0.25
    assert density > 0.9 * trace.num_blocks * 0.25


def test_density_remembers_a_bounded_number_of_evicted_names() -> None:
    eviction = HitDensity(16, ghosts=2.0)
    for number in range(1_000):
        eviction.put([number.to_bytes(2, "big")])
        if len(eviction) > 16:
            eviction.pop()
    assert len(eviction._ghosts) == 32


def test_expiry_slides_with_each_use() -> None:
    cache = SlidingExpiry(10.0)
    cache.use([b"a", b"b"], now=0.0)
    cache.use([b"a"], now=8.0)
    assert cache.expire(10.0) == []
    assert cache.expire(10.5) == [b"b"]
    assert cache.num_leading([b"a", b"b"]) == 1
