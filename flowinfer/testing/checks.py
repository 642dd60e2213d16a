"""Holds answers and runs against what a test file expects. Pure: values in, differences as text out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flowinfer.testing.expect import Bound, EdgeExpect, Expect, RunExpect
from flowinfer.testing.file import Case


@dataclass
class Result:
    """What became of a case. status: of HTTP, or lost; times in seconds, first and ended 0 for never."""

    name: str
    status: int | str = 0
    body: dict[str, Any] = field(default_factory=dict)
    sent: float = 0.0
    first: float = 0.0
    ended: float = 0.0

    @property
    def latency(self) -> float:
        return round(self.ended - self.sent, 6)  # sums of virtual times are off by their last bit

    @property
    def first_token(self) -> float | None:
        """Seconds to the first text; None without any."""
        return round(self.first - self.sent, 6) if self.first else None


@dataclass(frozen=True)
class Passed:
    """A message that passed an edge. holds: whether the expectation's `where` does; told: the message, where not."""

    at: float
    requests: tuple[str, ...]
    holds: bool = True
    told: str = ""


@dataclass
class Run:
    """What became of a whole run. restarts: by instance; metrics: by name, summed; left: what was held at the end."""

    results: list[Result]
    edges: dict[str, list[Passed]] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """How a case went, or the run as a whole; `problems` is empty where it passed."""

    name: str
    text: str
    problems: tuple[str, ...]


def answer_problems(expect: Expect | None, status: int | str, body: dict[str, Any]) -> list[str]:
    """What differs in an answer; an error that wasn't expected is the only difference that is told."""
    if expect is None:
        return []
    return _error_problems(expect, status, body) or _answer_problems(expect, status, body)


def text_of(body: dict[str, Any]) -> str:
    """Of an answer, or the message of an error."""
    if "choices" not in body:
        return str(body.get("error", {}).get("message", ""))
    choice = body["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def difference(what: str, found: Any, wanted: Any) -> str:
    """`what is x, expected y`; of long texts or lists that begin alike, also where they part."""
    told = f"{what} is {found!r}, expected {wanted!r}"
    if isinstance(found, (str, list)) and isinstance(wanted, (str, list)) and len(told) > 160:
        pairs = zip(found, wanted, strict=False)
        at = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(found), len(wanted)))
        return f"{told}\n  they part at {at}: {found[at : at + 20]!r} instead of {wanted[at : at + 20]!r}"
    return told


def _error_problems(expect: Expect, status: int | str, body: dict[str, Any]) -> list[str]:
    if status == (expect.error or 200):
        return []
    return [f"status {status}, expected {expect.error or 200}: {text_of(body)}"]


def _answer_problems(expect: Expect, status: int | str, body: dict[str, Any]) -> list[str]:
    text = text_of(body)
    usage = body.get("usage") or {}
    choice = body["choices"][0] if status == 200 else {}
    found: dict[str, Any] = {
        "text": text,
        "finish_reason": choice.get("finish_reason"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "param": (body.get("error") or {}).get("param"),
    }
    wanted = {key: getattr(expect, key) for key in found if getattr(expect, key) is not None}
    problems = [difference(key, found[key], value) for key, value in wanted.items() if found[key] != value]
    if expect.contains is not None and expect.contains not in text:
        problems.append(f"{text!r} doesn't contain {expect.contains!r}")
    if expect.matches is not None and not re.search(expect.matches, text):
        problems.append(f"{text!r} doesn't match {expect.matches!r}")
    for message in body.get("wrong", ())[:1]:
        problems.append(f"{expect.where!r} doesn't hold for {message}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if expect.min_cached_tokens is not None and cached < expect.min_cached_tokens:
        problems.append(f"{cached} cached tokens, expected at least {expect.min_cached_tokens}")
    return problems


def time_problems(expect: Expect | None, result: Result) -> list[str]:
    """Answers that were too late."""
    problems: list[str] = []
    if expect is None:
        return problems
    if expect.latency is not None and result.latency > expect.latency:
        problems.append(f"whole after {_ms(result.latency)}, expected within {_ms(expect.latency)}")
    first = result.first_token
    if expect.first_token is not None and (first is None or first > expect.first_token):
        when = "never" if first is None else f"after {_ms(first)}"
        problems.append(f"first token {when}, expected within {_ms(expect.first_token)}")
    return problems


def case_outcome(case: Case, result: Result, other: Result | None = None, other_name: str = "") -> Outcome:
    """How a case went; `other` is what another pipeline answered."""
    text = text_of(result.body)
    problems = answer_problems(case.expect, result.status, result.body) + time_problems(case.expect, result)
    if other is not None and (wanted := text_of(other.body)) != text:
        problems.append(difference(f"the answer of {other_name}", wanted, text))
    return Outcome(case.name, text, tuple(problems))


def run_problems(expect: RunExpect | None, run: Run) -> list[str]:
    """What differs in a run as a whole. That nothing is left behind is always expected."""
    problems = list(run.left)
    if expect is None:
        return problems
    good = [result for result in run.results if result.status == 200]
    counts = {"ended": len(good), "failed": len(run.results) - len(good)}
    for what, count in counts.items():
        wanted = getattr(expect, what)
        if wanted is not None and wanted != count:
            failed = "".join(f"\n  {r.name}: {r.status} {text_of(r.body)}" for r in run.results if r.status != 200)
            problems.append(f"{count} cases {what}, expected {wanted}{failed}")
    order = [result.name for result in sorted(run.results, key=lambda result: result.ended) if result.ended]
    if expect.order is not None and order != expect.order:
        problems.append(difference("the order in which cases ended", order, expect.order))
    for name, wanted in expect.edges.items():
        problems += [f"{name}: {problem}" for problem in _edge_problems(wanted, run.edges.get(name, []))]
    for name, count in expect.restarts.items():
        if (found := run.restarts.get(name, 0)) != count:
            problems.append(f"{name} was started again {found} times, expected {count}")
    for name, bound in expect.metrics.items():
        problems += _metric_problems(name, bound, run.metrics.get(name, 0.0))
    return [*problems, *_bound_problems(expect, good)]


def _edge_problems(expect: EdgeExpect, passed: list[Passed]) -> Iterable[str]:
    if expect.messages is not None and len(passed) != expect.messages:
        yield f"{len(passed)} messages, expected {expect.messages}"
    order = list(dict.fromkeys(request for one in passed for request in one.requests))
    if expect.order is not None and order != expect.order:
        yield difference("the order", order, expect.order)
    if wrong := [one for one in passed if not one.holds]:
        yield f"{expect.where!r} doesn't hold for {len(wrong)} of {len(passed)} messages, as {wrong[0].told}"


def _metric_problems(name: str, wanted: float | Bound, found: float) -> Iterable[str]:
    if isinstance(wanted, Bound):
        if wanted.min is not None and found < wanted.min:
            yield f"{name} grew by {found:g}, expected at least {wanted.min:g}"
        if wanted.max is not None and found > wanted.max:
            yield f"{name} grew by {found:g}, expected at most {wanted.max:g}"
    elif found != wanted:
        yield f"{name} grew by {found:g}, expected {wanted:g}"


def _bound_problems(expect: RunExpect, good: list[Result]) -> Iterable[str]:
    whole = [result.latency for result in good]
    first = [result.first_token for result in good if result.first_token is not None]
    bounds = (("latency", 0.5, expect.latency_p50, whole), ("latency", 0.95, expect.latency_p95, whole))
    for what, share, bound, values in (*bounds, ("first token", 0.95, expect.first_token_p95, first)):
        if bound is None:
            continue
        name = f"{what} p{share * 100:.0f}"
        if not values:
            yield f"{name}: there are no answers, expected within {_ms(bound)}"
        elif (found := quantile(values, share)) > bound:
            yield f"{name} is {_ms(found)}, expected within {_ms(bound)}"


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of the values doesn't exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:g} ms" if seconds < 10 else f"{seconds:g} s"
