"""The ledger of open requests: who waits, until when, and which worker holds each. Pure: no sockets, time passed in.

Every entry that is opened is closed exactly once. What comes for an id that isn't open is late, and ignored.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flowinfer.errors import RequestError
from flowinfer.message import Piece

Sink = Callable[[Piece | RequestError], None]


@dataclass(slots=True)
class Entry:
    """One open request. Times are seconds of the clock; holder is (worker, generation) once a worker has said so."""

    id: str
    sink: Sink
    opened: float
    deadline: float
    group: tuple[str, ...]
    first_at: float = 0.0
    last_at: float = 0.0
    tokens: int = 0
    holder: tuple[str, int] = ("", 0)


class Ledger:
    """Open requests by id, with their deadlines in order."""

    def __init__(self) -> None:
        self._open: dict[str, Entry] = {}
        self._deadlines: list[tuple[float, str]] = []
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

    def move(self, ids: Iterable[str], worker: str, generation: int) -> None:
        for id in ids:
            if entry := self._open.get(id):
                entry.holder = (worker, generation)

    def held_by(self, worker: str, generation: int) -> list[str]:
        """Open requests whose last known holder is this worker, of this generation or one before it."""
        return [e.id for e in self._open.values() if e.holder[0] == worker and e.holder[1] <= generation]

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
