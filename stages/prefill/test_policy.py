"""The prefill scheduler: steps fit the budget, buckets share the time, nothing is lost or left waiting."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.engine.cost import StepTimeModel
from flowinfer.stages.prefill.policy import AUTO_S, MIN_CHUNK, MOST_AUTO_S, Chunk, PrefillScheduler, auto_budget

COST = StepTimeModel((2e-3, 2e-4, 5e-9))  # a 50 ms step holds 240 tokens without context
BUDGET = 0.05
Size = tuple[str | None, int, int]  # bucket, tokens, cached tokens
buckets = st.sampled_from(["short", "long", "huge", None])
sizes = st.tuples(buckets, st.integers(1, 20_000), st.integers(0, 40).map(lambda blocks: 64 * blocks))


def filled(prompts: Sequence[Size], **kwargs: Any) -> PrefillScheduler:
    scheduler = PrefillScheduler(**kwargs)
    for i, (bucket, num_tokens, num_cached) in enumerate(prompts):
        scheduler.add(str(i), bucket, num_tokens, num_cached)
    return scheduler


def predicted(chunks: Sequence[Chunk]) -> float:
    pairs = sum(c.count * c.start + c.count * (c.count + 1) // 2 for c in chunks)
    return COST.predict(sum(c.count for c in chunks), pairs)


def run(scheduler: PrefillScheduler, chunks: Sequence[Chunk]) -> list[str]:
    return [chunk.id for chunk in chunks if scheduler.advance(chunk.id, chunk.count)]


def steps_until_done(scheduler: PrefillScheduler, wanted: str, budget: float = BUDGET) -> int:
    for step in range(1, 10_000):
        if wanted in run(scheduler, scheduler.plan(budget, COST)):
            return step
    raise AssertionError(f"{wanted} is never done")


@given(st.lists(sizes, max_size=12), st.floats(0.01, 1), st.floats(0, 0.02))
def test_a_step_fits_the_budget_or_is_the_least_that_makes_progress(
    prompts: list[Size], budget: float, reserved: float
) -> None:
    chunks = filled(prompts).plan(budget, COST, reserved_s=reserved)
    least = len(chunks) == 1 and chunks[0].count <= MIN_CHUNK
    assert not chunks or least or predicted(chunks) <= (budget - reserved) * (1 + 1e-9)


@settings(max_examples=40)
@given(st.lists(sizes, min_size=1, max_size=8), st.sampled_from([None, 100, 2048]), st.floats(0, 0.3))
def test_every_token_is_computed_once_in_order_and_then_the_prompt_is_done(
    prompts: list[Size], token_budget: int | None, budget: float
) -> None:
    scheduler = filled(prompts, token_budget=token_budget)
    at = {str(i): cached for i, (_, total, cached) in enumerate(prompts) if cached < total}
    assert len(scheduler) == len(at)
    finished = []
    while scheduler.has_work:
        chunks = scheduler.plan(budget, COST)
        assert chunks, "no progress"
        for chunk in chunks:
            assert chunk.start == at[chunk.id] and chunk.count > 0
            at[chunk.id] += chunk.count
        finished += run(scheduler, chunks)
    assert sorted(finished) == sorted(at)
    assert all(at[id] == prompts[int(id)][1] for id in at)


@given(st.lists(sizes, min_size=1, max_size=8))
def test_chunks_end_at_block_boundaries_where_a_block_fits(prompts: list[Size]) -> None:
    scheduler = filled(prompts)
    ends = {str(i): total for i, (_, total, _) in enumerate(prompts)}
    for chunk in scheduler.plan(0.2, COST):
        end = chunk.start + chunk.count
        assert end == ends[chunk.id] or end % 64 == 0


@given(st.lists(sizes, min_size=1, max_size=8))
def test_a_step_leaves_no_room_for_another_block_of_the_first_prompt_of_any_bucket(prompts: list[Size]) -> None:
    scheduler = filled(prompts)
    chunks = scheduler.plan(BUDGET, COST)
    at = {chunk.id: chunk.start + chunk.count for chunk in chunks}
    beside = (sum(c.count for c in chunks), sum(c.count * c.start + c.count * (c.count + 1) // 2 for c in chunks))
    seen = set()
    for i, (bucket, total, cached) in enumerate(prompts):
        start = at.get(str(i), cached)
        if start < total and bucket not in seen:
            seen.add(bucket)
            wanted = min(total, (start // 64 + 1) * 64) - start
            assert COST.tokens_within(BUDGET, start, beside=beside) < wanted


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(["add", "plan", "remove"]), sizes, st.integers(0, 30)), max_size=80))
def test_prompts_may_come_and_go_at_any_time(actions: list[tuple[str, Size, int]]) -> None:
    scheduler = PrefillScheduler()
    alive: set[str] = set()
    planned: list[Chunk] = []
    for n, (what, (bucket, total, cached), pick) in enumerate(actions):
        if what == "add" and scheduler.add(str(n), bucket, total, cached):
            alive.add(str(n))
        elif what == "remove":
            scheduler.remove(str(pick))
            alive.discard(str(pick))
        elif what == "plan":
            alive -= set(run(scheduler, planned))
            planned = scheduler.plan(BUDGET, COST)
            assert bool(planned) == bool(alive) and {chunk.id for chunk in planned} <= alive
        assert {id for id in map(str, range(n + 1)) if id in scheduler} == alive
        assert sum(scheduler.waiting_prompts.values()) == len(alive)


@settings(max_examples=30)
@given(st.integers(2, 5), st.integers(1, 60), st.floats(0.02, 0.2))
def test_backlogged_buckets_get_equal_time_to_within_two_steps_at_every_moment(
    num_buckets: int, rounds: int, budget: float
) -> None:
    scheduler = PrefillScheduler()
    spent: dict[str, float] = defaultdict(float)
    for bucket in range(num_buckets):
        for i in range(30):
            scheduler.add(f"{bucket}.{i}", str(bucket), 400 * 8**bucket, 0)
    for _ in range(rounds):
        chunks = scheduler.plan(budget, COST)
        for chunk in chunks:
            spent[chunk.id.split(".")[0]] += predicted([chunk])
        run(scheduler, chunks)
        if len(scheduler.waiting_prompts) < num_buckets:
            break
        times = [spent[str(bucket)] for bucket in range(num_buckets)]
        assert max(times) - min(times) <= 2 * budget + rounds * num_buckets * COST.predict(0, 0)


def test_a_short_prompt_behind_a_huge_one_is_done_in_two_steps() -> None:
    scheduler = filled([("huge", 100_000, 0)])
    for _ in range(50):
        run(scheduler, scheduler.plan(BUDGET, COST))
    scheduler.add("short", "short", 100, 0)
    assert steps_until_done(scheduler, "short") <= 2


def test_without_buckets_it_waits_for_the_huge_one() -> None:
    scheduler = filled([(None, 10_000, 0)])
    scheduler.add("short", None, 100, 0)
    assert steps_until_done(scheduler, "short") > 40


def test_short_prompts_without_end_do_not_starve_a_huge_one() -> None:
    scheduler = filled([("huge", 10_000, 0)])
    for step in range(400):
        scheduler.add(f"short{step}", "short", 230, 0)
        if "0" in run(scheduler, scheduler.plan(BUDGET, COST)):
            break
    alone = steps_until_done(filled([("huge", 10_000, 0)]), "0")
    assert step <= 2.5 * alone


def test_several_short_prompts_share_a_step() -> None:
    scheduler = filled([("short", 40, 0)] * 5)
    assert [chunk.count for chunk in scheduler.plan(BUDGET, COST)] == [40] * 5


def test_a_token_budget_ignores_the_clock() -> None:
    chunks = filled([(None, 10_000, 0)], token_budget=8192).plan(BUDGET, COST)
    assert [chunk.count for chunk in chunks] == [8192]


def test_a_full_cache_hit_has_nothing_to_compute() -> None:
    scheduler = PrefillScheduler()
    assert not scheduler.add("a", None, 128, 128)
    assert not scheduler.has_work and scheduler.plan(BUDGET, COST) == []


def test_the_same_prompt_twice_is_a_bug() -> None:
    scheduler = filled([(None, 10, 0)])
    with pytest.raises(ValueError, match="in progress"):
        scheduler.add("0", None, 10, 0)


def p99_wait_of_short_prompts(*, by_bucket: bool) -> float:
    """Seconds from arrival to the last prefill step, in a simulated 100 s: 95 % short prompts, load about 0.7."""
    rng, now, due = random.Random(0), 0.0, 0.0
    scheduler, arrived, waits = PrefillScheduler(), {}, []
    while now < 100:
        while due <= now:
            is_huge = rng.random() < 0.05
            id, size = f"{len(arrived)}", rng.randint(4_000, 12_000) if is_huge else rng.randint(50, 500)
            arrived[id] = (due, is_huge)
            scheduler.add(id, ("huge" if is_huge else "short") if by_bucket else None, size, 0)
            due += rng.expovariate(4.5)
        chunks = scheduler.plan(BUDGET, COST)
        now = now + predicted(chunks) if chunks else due
        waits += [now - arrived[id][0] for id in run(scheduler, chunks) if not arrived[id][1]]
    return sorted(waits)[len(waits) * 99 // 100]


def test_buckets_cut_the_p99_wait_of_short_prompts_to_a_fifth_under_a_mix_with_huge_ones() -> None:
    assert p99_wait_of_short_prompts(by_bucket=True) < p99_wait_of_short_prompts(by_bucket=False) / 5


@given(fixed_s=st.floats(0, 1), decode_s=st.floats(0, 1), decoding=st.booleans())
def test_auto_keeps_beginnings_a_small_part_of_a_step(fixed_s: float, decode_s: float, decoding: bool) -> None:
    budget = auto_budget(fixed_s, decoding=decoding, decode_s=decode_s)
    assert AUTO_S <= budget <= MOST_AUTO_S
    assert fixed_s <= budget / (16 if decoding else 64) * 1.0001 or budget == MOST_AUTO_S
    assert not decoding or decode_s <= budget / 6 * 1.0001 or budget == MOST_AUTO_S
    assert decoding or budget == auto_budget(fixed_s, decoding=False), "nobody waits for a decode step"
