"""Which blocks are worth writing to disk: those that come again, not all of every prompt that is asked once. Pure.

A block is known by its name; how often it was met is estimated by a count-min sketch (Cormode and Muthukrishnan, 2005)
with conservative update, halved now and then, as in TinyLFU (Einziger, Friedman and Manes, 2017). Names are hashes, so
their bytes serve as the sketch's. Whether it pays to be choosy depends on the tier's size against the traffic: a large
one finds more if everything is written, a small one if one-off prompts don't push out the rest. So `auto` plays both on
a sample of the blocks and follows what found more (set dueling: Qureshi et al., ISCA 2007).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flowinfer.cache.tiers import Write

ROWS = 4
SAMPLED = 16  # one block of so many is followed by `auto`
MEMORY = 1_000  # requests that its choice looks back on
FEW = 4  # a block met so often at most, now included, belongs to one conversation; beyond, to what many begin with


class Admission(Protocol):
    """Told of each request once, at the end of its prompt."""

    def admit(self, names: Sequence[bytes]) -> tuple[int, bool]:
        """(how many leading blocks of the prompt are wanted, whether what follows it is wanted too)."""


def make_admission(write: Write, num_blocks: int | None) -> Admission:
    """The admission of this name for a tier of num_blocks; None: without a limit, where all fits."""
    if write == "reused":
        return Reused()
    return Everything() if write == "all" or num_blocks is None else Dueling(num_blocks)


class Everything:
    """All blocks of all requests."""

    def admit(self, names: Sequence[bytes]) -> tuple[int, bool]:
        return len(names), True


class Dueling:
    """What serves a tier of num_blocks better: everything, or what is reused. Begins with everything."""

    def __init__(self, num_blocks: int) -> None:
        self._reused = Reused()
        size = max(1, num_blocks // SAMPLED)
        self._with_all, self._with_reused = _Shadow(size), _Shadow(size)
        self._lead = 0.0  # hits of `reused` beyond those of `all`, the newest counting most

    @property
    def is_choosy(self) -> bool:
        """Whether only what is reused is written now."""
        return self._lead > 0

    def admit(self, names: Sequence[bytes]) -> tuple[int, bool]:
        num, follows = self._reused.admit(names)
        sampled = [(place, name) for place, name in enumerate(names) if name[-1] % SAMPLED == 0]
        gained = self._with_reused.use(sampled, num) - self._with_all.use(sampled, len(names))
        self._lead += gained - self._lead / MEMORY
        return (num, follows) if self.is_choosy else (len(names), True)


class _Shadow:
    """Names of a sample of what a tier would hold that is written in one way; the least recently used goes first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def use(self, sampled: Sequence[tuple[int, bytes]], num_wanted: int) -> int:
        """Takes in the wanted of these (place, name), deepest first; returns how many were there."""
        hits = 0
        for place, name in reversed(sampled):
            if name in self._order:
                self._order.move_to_end(name)
                hits += 1
            elif place < num_wanted:
                self._order[name] = None
        while len(self._order) > self._size:
            self._order.popitem(last=False)
        return hits


class Reused:
    """Blocks that were met before: where requests branch. Who goes on in a conversation is kept to the end.

    width: counters of a row; the sketch tells apart about as many blocks, at 4 bytes each.
    """

    def __init__(self, width: int = 1 << 20) -> None:
        self._counts = np.zeros((ROWS, width), np.uint8)
        self._rows = np.arange(ROWS)[:, None]
        self._left = self._every = width

    def admit(self, names: Sequence[bytes]) -> tuple[int, bool]:
        if not names:
            return 0, False
        counts = self._meet(names)
        new = np.flatnonzero(counts < 2)
        num = int(new[0]) if len(new) else len(names)
        goes_on = num > 0 and counts[num - 1] <= FEW
        return (len(names), True) if goes_on else (num, False)

    def _meet(self, names: Sequence[bytes]) -> NDArray[np.uint8]:
        """Counts these blocks once more; returns how often each was met, at most."""
        words = np.frombuffer(b"".join(names), "<u4").reshape(len(names), ROWS)
        at = words.T % self._counts.shape[1]
        met: NDArray[np.uint8] = self._counts[self._rows, at].min(0)
        met += met < 255
        np.maximum.at(self._counts, (np.broadcast_to(self._rows, at.shape), at), met)
        self._left -= len(names)
        if self._left <= 0:
            self._counts >>= 1
            self._left = self._every
        return met
