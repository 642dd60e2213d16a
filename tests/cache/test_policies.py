"""Evictions keep what they are given, give it up once, and the learning one learns."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.cache.policies.admission import Dueling, Everything, Reused
from flowinfer.cache.policies.density import HitDensity
from flowinfer.cache.policies.eviction import LRU, Eviction
from flowinfer.cache.policies.expiry import SlidingExpiry
from flowinfer.sim.admission import admit
from flowinfer.sim.replay import replay
from flowinfer.sim.trace import Trace, TraceRequest, read_trace

TRACES = Path(__file__).parents[1] / "data" / "traces"
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


# -------------------------------------------------------------------------------------------------------- admission


def chain(seed: int, length: int) -> list[bytes]:
    return [random.Random(f"{seed} {i}").randbytes(16) for i in range(length)]


def test_what_comes_once_is_not_written_and_what_comes_again_is() -> None:
    policy = Reused()
    assert policy.admit(chain(1, 30)) == (0, False)
    assert policy.admit(chain(2, 30)) == (0, False)
    assert policy.admit(chain(1, 30)) == (30, True)


def test_of_prompts_that_share_a_beginning_only_that_is_written() -> None:
    policy = Reused()
    shared = chain(0, 5)
    wanted = [policy.admit([*shared, *chain(n, 10)]) for n in range(1, 9)]
    assert wanted[0] == (0, False) and wanted[4:] == [(5, False)] * 4


def test_who_goes_on_in_a_conversation_is_kept_to_the_end() -> None:
    policy, turn = Reused(), chain(1, 40)
    assert policy.admit(turn[:10]) == (0, False)
    assert policy.admit(turn[:20]) == (20, True)
    assert policy.admit(turn[:40]) == (40, True)


def test_what_was_met_long_ago_is_forgotten() -> None:
    policy = Reused(width=1 << 10)
    policy.admit(chain(1, 10))
    for n in range(2, 220):
        policy.admit(chain(n, 10))
    assert policy.admit(chain(1, 10))[0] == 0


def test_no_prompt_at_all_is_nothing_to_write() -> None:
    assert [policy.admit([]) for policy in (Everything(), Reused(), Dueling(8))] == [(0, True), (0, False), (0, True)]


def test_a_small_tier_is_choosy_under_one_off_prompts_and_a_large_one_is_not() -> None:
    rng, small, large = random.Random(0), Dueling(400), Dueling(100_000)
    for n in range(1500):
        names = chain(rng.randrange(20), 16) if n % 4 == 0 else chain(1000 + n, 40)
        for policy in (small, large):
            policy.admit(names)
    assert small.is_choosy and not large.is_choosy


@pytest.mark.parametrize("share", [0.05, 0.25, 1.0])
def test_on_a_real_trace_choosing_finds_as_much_as_writing_everything(share: float) -> None:
    trace = read_trace(TRACES / "mooncake_conversation_head.jsonl")
    size = max(trace.longest, int(share * trace.working_set))
    every, chosen = (admit(trace, write, trace.longest, size) for write in ("all", "auto"))
    assert chosen.hits >= 0.99 * every.hits and chosen.written <= every.written
