"""Compares evictions on one trace at several cache sizes with the best possible one. Prints nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from flowinfer.cache.policies.eviction import LRU, Kind, make_eviction
from flowinfer.sim.optimum import optimal_hits
from flowinfer.sim.replay import replay, replay_expiring
from flowinfer.sim.trace import Trace

KINDS: tuple[Kind, ...] = get_args(Kind)  # the plain one first


@dataclass(frozen=True)
class Outcome:
    """One policy at one size. gap_closed: of the way from LRU to the optimum, None where there is none to go."""

    policy: str
    num_blocks: int | None
    share: float | None  # of the working set
    hits: int
    hit_rate: float
    written: int | None
    gap_closed: float | None = None


def compare_evictions(trace: Trace, sizes: Sequence[float]) -> Iterator[Outcome]:
    """Outcomes of each size (share of the working set, or blocks where above 1), as they are known."""
    for size in sizes:
        yield from _at_size(trace, num_blocks_of(trace, size))


def num_blocks_of(trace: Trace, size: float) -> int:
    """Blocks of a size that is a share of the working set, or blocks where above 1; at least the longest prompt."""
    return max(int(size if size > 1 else size * trace.working_set), trace.longest)


def without_limit(trace: Trace) -> Outcome:
    """A cache that keeps everything."""
    hits = replay(trace, max(trace.working_set, trace.longest), LRU()).hits
    return Outcome("unlimited", None, 1.0, hits, hits / max(1, trace.num_blocks), trace.working_set)


def with_expiry(trace: Trace, ttl_s: float, name: str) -> Outcome:
    """A cache without a limit whose blocks expire ttl_s after their last use."""
    done = replay_expiring(trace, ttl_s)
    return Outcome(name, None, None, done.hits, done.hit_rate, done.written)


def _at_size(trace: Trace, num_blocks: int) -> Iterator[Outcome]:
    best = optimal_hits(trace, num_blocks)
    total, share = max(1, trace.num_blocks), num_blocks / max(1, trace.working_set)
    plain = 0
    for name in KINDS:
        done = replay(trace, num_blocks, make_eviction(name, num_blocks))
        plain = done.hits if name == "lru" else plain
        gap = (done.hits - plain) / (best - plain) if name != "lru" and best > plain else None
        yield Outcome(name, num_blocks, share, done.hits, done.hit_rate, done.written, gap)
    yield Outcome("optimum", num_blocks, share, best, best / total, None)
