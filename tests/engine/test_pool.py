"""The block pool: every block is free, held or cached, whatever happens in whatever order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flowinfer.cache.policies.density import HitDensity
from flowinfer.cache.policies.eviction import LRU
from flowinfer.engine.batch import Batch
from flowinfer.engine.held import HeldKV, grow_all
from flowinfer.engine.pool import KVPool


def make_pool(num_blocks: int = 8, cached_limit: int | None = None) -> KVPool:
    limit = num_blocks if cached_limit is None else cached_limit
    return KVPool(10, 10 + num_blocks, cached_limit=limit, on_stored=lambda _: None, on_removed=lambda _: None)


def test_allocates_all_or_nothing() -> None:
    pool = make_pool(4)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    assert sorted(pool.allocate(4) or []) == [10, 11, 12, 13]


def test_released_named_blocks_are_found_again() -> None:
    pool = make_pool(4)
    blocks = pool.allocate(2) or []
    pool.commit(zip(blocks, [b"a", b"b"], strict=True))
    pool.release(blocks)
    assert pool.num_free == 4
    assert pool.acquire([b"a", b"b", b"c"]) == blocks


def test_tail_is_evicted_before_head() -> None:
    pool = make_pool(4)
    blocks = pool.allocate(3) or []
    pool.commit(zip(blocks, [b"a", b"b", b"c"], strict=True))
    pool.release(blocks)
    pool.allocate(2)
    assert pool.num_matching([b"a", b"b", b"c"]) == 2


def test_least_recently_used_sequence_goes_first() -> None:
    pool = make_pool(4)
    for name in (b"old", b"new"):
        blocks = pool.allocate(1) or []
        pool.commit([(blocks[0], name)])
        pool.release(blocks)
    pool.allocate(3)
    assert (pool.num_matching([b"old"]), pool.num_matching([b"new"])) == (0, 1)


def test_a_block_computed_again_takes_the_place_of_the_cached_one_that_lost_its_head() -> None:
    pool = make_pool(4)
    old = pool.allocate(2) or []
    pool.commit([(old[1], b"tail")])
    pool.release(old)
    new = pool.allocate(2) or []
    pool.commit(zip(new, [b"head", b"tail"], strict=True))
    assert pool.num_free == 2
    pool.release(new)
    assert pool.acquire([b"head", b"tail"]) == new


@pytest.mark.parametrize("is_held", [False, True])
def test_a_whole_block_takes_the_place_of_a_partial_one_and_never_the_other_way_round(is_held: bool) -> None:
    pool = make_pool(4)
    first, second, third = pool.allocate(3) or []
    pool.commit([(first, b"a")], partial=[b"a"])
    assert pool.is_partial(b"a")
    if not is_held:
        pool.release([first])
    pool.commit([(second, b"a")])
    pool.commit([(third, b"a")], partial=[b"a"])
    assert not pool.is_partial(b"a") and pool.acquire([b"a"]) == [second]
    pool.release([second, second, third] + [first] * is_held)
    assert (pool.num_free, pool.num_cached) == (4, 1)
    pool.allocate(4)
    assert not pool.is_partial(b"a") and pool.acquire([b"a"]) == []


def test_cache_off_names_nothing() -> None:
    pool = make_pool(4, cached_limit=0)
    blocks = pool.allocate(1) or []
    pool.commit([(blocks[0], b"a")])
    pool.release(blocks)
    assert pool.acquire([b"a"]) == []


def test_double_release_is_a_bug() -> None:
    pool = make_pool()
    blocks = pool.allocate(1) or []
    pool.release(blocks)
    with pytest.raises(KeyError):
        pool.release(blocks)


@given(st.integers(0, 8))
@settings(max_examples=20)
def test_quarantined_blocks_come_back_on_release(count: int) -> None:
    pool = make_pool(8)
    pool.quarantine(range(10, 10 + count))
    assert pool.num_free == 8 - count
    pool.release(range(10, 10 + count))
    assert pool.num_free == 8


class PoolMachine(RuleBasedStateMachine):
    """Random allocation, naming, sharing and release over a tiny pool, against what the events say is cached."""

    @initialize(limit=st.integers(0, 6), learns=st.booleans())
    def start(self, limit: int, learns: bool) -> None:
        self.cached: set[bytes] = set()
        self.pool = KVPool(
            0,
            6,
            cached_limit=limit,
            on_stored=self.cached.update,
            on_removed=self.cached.difference_update,
            eviction=HitDensity(6) if learns else LRU(),
        )
        self.holds: list[list[int]] = []
        self.serial = 0

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        before = self.pool.num_free
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > before)
        if blocks is not None:
            held = {b for hold in self.holds for b in hold}
            assert not held & set(blocks), "a held block was given again"
            self.holds.append(blocks)

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        if self.holds:
            hold = data.draw(st.sampled_from(self.holds))
            names = [bytes([data.draw(st.integers(0, 9))]) for _ in hold]
            partial = data.draw(st.sets(st.sampled_from(names))) if names else set()
            were_whole = {name for name in names if name in self.cached and not self.pool.is_partial(name)}
            self.pool.commit(zip(hold, names, strict=True), partial=partial)
            assert not any(map(self.pool.is_partial, were_whole))

    @rule(names=st.lists(st.integers(0, 9), max_size=4))
    def acquire(self, names: list[int]) -> None:
        wanted = [bytes([name]) for name in names]
        expected = self.pool.num_matching(wanted)
        self.holds.append(self.pool.acquire(wanted))
        assert len(self.holds[-1]) == expected

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.holds:
            self.pool.release(self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1))))

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if hasattr(self, "pool"):
            held = {block for hold in self.holds for block in hold}
            assert self.pool.num_free == 6 - len(held)
            assert self.pool.num_cached == len(self.cached)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_several_requests_grow_together_or_not_at_all() -> None:
    pool = make_pool(6)
    held = [HeldKV(id=name, blocks=pool.allocate(1) or []) for name in "ab"]
    assert grow_all(held, [3, 2], pool) is None
    assert [len(one.blocks) for one in held] == [1, 1] and pool.num_free == 4
    fresh = grow_all(held, [1, 2], pool)
    assert fresh == [*held[0].blocks[1:], *held[1].blocks[1:]] and [len(one.blocks) for one in held] == [2, 3]


def test_new_blocks_stand_behind_those_that_each_slot_has() -> None:
    batch = Batch(
        max_slots=4, max_tokens=64, max_drafts=0, block_tokens=8, eos_token_ids=(), vocab_size=9, on_finish=print
    )
    batch.num_blocks[:] = 1, 0, 3, 2
    batch.append_blocks(np.array([3, 0], np.int32), np.array([2, 1], np.int32), [70, 71, 72])
    assert batch.num_blocks.tolist() == [2, 0, 3, 4]
    assert batch.blocks[3, :4].tolist() == [0, 0, 70, 71] and batch.blocks[0, :2].tolist() == [0, 72]
