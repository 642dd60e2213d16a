"""The KV that one request holds in this worker: its blocks, whose they are, and how far they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowinfer.engine.pool import KVPool
from flowinfer.message import Event, Ids, KVFetch, KVPin, KVRelease, KVUnpin, LeaseQuery, WorkerDown, WorkerUp

# What other workers ask of an engine; every stage that has one listens to these and passes them on.
KV_EVENTS: tuple[type[Event], ...] = (KVRelease, KVPin, KVUnpin, KVFetch, WorkerDown, WorkerUp, LeaseQuery)
_NOTHING = range(0)


@dataclass
class HeldKV:
    """blocks: arena ids in order of position. num_computed: leading tokens whose KV is written.

    The first num_leased blocks belong to the worker `owner`, which frees them on our KVRelease; the rest are our own.
    lessee: the worker that we lent all of it to, if any; until it answers nothing here may be freed.
    names: chain hashes of the leading full blocks, as far as known; num_committed of them are in the prefix cache.
    caching: whether the graph has a prefix cache at all (the prompt came with a hint).
    history: tokens of a sequence that is lent while it runs, to name its blocks when it's gone.

    partial: numbers of blocks whose state (see cache.replay) isn't what their names say.
    replay: positions that are run again for their state alone: their entries are there, and no window key before them
    is read.
    While a prompt is admitted: num_found leading blocks have their entries in place; `spare` are blocks of ours, by
    number, that can take the place of cached ones among them.
    """

    id: str
    blocks: list[int]
    num_computed: int = 0
    cached_tokens: int = 0
    owner: str | None = None
    num_leased: int = 0
    lessee: str | None = None
    names: list[bytes] = field(default_factory=list)
    num_committed: int = 0
    caching: bool = False
    salt: str = ""
    history: Ids | None = None
    partial: set[int] = field(default_factory=set)
    replay: range = _NOTHING
    num_found: int = 0
    spare: dict[int, int] = field(default_factory=dict)

    def own_block(self, number: int) -> int:
        """The block of ours that can be written for block `number` of the sequence, while it is admitted."""
        return self.spare.get(number, self.blocks[number])

    @property
    def own_blocks(self) -> list[int]:
        """Those that this worker's pool must take back."""
        return [*self.blocks[self.num_leased :], *self.spare.values()]


def grow_all(held: Sequence[HeldKV], counts: Sequence[int], pool: KVPool) -> list[int] | None:
    """counts[i] more blocks for each: all of them, in turn. None, and nothing changed, where the pool has too few."""
    fresh = pool.allocate(sum(counts))
    if fresh is None:
        return None
    at = 0
    for one, count in zip(held, counts, strict=True):
        one.blocks += fresh[at : at + count]
        at += count
    return fresh


@dataclass(frozen=True)
class Run:
    """Tokens to run through the model for one sequence: `tokens` lie at positions start, start + 1, ..."""

    held: HeldKV
    tokens: Ids
    start: int
