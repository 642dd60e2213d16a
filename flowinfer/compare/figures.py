"""The figures of a comparison: what each side measures, how they differ, and how sure that is. Pure; seeded.

The interval is the percentile bootstrap (Efron 1979) over groups of requests: where both sides answered the same ones,
over pairs, so that both are resampled by the same groups. Of few groups it is too narrow: nine would find a difference
in one of six medians that have none. So it is at least Student's interval of the bootstrap's standard error, scaled for
the number of groups (Hesterberg 2015, "What teachers should know about the bootstrap").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowinfer.compare.arms import Answer
from flowinfer.compare.rounds import Group

NUM_RESAMPLES = 2_000
CONFIDENCE = 0.95
Values = NDArray[np.float64]
Unit = Literal["s", "/s", "share", "bytes"]


class Limit(msgspec.Struct, frozen=True):
    """What a request must keep to count as good, in seconds: first token, and mean time of each token after it."""

    ttft_s: float = 1.0
    itl_s: float = 0.1


class Figure(msgspec.Struct):
    """One figure of both sides. `change` is b / a - 1, or b - a for shares; low and high bound it at 95 %.

    None where it can't be had: no request measured it, or there was one reading only.
    """

    name: str
    title: str
    unit: Unit
    lower_is_better: bool
    a: float | None
    b: float | None
    change: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def told_apart(self) -> bool:
        """True when the interval leaves nought out."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    @property
    def better(self) -> str:
        """The side that is better: "A" or "B", "" where that can't be told."""
        if not self.told_apart or self.change is None:
            return ""
        return "B" if (self.change < 0) == self.lower_is_better else "A"


def ttft(answer: Answer) -> float:
    """Seconds to the first token; NaN without one."""
    return answer.stamps[0] - answer.asked if answer.stamps else np.nan


def itl(answer: Answer) -> float:
    """Mean seconds of each token after those of the first piece; NaN for answers of one piece."""
    if len(answer.stamps) < 2 or answer.completion_tokens < 2:
        return np.nan
    return (answer.stamps[-1] - answer.stamps[0]) / (answer.completion_tokens - 1)


def latency(answer: Answer) -> float:
    """Seconds to the end of the answer."""
    return answer.ended - answer.asked


# Figures over requests: one value a request, then a percentile of them.
_PER_REQUEST: tuple[tuple[str, str, Callable[[Answer], float], float], ...] = (
    ("ttft_p50", "first token, p50", ttft, 50),
    ("ttft_p90", "first token, p90", ttft, 90),
    ("itl_p50", "each token, p50", itl, 50),
    ("itl_p90", "each token, p90", itl, 90),
    ("latency_p50", "whole answer, p50", latency, 50),
    ("latency_p90", "whole answer, p90", latency, 90),
)
# Figures over groups: a sum over a sum, and whether less is better.
_RATIOS: tuple[tuple[str, str, Unit, bool], ...] = (
    ("tokens_per_s", "tokens", "/s", False),
    ("goodput", "goodput", "/s", False),
    ("hit_rate", "prompt tokens reused", "share", False),
    ("accepted", "drafts accepted", "share", False),
    ("errors", "requests failed", "share", True),
)
NAMES: tuple[str, ...] = (*(row[0] for row in _PER_REQUEST), *(row[0] for row in _RATIOS), "memory")


def unit_of(name: str) -> Unit:
    """The unit of a figure."""
    return {row[0]: row[2] for row in _RATIOS}.get(name, "bytes" if name == "memory" else "s")


def figures(groups: Sequence[Group], limit: Limit, seed: int = 0, *, busy: bool = False) -> list[Figure]:
    """All figures of pairs: both sides are resampled by the same groups. Failed requests count in goodput and errors.

    busy: rates are for a second in which a request was open, rather than for a second of the group.
    """
    picks = np.random.default_rng(seed).integers(0, len(groups), (NUM_RESAMPLES, len(groups)))
    sides = [group.a for group in groups], [group.b for group in groups]
    found = _figures(sides, (picks, picks), limit, busy)
    return [*found, _memory([group.memory for group in groups if group.memory is not None], seed)]


def unpaired(
    a: Sequence[Sequence[Answer]],
    b: Sequence[Sequence[Answer]],
    limit: Limit,
    memory: Sequence[tuple[int, int]] = (),
    seed: int = 0,
) -> list[Figure]:
    """All figures of two sides that answered different requests, each resampled by its own groups (of a session, say).

    memory: readings of both sides at the same times. Rates are for a second in which a request was open.
    """
    random = np.random.default_rng(seed)
    picks = tuple(random.integers(0, len(side), (NUM_RESAMPLES, len(side))) for side in (a, b))
    return [*_figures((a, b), (picks[0], picks[1]), limit, busy=True), _memory(memory, seed)]


Sides = tuple[Sequence[Sequence[Answer]], Sequence[Sequence[Answer]]]
Picks = tuple[NDArray[np.int64], NDArray[np.int64]]


def _figures(sides: Sides, picks: Picks, limit: Limit, busy: bool) -> list[Figure]:
    found = []
    weights = [_weights(side, pick) for side, pick in zip(sides, picks, strict=True)]
    count = min(len(side) for side in sides)
    for name, title, of, rank in _PER_REQUEST:
        values = [np.array([np.nan if x.error else of(x) for group in side for x in group]) for side in sides]
        whole = [_weighted(v, np.ones((1, len(v)), np.int64), rank)[0] for v in values]
        draws = [_weighted(v, w, rank) for v, w in zip(values, weights, strict=True)]
        found.append(_figure(name, title, "s", True, (whole[0], whole[1]), (draws[0], draws[1]), count))
    sums = [_sums(side, limit, busy) for side in sides]
    for name, title, unit, lower in _RATIOS:
        draws = [_ratio(s[name][0][p].sum(1), s[name][1][p].sum(1)) for s, p in zip(sums, picks, strict=True)]
        whole = [_ratio(s[name][0].sum(), s[name][1].sum()) for s in sums]
        found.append(_figure(name, title, unit, lower, (whole[0], whole[1]), (draws[0], draws[1]), count))
    return found


def _memory(readings: Sequence[tuple[int, int]], seed: int) -> Figure:
    """Means of readings that were taken together, resampled together."""
    if not readings:
        return Figure("memory", "memory", "bytes", True, None, None)
    values = np.array(readings, np.float64)
    picks = np.random.default_rng(seed).integers(0, len(values), (NUM_RESAMPLES, len(values)))
    draws, whole = values[picks].mean(1), values.mean(0)
    points, drawn = (whole[0], whole[1]), (draws[:, 0], draws[:, 1])
    return _figure("memory", "memory", "bytes", True, points, drawn, len(values))


def _weights(side: Sequence[Sequence[Answer]], picks: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each request is drawn, [resamples, requests]: as often as its group."""
    counts = np.zeros((len(picks), len(side)), np.int64)
    np.add.at(counts, (np.arange(len(picks))[:, None], picks), 1)
    return counts[:, np.repeat(np.arange(len(side)), [len(group) for group in side])]


def _weighted(values: Values, weights: NDArray[np.int64], rank: float) -> Values:
    """The percentile of values that count `weights[r]` times in resample r; nearest rank, NaN where none count."""
    kept = np.flatnonzero(~np.isnan(values))
    if not len(kept):
        return np.full(len(weights), np.nan)
    kept = kept[np.argsort(values[kept], kind="stable")]
    reached = weights[:, kept].cumsum(1)
    total = reached[:, -1]
    index = (reached < np.maximum(1, np.ceil(total * rank / 100))[:, None]).sum(1)
    return np.where(total > 0, values[kept][np.minimum(index, len(kept) - 1)], np.nan)


def _sums(groups: Sequence[Sequence[Answer]], limit: Limit, busy: bool) -> dict[str, tuple[Values, Values]]:
    """Numerator and denominator of each ratio, by group."""

    def per_group(of: Callable[[Answer], float]) -> Values:
        return np.array([float(sum(of(answer) for answer in group)) for group in groups])

    def good(answer: Answer) -> float:
        slow = itl(answer) > limit.itl_s  # False for NaN: one piece has no gap
        return float(not answer.error and ttft(answer) <= limit.ttft_s and not slow)

    wall = [max(answer.ended for answer in group) - min(answer.asked for answer in group) for group in groups]
    seconds = per_group(latency) if busy else np.array(wall)
    return {
        "tokens_per_s": (per_group(lambda answer: answer.completion_tokens), seconds),
        "goodput": (per_group(good), seconds),
        "hit_rate": (per_group(lambda answer: answer.cached_tokens), per_group(lambda answer: answer.prompt_tokens)),
        "accepted": (per_group(lambda answer: answer.accepted_tokens), per_group(lambda answer: answer.drafted_tokens)),
        "errors": (per_group(lambda answer: float(bool(answer.error))), per_group(lambda answer: 1.0)),
    }


def _ratio(top: Values, under: Values) -> Values:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(under > 0, top / under, np.nan)


def _figure(
    name: str,
    title: str,
    unit: Unit,
    lower: bool,
    points: tuple[Values, Values],
    draws: tuple[Values, Values],
    count: int,
) -> Figure:
    a, b = (None if np.isnan(point) else float(point) for point in points)
    figure = Figure(name, title, unit, lower, a, b)
    with np.errstate(divide="ignore", invalid="ignore"):
        changes = draws[1] - draws[0] if unit == "share" else draws[1] / draws[0] - 1
    changes = changes[np.isfinite(changes)]
    if a is None or b is None or (unit != "share" and a == 0):
        return figure
    figure.change = b - a if unit == "share" else b / a - 1
    if count > 1 and len(changes) >= CONFIDENCE * NUM_RESAMPLES:  # else too few groups to say how sure it is
        figure.low, figure.high = _interval(figure.change, changes, count)
    return figure


def _interval(change: float, changes: Values, count: int) -> tuple[float, float]:
    """Bounds of the change, from its resamples over `count` > 1 groups."""
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(bound) for bound in np.percentile(changes, [100 * tail, 100 - 100 * tail]))
    reach = student_t(1 - tail, count - 1) * float(changes.std()) * (count / (count - 1)) ** 0.5
    return min(low, change - reach), max(high, change + reach)


def student_t(share: float, freedom: int) -> float:
    """Quantile of Student's t (Hill 1970, by powers of 1 / freedom); within 2 % from 3 degrees of freedom on."""
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92_160,
    )
    return z + sum(term / float(freedom) ** (power + 1) for power, term in enumerate(terms))
