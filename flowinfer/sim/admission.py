"""What a way of choosing what to write does to a slow tier below a pool: blocks found, and blocks written for it.

Serial, like flowinfer.sim.replay: a pool that keeps what was used last, and below it a tier of another size, by the
same rule, that is offered each prompt once it is computed. Policies are the real ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from flowinfer.cache.policies.admission import make_admission
from flowinfer.cache.tiers import Write
from flowinfer.sim.trace import Trace

WAYS: tuple[Write, ...] = get_args(Write)


@dataclass(frozen=True)
class Admitted:
    """One way at one size. hits: leading blocks found in the pool or the tier; pool_hits: of them in the pool."""

    write: Write
    num_blocks: int
    share: float  # of the working set
    hits: int
    pool_hits: int
    written: int


def compare_admissions(trace: Trace, pool_blocks: int, sizes: Sequence[int]) -> list[Admitted]:
    """Every way at every size of the tier."""
    return [admit(trace, write, pool_blocks, size) for size in sizes for write in sorted(WAYS)]


def admit(trace: Trace, write: Write, pool_blocks: int, tier_blocks: int) -> Admitted:
    """Replays the trace with this choice of what is written."""
    pool, tier, admission = _LeastRecent(pool_blocks), _LeastRecent(tier_blocks), make_admission(write, tier_blocks)
    hits = pool_hits = written = 0
    for request in trace.requests:
        names = request.blocks
        pool_hits += next((i for i, name in enumerate(names) if name not in pool), len(names))
        hits += next((i for i, name in enumerate(names) if name not in pool and name not in tier), len(names))
        pool.use(names, len(names))
        written += tier.use(names, admission.admit(names)[0])
    share = tier_blocks / max(1, trace.working_set)
    return Admitted(write, tier_blocks, share, hits, pool_hits, written)


class _LeastRecent:
    def __init__(self, num_blocks: int) -> None:
        self._size = num_blocks
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, name: bytes) -> bool:
        return name in self._order

    def use(self, names: Sequence[bytes], num_wanted: int) -> int:
        """Renews what is there, takes in the wanted rest; returns how many that were."""
        written = 0
        for place in range(len(names) - 1, -1, -1):
            name = names[place]
            if name in self._order:
                self._order.move_to_end(name)
            elif place < num_wanted:
                self._order[name] = None
                written += 1
        while len(self._order) > self._size:
            self._order.popitem(last=False)
        return written
