"""Which blocks are worth writing to disk: those that come again, not all of every prompt that is asked once. Pure.

A block is known by its name; how often it was met is estimated by a count-min sketch (Cormode and Muthukrishnan, 2005)
with conservative update, halved now and then, as in TinyLFU (Einziger, Friedman and Manes, 2017). Names are hashes, so
their bytes serve as the sketch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

Write = Literal["reused", "all"]
ROWS = 4
FEW = 4  # a block met so often at most, now included, belongs to one conversation; beyond, to what many begin with


class Admission(Protocol):
    """Told of each request once, at the end of its prompt."""

    def admit(self, names: Sequence[bytes]) -> tuple[int, bool]:
        """(how many leading blocks of the prompt are wanted, whether what follows it is wanted too)."""


def make_admission(write: Write) -> Admission:
    """The admission of this name."""
    return Reused() if write == "reused" else Everything()


class Everything:
    """All blocks of all requests."""

    def admit(self, names: Sequence[bytes]) -> tuple[int, bool]:
        return len(names), True


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

    def _meet(self, names: Sequence[bytes]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Counts these blocks once more; returns how often each was met, at most."""
        words = np.frombuffer(b"".join(names), "<u4").reshape(len(names), ROWS)
        at = words.T % self._counts.shape[1]
        met = self._counts[self._rows, at].min(0)
        met += met < 255
        np.maximum.at(self._counts, (np.broadcast_to(self._rows, at.shape), at), met)
        self._left -= len(names)
        if self._left <= 0:
            self._counts >>= 1
            self._left = self._every
        return met
