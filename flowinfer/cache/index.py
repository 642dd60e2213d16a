"""Remembers which owner holds which cached block, as far as block events told. Holds no KV and decides no restore.

An owner is a name: a worker instance ("prefill.0") or a tier ("disk"). What the index says is a hint: a block may be
gone by the time that somebody reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

Owners = tuple[str, ...]


class BlockIndex:
    """Owners by block name (chain hash) and blocks by owner. All updates may be repeated or name unknown blocks.

    far: owners that are slower than all others, as a disk: named for a block only where nobody else holds it.
    """

    def __init__(self, far: Collection[str] = ()) -> None:
        self.far = frozenset(far)
        self._owners: dict[bytes, Owners] = {}  # in the order in which they stored it
        self._blocks: dict[str, set[bytes]] = {}
        self._interned: dict[Owners, Owners] = {}  # a million blocks share a handful of owner tuples
        self._near: dict[Owners, Owners] = {}  # those of a tuple that aren't far

    def copy(self) -> BlockIndex:
        """The same knowledge, to be changed on its own."""
        twin = BlockIndex(self.far)
        twin._owners, twin._interned = dict(self._owners), dict(self._interned)
        twin._blocks = {owner: set(names) for owner, names in self._blocks.items()}
        return twin

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, name: bytes) -> bool:
        return name in self._owners

    def num_blocks(self, owner: str) -> int:
        """Blocks that this owner holds."""
        return len(self._blocks.get(owner, ()))

    def owners(self, name: bytes) -> Owners:
        """Who holds this block, longest holder first."""
        return self._owners.get(name, ())

    def stored(self, owner: str, names: Iterable[bytes]) -> None:
        """`owner` holds these blocks from now on."""
        blocks = self._blocks.setdefault(owner, set())
        for name in names:
            if name not in blocks:
                blocks.add(name)
                self._set(name, (*self._owners.get(name, ()), owner))

    def removed(self, owner: str, names: Iterable[bytes]) -> None:
        """`owner` holds these blocks no more."""
        blocks = self._blocks.get(owner, set())
        for name in names:
            if name in blocks:
                blocks.remove(name)
                self._set(name, tuple(other for other in self._owners[name] if other != owner))
        if not blocks:
            self._blocks.pop(owner, None)

    def cleared(self, owner: str) -> None:
        """`owner` holds nothing any more: it emptied its cache, or it died."""
        self.removed(owner, tuple(self._blocks.get(owner, ())))

    def num_leading(self, names: Sequence[bytes]) -> int:
        """How many leading blocks somebody holds."""
        return next((i for i, name in enumerate(names) if name not in self._owners), len(names))

    def longest_prefix(self, names: Sequence[bytes]) -> list[str]:
        """One owner for each leading block that somebody holds, with as few changes of owner as can be.

        Staying with an owner as long as it goes and then taking the one that goes furthest is optimal, as in covering
        a line by intervals. Ties go to the owner that has held the run's first block for longest.
        """
        prefix: list[str] = []
        run: Owners = ()  # owners that hold every block since the last change
        length = 0
        for name in names:
            holders = self._owners.get(name)
            if holders is None:
                break
            holders = self._nearest(holders)
            still = run if holders is run else tuple(owner for owner in run if owner in holders)
            if not still:
                prefix += run[:1] * length
                still, length = holders, 0
            run, length = still, length + 1
        return prefix + list(run[:1]) * length

    def _nearest(self, owners: Owners) -> Owners:
        """Those that aren't far, where there are any."""
        if not self.far:
            return owners
        near = self._near.get(owners)
        if near is None:
            near = self._near[owners] = tuple(owner for owner in owners if owner not in self.far) or owners
        return near

    def _set(self, name: bytes, owners: Owners) -> None:
        if owners:
            self._owners[name] = self._interned.setdefault(owners, owners)
        else:
            del self._owners[name]
