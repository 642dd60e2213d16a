"""Who goes to arm B, and when it has to stop."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowinfer.experiment.outcome import Outcome
from flowinfer.experiment.policy import Judge, lower_bound, percentile, place, session_of, wilson
from flowinfer.message import Call, Sampling
from flowinfer.spec.limits import parse_limits

NAMES = st.text(min_size=1, max_size=40)


def call(id: str = "1", **fields: object) -> Call:
    return Call(id=id, sampling=Sampling(), **fields)  # type: ignore[arg-type]


@given(session=NAMES, experiment=NAMES, share=st.floats(0, 1), more=st.floats(0, 1))
def test_a_session_stays_in_its_arm_and_a_larger_share_only_adds(
    session: str, experiment: str, share: float, more: float
) -> None:
    assert place(session, experiment) == place(session, experiment)
    if place(session, experiment) < share:
        assert place(session, experiment) < max(share, more)


@given(experiment=NAMES, share=st.floats(0.02, 0.98))
def test_the_share_is_met_within_what_chance_allows(experiment: str, share: float) -> None:
    """Five deviations of a binomial count: one run in two million would fail by chance."""
    num = 2_000
    count = sum(place(f"session {number}", experiment) < share for number in range(num))
    assert abs(count - num * share) < 5 * math.sqrt(num * share * (1 - share)) + 1


def test_experiments_place_sessions_each_in_its_own_way() -> None:
    sessions = [f"s{number}" for number in range(2_000)]
    both = sum(place(s, "one") < 0.5 and place(s, "two") < 0.5 for s in sessions)
    assert 400 < both < 600  # a quarter


@given(turns=st.lists(st.tuples(NAMES, NAMES), max_size=5), first=NAMES, system=st.none() | NAMES)
def test_all_turns_of_a_chat_are_one_session(turns: list[tuple[str, str]], first: str, system: str | None) -> None:
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": first}]
    session = session_of(call("a", messages=list(messages)))
    for number, (answer, question) in enumerate(turns):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        assert session_of(call(f"b{number}", messages=list(messages))) == session


def test_a_named_session_goes_before_the_chat_and_choices_stay_together() -> None:
    assert session_of(call(session="ann", messages=[{"role": "user", "content": "hi"}])) == "ann"
    assert session_of(call("r#0", prompt="x")) == session_of(call("r#7", prompt="x")) == "r"


def outcomes(arm: str, seconds: list[float], failed: int = 0) -> list[Outcome]:
    good = [
        Outcome(arm=arm, session="s", at=0.0, first=s, last=s + 0.1, ended=s + 0.1, completion_tokens=2)
        for s in seconds
    ]
    return good + [Outcome(arm=arm, session="s", at=0.0, error="broke", status=500)] * failed


def judged(limits: dict[str, str], a: list[Outcome], b: list[Outcome], min_requests: int = 50) -> str:
    judge = Judge(parse_limits(limits), min_requests)
    return next((reason for outcome in [*a, *b] if (reason := judge.take(outcome))), "")


def drawn(scale: float, seed: int, num: int = 300) -> list[float]:
    return (np.random.default_rng(seed).lognormal(0, 0.4, num) * scale).tolist()


def test_a_slow_arm_is_stopped_and_the_reason_says_how_slow() -> None:
    reason = judged({"ttft_p95": "> 1.5x"}, outcomes("a", drawn(1.0, 1)), outcomes("b", drawn(2.5, 2)))
    assert reason.startswith("ttft_p95 > 1.5x: it is ") and "x of arm A's, over" in reason


def test_of_equal_arms_few_are_stopped() -> None:
    """Each is looked at again and again, and a limit of 1.2x is near to what chance does."""
    limits = {"ttft_p50": "> 1.2x", "errors": "> 5%"}
    stopped = [
        seed
        for seed in range(60)
        if judged(limits, outcomes("a", drawn(1, seed)), outcomes("b", drawn(1, seed + 1_000)))
    ]
    assert len(stopped) <= 2


def test_nothing_is_decided_before_there_are_enough() -> None:
    slow = outcomes("b", [9.0] * 49)
    assert judged({"ttft_p50": "> 1.1x"}, outcomes("a", [1.0] * 200), slow) == ""
    assert judged({"ttft_p50": "> 1.1x"}, outcomes("a", [1.0] * 49), outcomes("b", [9.0] * 200)) == ""
    assert judged({"ttft_p50": "> 1s"}, [], outcomes("b", [9.0] * 50)) != ""


@pytest.mark.parametrize(("failed", "stops"), [(0, False), (1, False), (8, True)])
def test_errors_stop_an_arm_when_they_are_no_chance(failed: int, stops: bool) -> None:
    """One failure of sixty is over 1 %, but would happen to many an arm of half a percent."""
    assert bool(judged({"errors": "> 1%"}, [], outcomes("b", [1.0] * 59, failed))) is stops


def test_what_the_request_itself_is_at_fault_for_counts_as_no_error() -> None:
    refused = [Outcome(arm="b", session="s", at=0.0, error="too long", status=400)] * 100
    assert judged({"errors": "> 1%"}, [], refused) == ""


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=400), st.sampled_from([0.5, 0.9, 0.99]))
def test_bounds_enclose_what_they_bound(values: list[float], rank: float) -> None:
    ordered = sorted(values)
    assert 0 <= lower_bound(ordered, rank) <= percentile(ordered, rank)
    low, high = wilson(len(ordered) // 3, len(ordered))
    assert 0 <= low <= (len(ordered) // 3) / len(ordered) <= high <= 1


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"speed": "> 1x"}, "no figure `speed`"),
        ({"ttft_p95": "1.5x"}, "isn't a limit"),
        ({"ttft_p95": "> 5%"}, "or a factor of arm A's"),
        ({"errors": "> 2s"}, "expected a share"),
    ],
)
def test_a_limit_that_cannot_be_read_is_named(written: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_limits(written)
