"""Paged KV blocks: who holds which, which are cached by content, which go first. Knows only ids, never bytes.

A block is free, held (refs > 0), or cached: named by the chain hash of its content and kept, least recently used first
to go, until its room is needed. The tail of a sequence goes before its head: a prefix is worth nothing without it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

Report = Callable[[list[bytes]], None]


class KVPool:
    """Blocks [first, end) of an arena. cached_limit bounds the unheld cached blocks; 0 turns the prefix cache off.

    on_stored and on_removed are told the chain hashes that entered or left the prefix cache.
    """

    def __init__(self, first: int, end: int, *, cached_limit: int, on_stored: Report, on_removed: Report) -> None:
        self.first, self.end, self.cached_limit = first, end, cached_limit
        self._free: deque[int] = deque(range(first, end))
        self._refs: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._name: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}
        self._on_stored, self._on_removed = on_stored, on_removed

    @property
    def num_blocks(self) -> int:
        """Blocks that this pool owns."""
        return self.end - self.first

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could give now: free ones and cached ones that nobody holds."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that hold reusable content, held or not."""
        return len(self._named)

    def owns(self, block: int) -> bool:
        """Whether the block lies in this pool's range."""
        return self.first <= block < self.end

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Takes free blocks out of circulation as if held once; `release` brings them back."""
        for block in blocks:
            self._free.remove(block)
            self._refs[block] = 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, held once each, or None (and nothing changed) where so many can't be had."""
        if count > self.num_free:
            return None
        if evict := max(0, count - len(self._free)):
            self._evict(evict)
        blocks = [self._free.popleft() for _ in range(count)]
        self._refs.update((block, 1) for block in blocks)
        return blocks

    def acquire(self, hashes: Sequence[bytes]) -> list[int]:
        """Holds and returns the cached blocks of the leading hashes, as many as there are."""
        blocks: list[int] = []
        for name in hashes:
            block = self._named.get(name)
            if block is None:
                break
            self._refs[block] = self._refs.get(block, 0) + 1
            self._cached.pop(block, None)
            blocks.append(block)
        return blocks

    def names(self) -> list[bytes]:
        """Chain hashes of everything cached, in the order in which it was named."""
        return list(self._named)

    def num_matching(self, hashes: Sequence[bytes]) -> int:
        """How many leading hashes are cached here."""
        return next((i for i, name in enumerate(hashes) if name not in self._named), len(hashes))

    def commit(self, named: Iterable[tuple[int, bytes]]) -> None:
        """Names held, completely written blocks. A name that another block has already is left with that one."""
        if not self.cached_limit:
            return
        stored = []
        for block, name in named:
            if self._refs.get(block, 0) > 0 and name not in self._named and block not in self._name:
                self._name[block], self._named[name] = name, block
                stored.append(name)
        if stored:
            self._on_stored(stored)

    def release(self, blocks: Iterable[int]) -> None:
        """Gives back one hold on each block, the tail first, so that it is evicted before the head."""
        for block in reversed(list(blocks)):
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            del self._refs[block]
            if block in self._name:
                self._cached[block] = None
            else:
                self._free.append(block)
        if (excess := len(self._cached) - self.cached_limit) > 0:
            self._evict(excess)

    def clear_cache(self) -> None:
        """Forgets all cached content; held blocks stay held but lose their names."""
        names = list(self._named)
        self._free.extend(self._cached)
        self._cached.clear()
        self._name.clear()
        self._named.clear()
        if names:
            self._on_removed(names)

    def _evict(self, count: int) -> None:
        removed = []
        for _ in range(count):
            block, _none = self._cached.popitem(last=False)
            name = self._name.pop(block)
            del self._named[name]
            removed.append(name)
            self._free.append(block)
        self._on_removed(removed)
