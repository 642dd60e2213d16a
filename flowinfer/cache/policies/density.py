"""Evicts the block that promises fewest hits for the room it takes, learned while it runs. Pure; time is blocks put.

Blocks are sorted into classes: used before, new behind a reused prefix, and new ones by the length of their sequence.
Each class is a queue by last use, and only the heads compete, so that a choice costs a few look-ups. How likely a block
of some class and age is to be used again comes from histograms of what happened to earlier ones, evicted ones too,
whose names are remembered for a while. The worth of a block is its hit density: expected hits over expected time in the
cache, up to the horizon that makes the most of it, as in LHD (Beckmann, Chen and Cidon, NSDI 2018) and Gittins (1979).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LENGTHS = 8  # classes of new blocks: sequences of 1, 2-3, 4-7 ... 128 blocks and more
FOLLOWING = LENGTHS  # new, but behind a prefix that was reused
USED = LENGTHS + 1
NUM_CLASSES = LENGTHS + 2

Entry = tuple[int, int]  # class, and the time of the last use


class HitDensity:
    """Eviction for a cache of num_blocks. O(1) a block; remembers at most ghosts * num_blocks evicted names.

    ghosts 4: with 1 or 2 the histograms can't see reuse that a small cache missed (1 % of the working set).
    """

    def __init__(self, num_blocks: int, ghosts: float = 4.0) -> None:
        self._max_ghosts = int(num_blocks * ghosts)
        self._queues: tuple[OrderedDict[bytes, int], ...] = tuple(OrderedDict() for _ in range(NUM_CLASSES))
        self._class: dict[bytes, int] = {}
        self._taken: set[bytes] = set()
        self._ghosts: OrderedDict[bytes, Entry] = OrderedDict()
        self._ages = Ages(num_blocks)
        self._now = 0

    def __len__(self) -> int:
        return len(self._class)

    def take(self, name: bytes) -> None:
        kind = self._class.pop(name)
        self._ages.hit(kind, self._now - self._queues[kind].pop(name))
        self._taken.add(name)

    def put(self, names: Sequence[bytes]) -> None:
        used = [self._was_used(name) for name in names]
        new = min(LENGTHS, len(names).bit_length()) - 1 if sum(used) <= 1 else FOLLOWING  # 1: what all prompts share
        for name, again in zip(reversed(names), reversed(used), strict=True):
            kind = USED if again else new
            self._class[name] = kind
            self._queues[kind][name] = self._now
            self._ages.born(kind)
        self._now += len(names)
        self._ages.learn(self._now)

    def pop(self) -> bytes:
        heads = [(kind, *next(iter(queue.items()))) for kind, queue in enumerate(self._queues) if queue]
        if not heads:
            raise KeyError("nothing can be evicted")
        kind, name, at = min(heads, key=lambda head: (self._ages.worth(head[0], self._now - head[2]), head[2]))
        del self._queues[kind][name], self._class[name]
        self._ghosts[name] = (kind, at)
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)
        return name

    def clear(self) -> list[bytes]:
        names = list(self._class)
        for queue in self._queues:
            queue.clear()
        self._class.clear()
        self._taken.clear()
        self._ghosts.clear()
        return names

    def _was_used(self, name: bytes) -> bool:
        if name in self._taken:
            self._taken.remove(name)
            return True
        ghost = self._ghosts.pop(name, None)
        if ghost is None:
            return False
        self._ages.hit(ghost[0], self._now - ghost[1])
        return True


class Ages:
    """Histograms of the ages at which blocks of each class were used again, and the worth that follows from them.

    Ages are counted in blocks put, in buckets that grow by 2^(1/4), the first num_blocks / 32 wide.
    """

    BUCKETS = 64
    DECAY = 0.97  # a look, so that the last 30 or so count: workloads change by the hour
    PRIOR = 100.0  # blocks by which a class leans on the average of all until it has its own
    HORIZON = 8.0  # cache sizes: beyond, no block is worth waiting for

    def __init__(self, num_blocks: int) -> None:
        self._unit = max(1, num_blocks // 32)
        self._every = max(256, num_blocks // 4)
        self._next = self._every
        self._born = np.full(NUM_CLASSES, 1e-9)
        self._hits = np.zeros((NUM_CLASSES, self.BUCKETS))
        edges = self._unit * (2.0 ** (np.arange(self.BUCKETS + 1) / 4) - 1)
        self._widths = np.diff(edges)
        bucket = np.arange(self.BUCKETS)
        near = edges[:-1] <= num_blocks * self.HORIZON
        self._ahead = (bucket[:, None] <= bucket) & (near | (bucket[:, None] == bucket))  # [from, to]
        self._worth: list[list[float]] = [list(-np.arange(self.BUCKETS, dtype=float))] * NUM_CLASSES  # at first, LRU

    def worth(self, kind: int, age: int) -> float:
        """Expected hits per block and time of a block of this class and age."""
        return self._worth[kind][self._bucket(age)]

    def born(self, kind: int) -> None:
        """A block was put."""
        self._born[kind] += 1

    def hit(self, kind: int, age: int) -> None:
        """A block of this class was used again at this age."""
        self._hits[kind, self._bucket(age)] += 1

    def learn(self, now: int) -> None:
        """Works out the worths anew, where enough has happened: 0.3 ms."""
        if now < self._next:
            return
        self._next = now + self._every
        self._worth = self._densities().tolist()
        self._born *= self.DECAY
        self._hits *= self.DECAY

    def _densities(self) -> NDArray[np.float64]:
        """[class, bucket]: the best ratio of hits to time over all horizons."""
        share = self.PRIOR / self._born.sum()
        hits = self._hits + share * self._hits.sum(0)
        alive = (self._born + self.PRIOR)[:, None] - np.cumsum(hits, 1)
        alive = np.maximum(np.concatenate([(self._born + self.PRIOR)[:, None], alive], 1), 1e-9)
        time = (alive[:, :-1] + alive[:, 1:]) / 2 * self._widths
        summed_hits, summed_time = _sums(hits), _sums(time)
        ratio = np.where(self._ahead, summed_hits / np.maximum(summed_time, 1e-9), 0.0)
        return np.asarray(ratio.max(2))

    def _bucket(self, age: int) -> int:
        return min(self.BUCKETS - 1, int(4 * math.log2(1 + age / self._unit)))


def _sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[class, bucket] -> [class, from, to]: sums from one bucket to another, both included."""
    total = np.cumsum(values, 1)
    return total[:, None, :] - (total - values)[:, :, None]
