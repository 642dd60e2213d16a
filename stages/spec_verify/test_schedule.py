"""Draft lengths: the best choice against all choices, what is exact under which rule, and when drafting stops."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flowinfer.engine.sampling import reject
from flowinfer.kernels.sampling import stream_keys
from flowinfer.kernels.sampling.reference import exponentials
from flowinfer.stages.spec_verify.costs import StepCosts, StepTable, linear_table
from flowinfer.stages.spec_verify.policy import count_matches
from flowinfer.stages.spec_verify.schedule import (
    LONGEST_WAIT,
    Budget,
    ConfidenceLength,
    PositionAcceptance,
    gains,
    split,
    survival,
)

BUDGETS: tuple[Budget, ...] = ("newest", "two_steps_old", "early_stop")


def costs(*seconds: float, staircase: bool = False) -> StepCosts:
    rows = tuple(range(1, len(seconds) + 1))
    return StepCosts(StepTable(key="test", rows=rows, seconds=seconds, staircase=staircase))


def full(chances: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    array = np.array(chances)
    return array, np.full(len(array), array.shape[1])


# ------------------------------------------------------------------------------------------------------ the best choice


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3).flatmap(
        lambda n: st.tuples(
            st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=n, max_size=n),
            st.lists(st.integers(0, 3), min_size=n, max_size=n),
        )
    ),
    st.lists(st.floats(0.01, 1), min_size=12, max_size=12),
)
def test_the_choice_is_the_best_of_all(case: tuple[list[list[float]], list[int]], rises: list[float]) -> None:
    confidences, limits = np.array(case[0]), np.array(case[1])
    table = costs(*np.cumsum(rises).tolist())
    chances = np.cumprod(confidences, axis=1)

    def per_second(lengths: tuple[int, ...]) -> float:
        tokens = len(limits) + sum(chances[i, :length].sum() for i, length in enumerate(lengths))
        return float(tokens / table.seconds(np.array([len(limits) + sum(lengths)]))[0])

    best = max(per_second(lengths) for lengths in product(*(range(limit + 1) for limit in limits)))
    lengths = ConfidenceLength(table).choose(confidences, limits)
    assert (lengths <= limits).all()
    assert per_second(tuple(lengths)) == pytest.approx(best)


def test_rows_go_to_the_surest_drafts_of_all_sequences() -> None:
    chances = survival(*full([[0.9, 0.5, 0.5], [0.6, 0.9, 0.1], [0.2, 1.0, 1.0]]))
    assert [split(chances, k).tolist() for k in range(5)] == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 2, 0], [2, 2, 0]]


def test_equal_chances_keep_prefixes_and_the_order() -> None:
    assert split(survival(*full([[1.0, 1.0], [1.0, 1.0]])), 3).tolist() == [2, 1]


def test_drafts_without_a_chance_stay_out_though_rows_are_free() -> None:
    schedule = ConfidenceLength(costs(*[1.0] * 8))
    assert schedule.choose(*full([[0.5, 0.0, 0.9], [0.0, 1.0, 1.0]])).tolist() == [1, 0]


def test_free_rows_are_all_used_and_dear_ones_not() -> None:
    confidences, limits = full([[0.6] * 5] * 4)
    assert ConfidenceLength(StepCosts(linear_table(1.0, 1e-6))).choose(confidences, limits).tolist() == [5] * 4
    assert ConfidenceLength(StepCosts(linear_table(1e-6, 1.0))).choose(confidences, limits).tolist() == [0] * 4


def test_a_search_looks_over_the_edge_of_a_step_and_the_early_stop_does_not() -> None:
    stairs = StepTable(key="test", rows=(1, 8), seconds=(1.0, 1.5), staircase=True)
    confidences, limits = full([[0.45, 1.0, 1.0]])
    assert ConfidenceLength(StepCosts(stairs)).choose(confidences, limits).tolist() == [3]
    assert ConfidenceLength(StepCosts(stairs), "early_stop").choose(confidences, limits).tolist() == [0]


def test_an_old_budget_is_that_of_two_steps_ago_and_its_split_of_now() -> None:
    schedule = ConfidenceLength(costs(*[1.0] * 12), "two_steps_old")
    sure, none = full([[1.0, 1.0], [0.0, 0.0]]), full([[0.0, 0.0], [1.0, 0.5]])
    found = [schedule.choose(*case).tolist() for case in (sure, sure, none, none, sure)]
    assert found == [[0, 0], [0, 0], [0, 2], [0, 2], [2, 0]]


def test_lengths_never_exceed_the_limits() -> None:
    schedule = ConfidenceLength(costs(*[1.0] * 12))
    assert schedule.choose(np.ones((3, 4)), np.array([0, 2, 4])).tolist() == [0, 2, 4]


# --------------------------------------------------------------------------------------------- what is exact, and where

TARGET, DRAFT = (0.7, 0.3), (0.5, 0.5)
TRIALS = 4_000


def lookahead_lengths(budget: Budget, first_drafts: np.ndarray) -> np.ndarray:
    """Lengths for one sequence whose second draft is sure iff the first is token 0, where two drafts cost as one.

    The first alone never pays (1.8 tokens in twice the time), both do (2.6), so who looks past the first lets its
    value decide whether it is verified.
    """
    schedule = ConfidenceLength(costs(1.0, 2.0, 2.0), budget)
    agrees = 1 - 0.5 * sum(abs(p - q) for p, q in zip(TARGET, DRAFT, strict=True))
    limits = np.array([2])
    return np.array([schedule.choose(np.array([[agrees, float(x == 0)]]), limits)[0] for x in first_drafts])


def rejected(budget: Budget) -> np.ndarray:
    """First tokens of rejection sampling under this choice of lengths."""
    generator = np.random.default_rng(1)
    drafts = generator.choice(2, TRIALS, p=DRAFT)
    lengths = lookahead_lengths(budget, drafts)
    p = torch.tensor([TARGET, TARGET]).expand(TRIALS, 2, 2)
    q = torch.tensor([DRAFT]).expand(TRIALS, 1, 2)
    uniforms = torch.from_numpy(generator.random((TRIALS, 2)))
    verified = torch.from_numpy(np.minimum(lengths, 1))
    accepted, following = reject(p, q, torch.from_numpy(drafts)[:, None], uniforms, verified)
    return np.where(accepted.numpy() > 0, drafts, following.numpy())


def shared(budget: Budget) -> np.ndarray:
    """First tokens where draft and target are sampled with the same noise and a draft holds iff it is the target's."""
    keys = stream_keys(np.arange(TRIALS).astype(np.uint64), np.full(TRIALS, 5))
    noise = exponentials(torch.from_numpy(keys.view(np.int64)), 2).numpy()
    drafts = (np.array(DRAFT) / noise).argmax(1)
    target = (np.array(TARGET) / noise).argmax(1)
    lengths = lookahead_lengths(budget, drafts)
    rows = np.stack([target, np.zeros_like(target)], axis=1).astype(np.int32)
    accepted = count_matches(rows, drafts[:, None].astype(np.int32), np.minimum(lengths, 1).astype(np.int32))
    return np.where(accepted > 0, drafts, target)


def test_the_cases_verify_by_the_value_of_the_draft() -> None:
    lengths = {budget: set(lookahead_lengths(budget, np.array([0, 1] * 10)).tolist()) for budget in BUDGETS}
    assert lengths["newest"] == lengths["two_steps_old"] == {0, 2} and lengths["early_stop"] == {0}
    assert lookahead_lengths("newest", np.array([0, 1, 1, 0])).tolist() == [2, 0, 0, 2]


@pytest.mark.parametrize("budget", ["early_stop", "two_steps_old"])
def test_rejection_sampling_keeps_the_distribution_under_causal_budgets(budget: Budget) -> None:
    assert stats.binomtest(int((rejected(budget) == 0).sum()), TRIALS, 0.7).pvalue > 1e-3


def test_rejection_sampling_is_wrong_where_the_budget_looks_ahead() -> None:
    """The paper's counterexample: 0.85 instead of 0.7. Shows that the tests beside this one can fail."""
    zeros = int((rejected("newest") == 0).sum())
    assert stats.binomtest(zeros, TRIALS, 0.7).pvalue < 1e-9
    assert stats.binomtest(zeros, TRIALS, 0.85).pvalue > 1e-3


def test_shared_noise_gives_the_same_tokens_under_every_budget() -> None:
    first, *others = [shared(budget) for budget in BUDGETS]
    assert stats.binomtest(int((first == 0).sum()), TRIALS, 0.7).pvalue > 1e-3
    assert all((tokens == first).all() for tokens in others)


# ---------------------------------------------------------------------------------------------- whether to draft at all


def run(schedule: ConfidenceLength, num: int, confidence: float, steps: int) -> int:
    """Steps of these in which drafts were made, each at 0.4 of a plain step."""
    looked, drafting = 0, 0.4 * float(schedule.costs.seconds(np.array([num]))[0])
    for step in range(steps):
        if schedule.looks(np.full(num, confidence), step):
            looked += 1
            schedule.drafted(num, drafting)
            schedule.choose(np.full((num, 4), confidence), np.full(num, 4))
    return looked


def test_drafting_stops_where_it_does_not_pay_and_looks_now_and_then() -> None:
    schedule = ConfidenceLength(StepCosts(linear_table(1.0, 1.0)))
    looked = run(schedule, 16, 0.5, 640)
    assert 640 // LONGEST_WAIT - 2 <= looked <= 3 * (640 // LONGEST_WAIT)


def test_drafting_goes_on_where_it_pays() -> None:
    assert run(ConfidenceLength(StepCosts(linear_table(1.0, 0.01))), 2, 0.8, 100) == 100


def test_drafting_starts_again_once_the_batch_has_shrunk() -> None:
    schedule = ConfidenceLength(StepCosts(linear_table(1.0, 0.1)))
    assert run(schedule, 64, 0.5, 64) <= 16
    assert run(schedule, 1, 0.9, 20) == 20


def plain_steps(num: int, confidence: float, row_s: float, plain_s: float) -> tuple[int, int]:
    """Steps of the first 50, and of 500 more, in which nothing was verified; each takes its time."""
    schedule, zeros = ConfidenceLength(StepCosts(linear_table(1.0, row_s))), []
    for _ in range(550):
        length = int(schedule.choose(np.full((num, 4), confidence), np.full(num, 4)).sum())
        schedule.timed(num + length, plain_s if not length else 1.0 + row_s * (num + length), plain=not length)
        zeros.append(not length)
    return sum(zeros[:50]), sum(zeros[50:])


def test_now_and_then_a_step_without_drafts_shows_what_those_take() -> None:
    assert plain_steps(1, 0.9, 0.001, 1.0) == (5, 3)
    early, later = plain_steps(8, 0.3, 0.02, 1.1)
    assert early >= 5 and 500 // 33 - 1 <= later <= 500 // 33 + 1


def test_a_table_whose_rows_are_too_dear_is_found_out() -> None:
    schedule = ConfidenceLength(StepCosts(linear_table(0.02, 0.0008)))
    for _ in range(200):
        lengths = schedule.choose(np.full((8, 5), 0.85), np.full(8, 5))
        schedule.timed(8 + int(lengths.sum()), 0.02 + 0.00005 * (8 + int(lengths.sum())), plain=not lengths.any())
    assert (schedule.choose(np.full((8, 5), 0.85), np.full(8, 5)) == 5).all()


def test_rows_that_cost_less_the_more_there_are_are_found() -> None:
    """As with experts: eight more rows touch most of them, and forty hardly any more."""
    schedule = ConfidenceLength(StepCosts(linear_table(0.02, 0.0003)))
    lengths = np.zeros(8, np.int64)
    for _ in range(200):
        lengths = schedule.choose(np.full((8, 5), 0.3), np.full(8, 5))
        rows = 8 + int(lengths.sum())
        schedule.timed(rows, 0.026 if rows == 8 else 0.029, plain=rows == 8)
    assert (lengths == 5).all()


def test_dear_rows_are_not_tried_for_what_they_take() -> None:
    schedule = ConfidenceLength(StepCosts(linear_table(0.02, 0.01)))
    for _ in range(100):
        assert schedule.choose(np.full((8, 5), 0.3), np.full(8, 5)).sum() < 40


def test_plain_steps_that_are_cheaper_than_their_rows_say_are_found() -> None:
    """As on a GPU, where only they are captured graphs."""
    _, later = plain_steps(8, 0.6, 0.02, 0.2)
    assert later == 500


def test_drafts_that_cost_nothing_are_always_looked_at() -> None:
    schedule = ConfidenceLength(StepCosts(linear_table(1.0, 1.0)))
    for step in range(50):
        assert schedule.looks(np.zeros(4), step)
        assert not schedule.choose(np.full((4, 4), 0.2), np.full(4, 4)).any()


# --------------------------------------------------------------------------------------------------- learned acceptance


def test_acceptance_is_learned_by_sequence_and_position() -> None:
    learned = PositionAcceptance(4, 3)
    for _ in range(20):
        learned.learn(np.array([0, 1], np.int32), np.array([2, 0], np.int32), np.array([3, 1], np.int32))
    chances = learned.of(np.array([0, 1], np.int32))
    assert (chances[0, :2] > 0.9).all() and chances[0, 2] < 0.2
    assert chances[1, 0] < 0.2
    learned.join(0)
    assert 0.3 < learned.of(np.array([0], np.int32))[0, 0] < 0.7, "a new sequence takes what others did on the average"


def test_gains_count_the_time_of_drafting() -> None:
    table = costs(1.0, 1.0, 1.0)
    for _ in range(3):
        table.observe_draft(1, 1.0)
    assert gains(np.array([[0.5, 0.25]]), table).tolist() == pytest.approx([0.5, 0.75, 0.875])
