"""The decisions of spec-verify: matches, ends, n-gram look-up against a plain search, how many drafts are worth it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.message import Ids, Sampling
from flowinfer.stages.spec_verify.drafts import Acceptance, FixedLength, LearnedLength, NgramDraft
from flowinfer.stages.spec_verify.policy import (
    LENGTH,
    RUNS,
    STOP,
    StopRules,
    count_matches,
    pad_rows,
)


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.int32)


def test_rows_are_padded_with_their_last() -> None:
    padded = pad_rows(np.array([1, 2, 3, 9, 7, 8]), ids(0, 3, 4, 6))
    assert padded.tolist() == [[1, 2, 3], [9, 9, 9], [7, 8, 8]]


def test_matches_end_at_the_first_that_differs_and_at_the_drafts_that_were_run() -> None:
    target = np.array([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 3]], np.int32)
    drafts = np.array([[1, 2, 3, 4]] * 4, np.int32)
    assert count_matches(target, drafts, ids(2, 2, 2, 1)).tolist() == [2, 1, 0, 1]


# ------------------------------------------------------------------------------------------------------------- ends


def cut(rules: StopRules, slot: int, tokens: list[int], num_tokens: int) -> tuple[int, int]:
    kept, reason = rules.cut(ids(slot), ids(*tokens)[None], ids(len(tokens)), ids(num_tokens))
    return int(kept[0]), int(reason[0])


@pytest.mark.parametrize(
    ("tokens", "num_tokens", "expected"),
    [
        ([5, 6], 10, (2, RUNS)),
        ([5, 99, 6], 10, (2, STOP)),
        ([7, 99], 10, (1, STOP)),
        ([5, 6, 5], 17, (3, LENGTH)),
        ([5, 6, 5], 18, (2, LENGTH)),
        ([5, 6, 7], 18, (2, LENGTH)),  # the stop lies behind the limit
        ([5, 7], 18, (2, STOP)),  # at the limit a stop is a stop
        ([5], 20, (0, LENGTH)),
    ],
)
def test_ends(tokens: list[int], num_tokens: int, expected: tuple[int, int]) -> None:
    rules = StopRules(4, max_tokens=64, eos_token_ids=(99,))
    rules.join(2, Sampling(max_tokens=10, stop_token_ids=(7, 8)), num_prompt=10)
    assert cut(rules, 2, tokens, num_tokens) == expected


def test_a_slot_keeps_nothing_of_its_last_sequence() -> None:
    rules = StopRules(2, max_tokens=64, eos_token_ids=(99,))
    rules.join(0, Sampling(max_tokens=10, stop_token_ids=(5, 6, 7, 8)), num_prompt=1)
    rules.join(0, Sampling(max_tokens=10, ignore_eos=True), num_prompt=1)
    assert cut(rules, 0, [5, 6, 99], 1) == (3, RUNS)


def test_the_context_limits_max_tokens() -> None:
    rules = StopRules(1, max_tokens=12, eos_token_ids=())
    rules.join(0, Sampling(max_tokens=100), num_prompt=10)
    assert cut(rules, 0, [1, 2, 3], 10) == (2, LENGTH)


# ----------------------------------------------------------------------------------------------------------- n-grams


def search(history: list[int], shortest: int, longest: int, drafts: int) -> list[int] | None:
    """The longest n-gram that ends the history at its latest earlier place, by looking everywhere."""
    for length in range(longest, shortest - 1, -1):
        for start in range(len(history) - length - 1, -1, -1):
            if history[start : start + length] == history[-length:]:
                following = history[start + length :]
                return [following[i % len(following)] for i in range(drafts)]
    return None


class Found:
    """Runs the index over growing histories beside the search."""

    def __init__(self, slots: tuple[int, ...], shortest: int, longest: int, max_tokens: int) -> None:
        self.batch = np.zeros((3, max_tokens), np.int32)
        self.ngrams = NgramDraft(self.batch, ngram_min=shortest, ngram_max=longest, max_drafts=4)
        self.histories: dict[int, list[int]] = {slot: [] for slot in slots}
        for slot in slots:
            self.ngrams.join(slot)

    def grow(self, runs: dict[int, list[int]]) -> list[tuple[list[int], list[int] | None]]:
        """The history of each slot after its run, and what the index guesses."""
        for slot, run in runs.items():
            self.histories[slot] += run
            self.batch[slot, : len(self.histories[slot])] = self.histories[slot]
        lengths = ids(*[len(history) for history in self.histories.values()])
        found, guesses, _ = self.ngrams.guess(ids(*self.histories), lengths)
        pairs = zip(self.histories.values(), found, guesses, strict=True)
        return [(history, guess.tolist() if hit else None) for history, hit, guess in pairs]


RUN = st.lists(st.integers(0, 3), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(RUN, RUN), min_size=2, max_size=12), st.integers(1, 3), st.integers(0, 2))
def test_a_guess_follows_the_latest_place_of_an_ngram(
    runs: list[tuple[list[int], list[int]]], shortest: int, more: int
) -> None:
    index = Found((2, 0), shortest, shortest + more, max_tokens=512)
    for run, other in runs:
        for history, guess in index.grow({2: run, 0: other}):
            lengths = range(shortest, shortest + more + 1)
            assert guess is None or guess in [search(history, length, length, 4) for length in lengths]


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (2, 4), (3, 5)])
def test_the_index_finds_nearly_all_that_a_search_finds(shortest: int, longest: int) -> None:
    generator = np.random.default_rng(0)
    index, num_same, num_found = Found((1,), shortest, longest, max_tokens=1024), 0, 0
    for _ in range(300):
        ((history, guess),) = index.grow({1: generator.integers(0, 6, generator.integers(1, 5)).tolist()})
        num_same += guess == search(history, shortest, longest, 4)
        num_found += guess is not None
    assert num_same >= 255 and num_found > 100


def test_a_new_sequence_finds_nothing_of_the_old_one() -> None:
    batch = np.zeros((1, 64), np.int32)
    ngrams = NgramDraft(batch, ngram_min=2, ngram_max=3, max_drafts=2)
    ngrams.join(0)
    batch[0, :8] = [1, 2, 3, 4, 1, 2, 3, 4]
    assert ngrams.guess(ids(0), ids(8))[0].all()
    ngrams.join(0)
    batch[0, :2] = [5, 1]
    assert not ngrams.guess(ids(0), ids(2))[0].any()


def test_a_long_history_forgets_rather_than_errs() -> None:
    """More n-grams than cells: what is found must still be there."""
    generator = np.random.default_rng(0)
    batch = generator.integers(0, 400, (1, 60_000)).astype(np.int32)
    ngrams = NgramDraft(batch, ngram_min=2, ngram_max=2, max_drafts=1)
    ngrams.join(0)
    num_found = 0
    for length in range(50_000, 50_200):
        found, guess, _ = ngrams.guess(ids(0), ids(length))
        if found[0]:
            num_found += 1
            suffix = batch[0, length - 2 : length]
            places = np.flatnonzero((batch[0, : length - 2] == suffix[0]) & (batch[0, 1 : length - 1] == suffix[1]))
            assert guess[0, 0] in batch[0, places + 2]
    assert num_found > 5


# ------------------------------------------------------------------------------------------------------ draft length


class Learning:
    """The learned schedule over sequences that all do equally well."""

    def __init__(self, batch: int, row_cost: float) -> None:
        self.acceptance, self.schedule = Acceptance(batch, 8), LearnedLength(row_cost)
        self.slots = np.arange(batch, dtype=np.int32)

    def learn(self, hits: int, trials: int, steps: int) -> None:
        for _ in range(steps):
            self.acceptance.learn(self.slots, np.full(self.slots.size, hits), np.full(self.slots.size, trials))

    def length(self) -> int:
        return int(self.schedule.choose(self.acceptance.of(self.slots), np.full(self.slots.size, 8))[0])


def lengths_after(hits: int, trials: int, steps: int, batch: int, row_cost: float = 0.15) -> int:
    policy = Learning(batch, row_cost)
    policy.learn(hits, trials, steps)
    return policy.length()


def test_one_stream_drafts_from_the_start_and_a_full_batch_does_not() -> None:
    assert lengths_after(0, 0, 0, batch=1) >= 2
    assert lengths_after(0, 0, 0, batch=64) == 0


def test_misses_stop_drafting_and_hits_bring_it_back() -> None:
    policy = Learning(1, 0.15)
    policy.learn(0, 1, steps=20)
    assert policy.length() == 0
    policy.learn(1, 1, steps=20)
    assert policy.length() >= 4


def test_drafts_grow_with_acceptance_and_shrink_with_the_batch() -> None:
    by_hits = [lengths_after(hits, 4, 10, batch=4) for hits in range(5)]
    by_batch = [lengths_after(3, 4, 10, batch=batch) for batch in (1, 2, 4, 8, 16, 32, 64)]
    assert by_hits == sorted(by_hits) and by_hits[0] < by_hits[-1]
    assert by_batch == sorted(by_batch, reverse=True) and by_batch[-1] < by_batch[0]


def test_a_free_row_is_always_worth_it() -> None:
    assert lengths_after(0, 1, 50, batch=64, row_cost=0.0) >= 8


def test_the_break_even_is_where_tokens_per_time_stop_rising() -> None:
    """With 1 + c * rows as time of a step, the last draft chosen raises tokens per time and the next wouldn't."""
    cost, batch = 0.15, 4
    policy = Learning(batch, cost)
    policy.learn(3, 4, steps=30)
    acceptance = (3 * 9.58 + 1) / (4 * 9.58 + 2)  # 9.58: sum of 0.9**i over 30 steps
    length = policy.length()
    plain = batch / (1 + cost * batch)  # tokens per time, to which one more row is compared
    assert acceptance**length / cost > plain > acceptance ** (length + 1) / cost


def test_limits_cap_every_schedule() -> None:
    confidences, limits = np.full((3, 4), 0.99), np.array([0, 2, 4])
    for schedule in (FixedLength(), LearnedLength(0.01)):
        assert schedule.choose(confidences, limits).tolist() == [0, 2, 4]
