"""What the best possible eviction would reach on a trace, knowing its future (Belady, 1966). A bound, not a policy."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from flowinfer.sim.trace import Trace

NEVER = 1 << 62


def optimal_hits(trace: Trace, num_blocks: int) -> int:
    """Blocks found by a cache of num_blocks that always drops the block whose next use is farthest.

    Blocks are of one size, so that is optimal for blocks taken one by one. It is for prefixes too: every request that
    uses a block uses its parent, so a parent's next use is never later than its child's, and with equal ones dropping
    the deeper block first, the cache always holds whole prefixes. A block that isn't worth a place isn't kept at all,
    which a pool can't do while it computes the block: the bound is a little out of reach.
    """
    following = _next_uses(trace)
    due: dict[bytes, int] = {}  # what is cached, and the request that uses it next
    heap: list[tuple[int, int, bytes]] = []  # farthest use first, then deepest; stale entries are passed over
    hits = 0
    for request, uses in zip(trace.requests, following, strict=True):
        hits += next((i for i, name in enumerate(request.blocks) if name not in due), len(request.blocks))
        for depth, (name, use) in enumerate(zip(request.blocks, uses, strict=True)):
            due[name] = use
            heapq.heappush(heap, (-use, -depth, name))
        while len(due) > num_blocks:
            use, _, name = heapq.heappop(heap)
            if due.get(name) == -use:
                del due[name]
    return hits


def _next_uses(trace: Trace) -> list[Sequence[int]]:
    """For each block of each request: the number of the next request that uses it."""
    upcoming: dict[bytes, int] = {}
    uses: list[Sequence[int]] = []
    for number in range(len(trace.requests) - 1, -1, -1):
        blocks = trace.requests[number].blocks
        uses.append([upcoming.get(name, NEVER) for name in blocks])
        upcoming.update(dict.fromkeys(blocks, number))
    return uses[::-1]
