"""The report of an experiment, from records whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from flowinfer.compare.experiment import report_of
from flowinfer.compare.figures import Figure, Limit
from flowinfer.compare.report import html
from flowinfer.errors import FlowInferError
from flowinfer.experiment.outcome import End, Memory, Outcome, Pair, Run
from flowinfer.experiment.record import Recorded


def outcome(arm: str, session: str, scale: float, error: str = "") -> Outcome:
    if error:
        return Outcome(arm=arm, session=session, at=0.0, ended=scale, error=error, status=500)
    times = {"first": scale, "last": scale * 2, "ended": scale * 2}
    return Outcome(arm=arm, session=session, at=0.0, completion_tokens=11, prompt_tokens=20, **times)


def sessions(arm: str, factor: float, seed: int, num: int = 60) -> list[Outcome]:
    """Sessions of one to six requests. What one takes is mostly its session's own."""
    noise = np.random.default_rng(seed)
    found = []
    for number in range(num):
        size = noise.lognormal(0, 0.5)
        for _ in range(noise.integers(1, 7)):
            found.append(outcome(arm, f"{arm}{number}", factor * size * noise.lognormal(0, 0.05)))
    return found


def split(factor: float, seed: int = 0) -> Recorded:
    run = Run(service="prod", name="x", mode="split", share=0.5, at=0.0, changes="-a\n+b")
    both = sessions("a", 1.0, seed) + sessions("b", factor, seed + 1_000)
    return Recorded(run, both, [], [Memory(100, 120 + n % 3) for n in range(20)], None)


def named(found: list[Figure], name: str) -> Figure:
    return next(figure for figure in found if figure.name == name)


def test_a_slower_arm_is_found_and_its_interval_holds_the_truth() -> None:
    report = report_of(split(1.6), Limit())
    figure = named(report.figures, "latency_p50")
    assert figure.low is not None and figure.high is not None and figure.low <= 0.6 <= figure.high
    assert figure.better == "A" and "slower at p50" in report.headline
    memory = named(report.figures, "memory")
    assert memory.change == pytest.approx(0.21, abs=0.01) and memory.better == "A"


def test_of_equal_arms_few_are_told_apart_though_requests_of_a_session_are_alike() -> None:
    """Resampled by requests, as if they were independent, a third of these would be told apart."""
    told = sum(named(report_of(split(1.0, seed), Limit()).figures, "latency_p50").told_apart for seed in range(20))
    assert told <= 4


def test_a_mirror_is_compared_in_pairs() -> None:
    noise, pairs = np.random.default_rng(0), []
    for number in range(80):
        size = float(noise.lognormal(0, 0.8))
        a, b = outcome("a", f"s{number % 20}", size), outcome("b", f"s{number % 20}", size * 1.1)
        pairs.append(Pair(a=a, b=b, at=3 if number == 7 else None, text_a="red", text_b="blue"))
    run = Run(service="prod", name="x", mode="mirror", share=0.5, at=0.0)
    end = End(at=1.0, reason="ended", dropped={"max_open": 4})
    figure = named(report_of(Recorded(run, [], pairs, [], end), Limit()).figures, "latency_p50")
    assert (figure.low, figure.high) == pytest.approx((0.1, 0.1), abs=0.02)  # each pair says about that
    pairs.append(Pair(a=outcome("a", "s1", 1.0), b=outcome("b", "s1", 1.0, "broke")))
    report = report_of(Recorded(run, [], pairs, [], end), Limit())
    assert "answers differ in 1 of 81, first at token 3" in report.headline
    assert report.answers.failed_b == ["broke"]
    assert named(report.figures, "errors").b == pytest.approx(1 / 81)
    page = html(report)
    assert "copied to arm B" in page and "copies dropped: 4 by max_open" in page and "blue" in page


def test_an_arm_without_requests_is_told() -> None:
    empty = split(1.0)
    empty.outcomes = [o for o in empty.outcomes if o.arm == "a"]
    with pytest.raises(FlowInferError, match="Arm B of experiment x has answered no request yet"):
        report_of(empty, Limit())
