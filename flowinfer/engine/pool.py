"""Paged KV blocks: who holds which, which are cached by content, which go first. Knows only ids, never bytes.

A block is free, held (refs > 0), or cached: named by the chain hash of its content and kept until its room is needed.
Which cached block goes first is the eviction's choice. A cached block may be partial (see cache.replay): then only its
entries are what its name says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from flowinfer.cache.policies.eviction import LRU, Eviction

Report = Callable[[list[bytes]], None]


class KVPool:
    """Blocks [first, end) of an arena. cached_limit bounds the unheld cached blocks; 0 turns the prefix cache off.

    on_stored and on_removed are told the chain hashes that entered or left the prefix cache. eviction: LRU if none.
    """

    def __init__(
        self,
        first: int,
        end: int,
        *,
        cached_limit: int,
        on_stored: Report,
        on_removed: Report,
        eviction: Eviction | None = None,
    ) -> None:
        self.first, self.end, self.cached_limit = first, end, cached_limit
        self._free: deque[int] = deque(range(first, end))
        self._refs: dict[int, int] = {}
        self._cached: Eviction = LRU() if eviction is None else eviction  # names of cached blocks that nobody holds
        self._name: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}
        self._partial: set[bytes] = set()  # of those named
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
            if block not in self._refs:
                self._cached.take(name)
            self._refs[block] = self._refs.get(block, 0) + 1
            blocks.append(block)
        return blocks

    def names(self) -> list[bytes]:
        """Chain hashes of everything cached, in the order in which it was named."""
        return list(self._named)

    def num_matching(self, hashes: Sequence[bytes]) -> int:
        """How many leading hashes are cached here."""
        return next((i for i, name in enumerate(hashes) if name not in self._named), len(hashes))

    def is_partial(self, name: bytes) -> bool:
        """Whether only the entries of this cached block are what its name says."""
        return name in self._partial

    def commit(self, named: Iterable[tuple[int, bytes]], *, partial: Collection[bytes] = ()) -> None:
        """Names held, completely written blocks; of those in `partial`, only the entries are.

        A name that another held block has already is left with that one, unless that one is partial and this isn't.
        """
        if not self.cached_limit:
            return
        stored = []
        for block, name in named:
            if block not in self._refs or block in self._name:
                continue
            if name not in self._named:
                stored.append(name)
            elif not self._replace(name, whole=name not in partial):
                continue
            self._name[block], self._named[name] = name, block
            (self._partial.add if name in partial else self._partial.discard)(name)
        if stored:
            self._on_stored(stored)

    def _replace(self, name: bytes, *, whole: bool) -> bool:
        """Frees the cached block of a name that was computed again: its head had gone, or it was partial.

        False where it is to stay: held, or worth more than the new one.
        """
        block, is_partial = self._named[name], name in self._partial
        if block in self._refs:
            if whole and is_partial:
                del self._name[block]  # who holds it goes on with it
            return whole and is_partial
        if not whole and not is_partial:
            return False
        self._cached.take(name)
        del self._name[block]
        self._free.append(block)
        return True

    def hold(self, blocks: Iterable[int]) -> None:
        """One more hold on blocks that are held already; `release` gives it back."""
        for block in blocks:
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Gives back one hold on each block; they follow each other in one sequence, its head first."""
        unheld: list[bytes] = []
        for block in blocks:
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            del self._refs[block]
            if (name := self._name.get(block)) is not None:
                unheld.append(name)
            else:
                self._free.append(block)
        self._cached.put(unheld)
        if (excess := len(self._cached) - self.cached_limit) > 0:
            self._evict(excess)

    def clear_cache(self) -> None:
        """Forgets all cached content; held blocks stay held but lose their names."""
        names = list(self._named)
        self._free.extend(self._named[name] for name in self._cached.clear())
        self._name.clear()
        self._named.clear()
        self._partial.clear()
        if names:
            self._on_removed(names)

    def _evict(self, count: int) -> None:
        removed = []
        for _ in range(count):
            name = self._cached.pop()
            block = self._named.pop(name)
            del self._name[block]
            self._partial.discard(name)
            removed.append(name)
            self._free.append(block)
        self._on_removed(removed)
