"""Replays of traces: the figures that are known exactly, and what must hold of any replay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.cache.policies.eviction import LRU
from flowinfer.errors import FlowInferError
from flowinfer.sim.optimum import optimal_hits
from flowinfer.sim.replay import replay, replay_expiring
from flowinfer.sim.trace import Trace, TraceRequest, read_trace

HEAD = Path(__file__).parents[1] / "data/traces/mooncake_conversation_head.jsonl"
TRACES = Path(os.environ.get("FLOWINFER_TRACES", "/nowhere"))
needs_traces = pytest.mark.skipif(
    not TRACES.is_dir(), reason="set FLOWINFER_TRACES to a folder with the Mooncake and LMCache traces"
)

paths = st.lists(st.integers(0, 2), min_size=1, max_size=6)  # a request is a path in a tree of degree 3


def trace_of(requests: list[list[int]]) -> Trace:
    """Every prefix of a path names one block."""
    rows = [
        TraceRequest(float(at), 0, 0, tuple(bytes(path[: i + 1]) for i in range(len(path))))
        for at, path in enumerate(requests)
    ]
    return Trace("paths", 64, rows)


def test_a_request_finds_the_longest_prefix_of_any_earlier_one() -> None:
    trace = trace_of([[0, 1, 2], [0, 1], [0, 1, 0, 0], [1, 1, 2]])
    done = replay(trace, trace.working_set, LRU())
    assert (done.blocks, done.hits, done.written, done.evicted) == (12, 4, 8, 0)


def test_the_tail_of_a_request_is_evicted_first() -> None:
    trace = trace_of([[0, 0, 0], [1, 1], [0, 0, 0]])
    assert replay(trace, 4, LRU()).hits == 2


def test_a_block_lives_for_the_time_after_its_last_use() -> None:
    trace = trace_of([[0], [0], [0, 1], [1]])
    rows = [TraceRequest(at, 0, 0, r.blocks) for at, r in zip((0.0, 5.0, 10.0, 15.1), trace.requests, strict=True)]
    late = Trace("late", 64, [*rows[:3], TraceRequest(15.1, 0, 0, rows[0].blocks)])
    assert replay_expiring(late, ttl_s=5.0).hits == 2


@given(st.lists(paths, min_size=1, max_size=30), st.integers(6, 12))
@settings(max_examples=60, deadline=None)
def test_no_replay_beats_the_optimum_and_the_optimum_not_the_whole(requests: list[list[int]], size: int) -> None:
    trace = trace_of(requests)
    best = optimal_hits(trace, size)
    assert replay(trace, size, LRU()).hits <= best <= replay(trace, max(6, trace.working_set), LRU()).hits


@given(st.lists(paths, min_size=1, max_size=6), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_the_optimum_is_what_trying_everything_finds(requests: list[list[int]], size: int) -> None:
    trace = trace_of([path[:3] for path in requests[:4]])
    assert optimal_hits(trace, size) == _best(trace, size, 0, frozenset())


def _best(trace: Trace, size: int, number: int, cached: frozenset[bytes]) -> int:
    """Tries every set of blocks that could be kept after each request."""
    from itertools import combinations

    if number == len(trace.requests):
        return 0
    blocks = trace.requests[number].blocks
    hits = next((i for i, name in enumerate(blocks) if name not in cached), len(blocks))
    there = sorted(cached | set(blocks))
    keep = combinations(there, min(size, len(there)))
    return hits + max(_best(trace, size, number + 1, frozenset(kept)) for kept in keep)


def test_the_excerpt_is_read_as_it_stands() -> None:
    trace = read_trace(HEAD)
    assert (len(trace.requests), trace.num_blocks, trace.working_set, trace.longest) == (120, 3_535, 3_416, 236)
    assert trace.requests[0].input_length == 6758 and trace.requests[-1].at >= trace.requests[0].at


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}\n{"timestamp": 0}\n')
    with pytest.raises(FlowInferError, match=r"trace\.jsonl:2 is no request"):
        read_trace(file)


@needs_traces
@pytest.mark.parametrize(
    ("name", "blocks", "unlimited", "lru", "expiring"),
    [
        ("mooncake_conversation_trace", 288_500, 105_710, 32_260, 83_010),
        ("mooncake_synthetic_trace", 121_877, 77_953, 34_043, 71_228),
        ("lmcache_miniswe_blk64", 46_564, 43_200, None, None),
    ],
)
def test_known_figures(name: str, blocks: int, unlimited: int, lru: int | None, expiring: int | None) -> None:
    trace = read_trace(TRACES / f"{name}.jsonl")
    assert trace.num_blocks == blocks
    assert replay(trace, trace.working_set, LRU()).hits == unlimited
    if lru is not None:
        assert replay(trace, 5_000, LRU()).hits == lru
        assert replay_expiring(trace, 300.0).hits == expiring


@needs_traces
def test_the_agent_workload_has_its_known_ideal(tmp_path: Path) -> None:
    import subprocess
    import sys

    options = ["--sessions", "400", "--rate", "0.5", "--seed", "0", "--block", "64", "--scale", "1.0"]
    file = tmp_path / "agent.jsonl"
    subprocess.run([sys.executable, str(TRACES / "agent_gen.py"), *options, str(file)], check=True, capture_output=True)
    trace = read_trace(file, block_tokens=64)
    assert round(100 * (1 - trace.working_set / trace.num_blocks), 3) == 95.206
