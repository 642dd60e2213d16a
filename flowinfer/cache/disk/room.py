"""Frees room on the device: what has expired, what exceeds a limit, then whole segments, their best copied forward."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flowinfer.cache.disk.index import DiskIndex, Entry, SegmentRow
from flowinfer.cache.disk.reader import BlockReader, ReadFault
from flowinfer.cache.disk.retention import choose_victim, fair_share
from flowinfer.cache.disk.segments import seal_dead, segment_path
from flowinfer.cache.sealing import Seal

Copy = Callable[[Entry, memoryview, Seal | None], bool]
Removed = Callable[[Sequence[bytes], str], None]  # names, cause


@dataclass(frozen=True)
class Limits:
    """Bytes on disk in all, by class, and of any one tenant; None: no limit of its own."""

    total: int
    classes: Mapping[str, int] = field(default_factory=dict)
    tenant: int | None = None


class Janitor:
    """One per process; a file lock keeps those of a service from working at the same time."""

    def __init__(
        self, folder: Path, index: DiskIndex, reader: BlockReader, limits: Limits, copy: Copy, removed: Removed
    ) -> None:
        self._folder, self._index, self._reader = folder, index, reader
        self._limits, self._copy, self._removed = limits, copy, removed

    def sweep(self, now: float) -> None:
        """Forgets what has expired, deletes segments that hold nothing, and compacts one that holds little."""
        self._index.set_high_water(now)
        self._forget(self._index.expire(now), "expired")
        self._enforce_limits()
        with self._alone():
            sparse = [row for row in self._sealed() if self._drop_if_empty(row) and row.live <= row.size // 2]
            if sparse:
                self._retire(sparse[0], [held.name for held in self._index.candidate(sparse[0]).blocks])
        self._reader.readers.forget(keep={row.id for row in self._index.segments()})

    def make_room(self, size: int, now: float) -> None:
        """Deletes segments until `size` more bytes fit the total limit, or nothing is left to delete."""
        if self._index.allocated() + size <= self._limits.total:
            return
        self._forget(self._index.expire(now), "expired")
        with self._alone():
            kept = [row for row in self._sealed() if self._drop_if_empty(row)]
            while kept and self._index.allocated() + size > self._limits.total:
                kept = self._evict_one(kept)
        self._reader.readers.forget(keep={row.id for row in self._index.segments()})

    def recover(self) -> None:
        """Seals what dead processes were writing, and deletes files that the index doesn't know."""
        with self._alone():
            rows = self._index.segments()
            for row in rows:
                if not row.sealed:
                    self._seal(row)
            known = {segment_path(self._folder, row.id) for row in self._index.segments()}
            for path in set(self._folder.glob("*.seg")) - known:
                path.unlink(missing_ok=True)

    def _seal(self, row: SegmentRow) -> None:
        size = seal_dead(self._folder, row.id, self._index.end_of(row.id))
        if size == 0:
            self._forget(self._index.drop_segment(row.id), "gone")
        elif size is not None:
            self._index.seal(row.id, size)

    def _sealed(self) -> list[SegmentRow]:
        return [row for row in self._index.segments() if row.sealed]

    def _drop_if_empty(self, row: SegmentRow) -> bool:
        """True where the segment still holds something."""
        if row.live > 0:
            return True
        self._index.drop_segment(row.id)
        segment_path(self._folder, row.id).unlink(missing_ok=True)
        return False

    def _evict_one(self, rows: list[SegmentRow]) -> list[SegmentRow]:
        by_tenant: dict[str, int] = defaultdict(int)
        for usage in self._index.usage():
            by_tenant[usage.tenant] += usage.bytes
        victim, keep = choose_victim([self._index.candidate(row) for row in rows], by_tenant)
        self._retire(next(row for row in rows if row.id == victim), keep)
        return [row for row in rows if row.id != victim]

    def _retire(self, row: SegmentRow, keep: Sequence[bytes]) -> None:
        """Copies what is worth it to an open segment, forgets the rest, deletes the file."""
        wanted = set(keep)
        for entry in [e for e in self._index.matching(cls=row.cls) if e.segment == row.id and e.name in wanted]:
            self._copy_forward(entry)
        self._forget(self._index.drop_segment(row.id), "evicted")
        segment_path(self._folder, row.id).unlink(missing_ok=True)

    def _copy_forward(self, entry: Entry) -> None:
        payload = memoryview(mmap.mmap(-1, max(1, entry.length)))[: entry.length]
        try:
            sealed = self._reader.read_stored(entry, payload)
        except ReadFault:
            return  # it goes with its segment
        self._copy(entry, payload, sealed)

    def _enforce_limits(self) -> None:
        """Evicts what was used longest ago, of the largest tenants, until classes and tenants keep their limits."""
        for cls, limit in self._limits.classes.items():
            self._shrink(cls, limit)
        if self._limits.tenant is None:
            return
        by_tenant: dict[str, int] = defaultdict(int)
        for usage in self._index.usage():
            by_tenant[usage.tenant] += usage.bytes
        for tenant, size in by_tenant.items():
            if tenant and size > self._limits.tenant:
                self._evict(self._index.matching(tenant=tenant), size - self._limits.tenant)

    def _shrink(self, cls: str, limit: int) -> None:
        by_tenant = {usage.tenant: usage.bytes for usage in self._index.usage() if usage.cls == cls}
        if sum(by_tenant.values()) <= limit:
            return
        share = fair_share(by_tenant, limit)
        for tenant, size in by_tenant.items():
            if size > share:
                self._evict(self._index.matching(cls=cls, tenant=tenant), size - share)

    def _evict(self, entries: Iterator[Entry], excess: int) -> None:
        names = []
        for entry in entries:
            if excess <= 0:
                break
            names.append(entry.name)
            excess -= entry.size
        self._forget(self._index.remove(names), "evicted")

    def _forget(self, names: Sequence[bytes], cause: str) -> None:
        if names:
            self._removed(names, cause)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with alone(self._folder):
            yield


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time: for what would otherwise be done twice."""
    fd = os.open(folder / "janitor", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
