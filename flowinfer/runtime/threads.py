"""Threads of worker processes: how long they spin for each other. Pure."""

from __future__ import annotations

from collections.abc import Mapping

# A thread of torch that waits for its peers spins first: a step is hundreds of short products, and waking takes time.
# About 0.06 ms on an AMD EPYC, which spans the Python between two products. Where another process has taken the peer's
# core, each product costs one spin more: with the library's own default, of 6 ms, a step would take seconds.
ALONE = {"GOMP_SPINCOUNT": "2000"}
# With more threads than cores a peer has often lost its core, and spinning keeps it away: two workers of two threads on
# two busy cores took ten times as long as without (tests/bench/bench_threads.py). KMP_BLOCKTIME is the same for the
# OpenMP of LLVM and Intel.
CROWDED = {"GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}


def is_crowded(threads: Mapping[str, tuple[int, int]], cores: int) -> bool:
    """Whether workers that run models, by name (processes, threads of each), have more threads than there are cores.

    Processes of one thread never wait for a peer, so alone they don't count as a crowd.
    """
    total = sum(processes * each for processes, each in threads.values())
    return total > cores and any(each > 1 for _, each in threads.values())


def spinning(crowded: bool, environ: Mapping[str, str]) -> dict[str, str]:
    """Settings of a process's environment; what the user has set stays."""
    wanted = CROWDED if crowded else ALONE
    if "OMP_WAIT_POLICY" in environ:
        return {}
    return {name: environ.get(name, value) for name, value in wanted.items()}
