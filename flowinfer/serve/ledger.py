"""The ledger of open requests: who waits, until when, and which worker holds each. Pure: no sockets, time passed in.

Every entry that is opened is closed exactly once. What comes for an id that isn't open is late, and ignored.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, repeat

from flowinfer.errors import RequestError
from flowinfer.message import Piece

Sink = Callable[[Piece | RequestError], None]


@dataclass(slots=True)
class Entry:
    """One open request. Times are seconds of the clock.

    holders: (worker, generation) of those that could go on with it; two while it moves from one to the other.
    """

    id: str
    sink: Sink
    opened: float
    deadline: float
    group: tuple[str, ...]
    first_at: float = 0.0
    last_at: float = 0.0
    tokens: int = 0
    holders: tuple[tuple[str, int], ...] = ()
    hops: int = 0

    def come_to(self, hops: int) -> bool:
        """Notes how often it has changed workers; False where it has come further."""
        if hops < self.hops:
            return False
        self.hops = hops
        return True


class Ledger:
    """Open requests by id, with their deadlines in order."""

    def __init__(self) -> None:
        self._open: dict[str, Entry] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._dead: dict[str, int] = {}  # last generation of each worker that died
        self.num_started = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, id: str) -> bool:
        return id in self._open

    def open(self, entry: Entry) -> None:
        """Raises RequestError 400 when the id is open already."""
        if entry.id in self._open:
            raise RequestError(400, f"A request with id {entry.id!r} is open already.", code="duplicate_id")
        self._open[entry.id] = entry
        heapq.heappush(self._deadlines, (entry.deadline, entry.id))

    def find(self, id: str) -> Entry | None:
        return self._open.get(id)

    def start(self, entry: Entry, now: float) -> None:
        """Notes the first token of a request."""
        entry.first_at = now
        self.num_started += 1

    def close(self, id: str) -> Entry | None:
        """Takes the entry out; None if it isn't open, so that nothing ends twice."""
        entry = self._open.pop(id, None)
        if entry is not None and entry.first_at:
            self.num_started -= 1
        return entry

    def move(
        self, ids: Iterable[str], worker: str, generation: int, *, shared: bool = False, hops: Iterable[int] = ()
    ) -> list[str]:
        """These requests are held by this worker now; shared: and still by who held them.

        hops: of each; what is said of fewer hops than are known already comes late, and counts for nothing.
        Returns those that nobody holds, since that worker is dead meanwhile.
        """
        found = [(self._open.get(id), number) for id, number in zip(ids, chain(hops, repeat(0)), strict=False)]
        entries = [entry for entry, number in found if entry is not None and entry.come_to(number)]
        for entry in entries:
            others = tuple(holder for holder in entry.holders if holder[0] != worker) if shared else ()
            entry.holders = (*others, (worker, generation))
        dead = self._dead.get(worker, 0)
        return [entry.id for entry in entries if _loses(entry, worker, dead)] if generation <= dead else []

    def lost(self, worker: str, generation: int) -> list[str]:
        """Open requests that nobody holds any more now that this generation of a worker is dead."""
        self._dead[worker] = max(generation, self._dead.get(worker, 0))
        return [entry.id for entry in self._open.values() if _loses(entry, worker, generation)]

    def expired(self, now: float) -> list[str]:
        """Open requests whose deadline has passed; each is named once."""
        late = []
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][1] not in self._open):
            _, id = heapq.heappop(self._deadlines)
            entry = self._open.get(id)
            if entry is not None and entry.deadline <= now:
                late.append(id)
        return list(dict.fromkeys(late))  # an id that was closed and opened again has two deadlines here

    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def ids(self) -> list[str]:
        return list(self._open)


def _loses(entry: Entry, worker: str, generation: int) -> bool:
    """Takes a dead worker, and the generations before it, out of the holders; True if that was the last of them."""
    left = tuple(holder for holder in entry.holders if holder[0] != worker or holder[1] > generation)
    if left == entry.holders:
        return False
    entry.holders = left
    return not left
