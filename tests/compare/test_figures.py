"""The statistics of a comparison on made-up answers whose truth is known."""

from __future__ import annotations

import re

import numpy as np
import pytest
from scipy.stats import t as student

from flowinfer.compare.answers import Answers, compare_answers
from flowinfer.compare.arms import Answer
from flowinfer.compare.asks import Ask
from flowinfer.compare.figures import Figure, Limit, figures, student_t
from flowinfer.compare.plots import nice_ticks
from flowinfer.compare.require import parse
from flowinfer.compare.rounds import Group
from flowinfer.compare.verdict import headline
from flowinfer.errors import FlowInferError

ASK = Ask("1", "/v1/completions", {"prompt": "a"})


def answer(first: float, each: float, tokens: int = 10, text: str = "same", **fields: object) -> Answer:
    stamps = [100 + first + each * i for i in range(tokens)]
    return Answer(100.0, stamps, text, [1] * tokens, 20, tokens, ended=stamps[-1], **fields)  # type: ignore[arg-type]


def groups(factor: float, num: int = 60, seed: int = 3) -> list[Group]:
    """B takes `factor` times as long as A; both vary by a third from request to request, together."""
    noise = np.random.default_rng(seed)
    made = []
    for number in range(num):
        load, jitter = noise.lognormal(0, 0.3), noise.lognormal(0, 0.02, 2)
        sides = [answer(0.1 * load * jitter[0], 0.01 * load * jitter[0])]
        sides += [answer(0.1 * load * jitter[1] * factor, 0.01 * load * jitter[1] * factor)]
        made.append(Group(number, [ASK], sides[:1], sides[1:], (100 + number % 5, round((100 + number % 5) * 1.2))))
    return made


def by_name(found: list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in found}


def test_a_change_is_found_and_its_interval_holds_the_truth() -> None:
    found = by_name(figures(groups(0.88), Limit()))
    figure = found["latency_p50"]
    assert figure.low is not None and figure.high is not None
    assert figure.low <= -0.12 <= figure.high
    assert (figure.better, found["tokens_per_s"].better) == ("B", "B")
    assert found["memory"].change == pytest.approx(0.2)


@pytest.mark.parametrize("num", [3, 9, 60])
def test_of_equal_sides_few_are_told_apart(num: int) -> None:
    """At 95 % one in twenty may be; of forty seeds at most six, however few the groups."""
    told = sum(by_name(figures(groups(1.0, num, seed=s), Limit()))["latency_p50"].told_apart for s in range(40))
    assert told <= 6


def test_one_group_tells_nothing() -> None:
    found = figures(groups(0.5, 1), Limit())
    assert not any(figure.told_apart for figure in found)
    assert headline(found, compare_answers(groups(0.5, 1))).startswith("Too few groups")


@pytest.mark.parametrize("freedom", [2, 3, 8, 35])
def test_students_quantile(freedom: int) -> None:
    assert student_t(0.975, freedom) == pytest.approx(student.ppf(0.975, freedom), rel=0.01)


def test_the_same_seed_gives_the_same_interval() -> None:
    assert figures(groups(0.9), Limit(), seed=1) == figures(groups(0.9), Limit(), seed=1)
    assert figures(groups(0.9), Limit(), seed=1) != figures(groups(0.9), Limit(), seed=2)


def test_goodput_counts_requests_within_the_limit() -> None:
    pair = Group(0, [ASK, ASK], [answer(0.1, 0.01), answer(0.1, 0.01)], [answer(0.1, 0.01), answer(2.0, 0.01)])
    found = by_name(figures([pair], Limit(ttft_s=1.0, itl_s=0.1)))["goodput"]
    assert found.a == pytest.approx(2 / 0.19)
    assert found.b == pytest.approx(1 / 2.09)


def test_shares_are_compared_in_points() -> None:
    drafts = {"drafted_tokens": 10}
    pair = [
        Group(
            0, [ASK], [answer(0.1, 0.01, accepted_tokens=4, **drafts)], [answer(0.1, 0.01, accepted_tokens=6, **drafts)]
        )
    ] * 5
    figure = by_name(figures(pair, Limit()))["accepted"]
    assert (figure.a, figure.b, figure.change) == (0.4, 0.6, pytest.approx(0.2))
    assert figure.better == "B"


def test_what_nobody_measured_has_no_figure() -> None:
    figure = by_name(figures(groups(1.0, 5), Limit()))["accepted"]
    assert (figure.a, figure.b, figure.change, figure.low) == (None, None, None, None)


def test_answers_part_at_a_token() -> None:
    a, b = answer(0.1, 0.01, 3, "red blue"), answer(0.1, 0.01, 3, "red green")
    b.tokens = [1, 1, 2]
    found = compare_answers([Group(0, [ASK], [a], [b]), Group(1, [ASK], [a], [a])])
    (difference,) = found.differences
    assert (found.num_pairs, difference.at, difference.unit, difference.shared) == (2, 2, "token", 4)


def test_a_prefix_differs_where_it_ends() -> None:
    (difference,) = compare_answers([Group(0, [ASK], [answer(0.1, 0.1, 3)], [answer(0.1, 0.1, 2)])]).differences
    assert difference.at == 2


def test_the_headline_says_how_much_and_how_sure() -> None:
    found = figures(groups(0.88), Limit())
    sentence = headline(found, compare_answers(groups(0.88)))
    assert re.fullmatch(
        r"B is 1[0-4] % faster at p50, 95 % interval \d+ to 1\d; all 60 answers are the same\.", sentence
    )


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("latency_p50 <= 0.95x", True),
        ("latency_p50 <= 0.80x", False),
        ("latency_p50 < 1s", True),
        ("ttft_p50<10ms", False),
        ("hit_rate >= 0%", True),
        ("memory <= 1GiB", True),
        ("accepted >= 0.5", False),  # nobody drafted
        ("answers == same", True),
    ],
)
def test_requirements(text: str, met: bool) -> None:
    (clause,) = parse(text)
    problem = clause.problem(figures(groups(0.88), Limit()), Answers(1, [], [], []))
    assert (problem == "") is met, problem
    assert met or text in problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft_p5 <= 1x", "no figure 'ttft_p5'"),
        ("ttft_p50 ~ 1x", "isn't a comparison"),
        ("ttft_p50 <= fast", "fast"),
        ("ttft_p50 == 1x", "never exactly equal"),
        ("answers == equal", "== same"),
        ("", "isn't a comparison"),
    ],
)
def test_a_requirement_that_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(FlowInferError, match=message):
        parse(text)


def test_a_failure_on_one_side_is_not_the_same() -> None:
    failed = Answer(100.0, ended=101.0, error="out of memory")
    found = compare_answers([Group(0, [ASK], [answer(0.1, 0.1)], [failed])])
    assert not found.same and found.failed_b == ["1: out of memory"]


def test_ticks_are_round_and_inside() -> None:
    assert nice_ticks(0, 1000, 5) == [0, 200, 400, 600, 800, 1000]
    assert nice_ticks(-0.05, 0.05, 4) == [-0.05, -0.025, 0, 0.025, 0.05]
