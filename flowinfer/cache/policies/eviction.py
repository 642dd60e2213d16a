"""Which cached block goes first when room is needed. Pure: names in, names out; knows no memory, tier or clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, Protocol

Kind = Literal["lru", "density"]


class Eviction(Protocol):
    """An order over cached blocks that nobody uses. Names are chain hashes, or anything that names a whole prefix."""

    def __len__(self) -> int:
        """Blocks that could be evicted."""

    def take(self, name: bytes) -> None:
        """Somebody uses this evictable block again; it can't be evicted until it is put back."""

    def put(self, names: Sequence[bytes]) -> None:
        """Nobody uses these blocks any more. They follow each other in one sequence, its head first."""

    def pop(self) -> bytes:
        """Evicts the block that is worth least. Raises KeyError when there is none."""

    def clear(self) -> list[bytes]:
        """Forgets everything; returns what was evictable."""


def make_eviction(kind: Kind, num_blocks: int) -> Eviction:
    """The eviction of this kind for a cache of num_blocks."""
    from flowinfer.cache.policies.density import HitDensity  # needs numpy, which the settings' check does without

    return HitDensity(num_blocks) if kind == "density" else LRU()


class LRU:
    """The block that was unused for longest goes first; of one sequence the tail, since it needs its head."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def take(self, name: bytes) -> None:
        del self._order[name]

    def put(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):
            self._order[name] = None

    def pop(self) -> bytes:
        return self._order.popitem(last=False)[0]

    def clear(self) -> list[bytes]:
        names = list(self._order)
        self._order.clear()
        return names
