"""The disk tier's store: put, get, contains. Ties index, writer, reader and janitor together; decides nothing."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from flowinfer.cache.disk.index import FILE, DiskIndex, Entry, Use
from flowinfer.cache.disk.io import PAGE, Arena, Buffer, Files
from flowinfer.cache.disk.lock import StoreLock
from flowinfer.cache.disk.reader import BlockReader, ReadFault
from flowinfer.cache.disk.rebuild import rebuild
from flowinfer.cache.disk.records import MAX_WORD
from flowinfer.cache.disk.retention import Retention, SteadyClock, expiry_group
from flowinfer.cache.disk.room import Janitor, Limits, alone
from flowinfer.cache.disk.writer import Placing, Writer
from flowinfer.cache.replay import leading
from flowinfer.cache.sealing import Seal, Sealer
from flowinfer.errors import FlowInferError
from flowinfer.units import format_bytes

log = logging.getLogger(__name__)
UNLIMITED = 1 << 60
MIN_SEGMENTS = 16  # a store has room for so many, however small it is: else one eviction empties half of it


@dataclass(frozen=True)
class StoreSettings:
    """size: bytes on disk.  segment: bytes of a segment, at most a sixteenth of size.  spare: bytes of the device that
    stay free, however large size is.  backlog: bytes that may wait to be written; what exceeds them is dropped.
    alone: no other process may use the store meanwhile.  key: encrypts blocks."""

    path: Path
    size: int
    segment: int = 1 << 30
    retention: Retention = field(default_factory=Retention)
    class_limits: Mapping[str, int] = field(default_factory=dict)
    tenant_limit: int | None = None
    threads: int = 4
    backlog: int = 256 << 20
    sweep_s: float = 5.0
    spare: int = 0
    alone: bool = False
    key: bytes | None = None

    @property
    def segment_bytes(self) -> int:
        """Bytes of a segment: whole pages. 0 where the store has no room for sixteen of the least ones."""
        size = min(self.segment, self.size // MIN_SEGMENTS) // PAGE * PAGE
        return size if size >= 4 * PAGE else 0


class DiskStore:
    """Blocks on disk under 16-byte names. Thread-safe, and safe to open in several processes and services.

    Services that share a store each hold all of it to their own limits: the tightest count.

    removed(names, cause) is told of what left the store through this process, fault(cause) of all that went wrong; any
    thread may call them. Raises FlowInferError from the
    constructor where the path can't be used; no other method raises for what a device does.
    """

    def __init__(
        self,
        settings: StoreSettings,
        *,
        files: Files | None = None,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        removed: Callable[[Sequence[bytes], str], None] = lambda names, cause: None,
        fault: Callable[[str], None] = lambda cause: None,
    ) -> None:
        self.settings, self._files = settings, files or Files()
        self.counts: Counter[str] = Counter()
        self._wall, self._monotonic, self._told, self._told_fault = wall, monotonic, removed, fault
        folder = self._prepare(settings.path)
        self._closed = False
        self._lock = StoreLock(folder, alone=settings.alone)
        try:
            self._open(folder)
        except BaseException:
            self._lock.close()
            raise

    def _prepare(self, path: Path) -> Path:
        folder = path.expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._files.probe(folder)
        except OSError as error:
            raise FlowInferError(f"the disk cache can't use {folder}: {error.strerror}.") from error
        return folder

    def _open(self, folder: Path) -> None:
        self.index = open_index(folder)
        settings = self.settings = self._fitting(self.settings, folder)
        sealer = Sealer(settings.key) if settings.key is not None else None
        self._clock = SteadyClock(self.index.high_water(), self._wall(), self._monotonic())
        self._arena = Arena(2 * settings.threads)
        self._pool = ThreadPoolExecutor(settings.threads, thread_name_prefix="disk-io")
        self._reader = BlockReader(self._files, self._arena, folder, self.index, sealer)
        # One segment is set aside for what is copied forward.
        limits = Limits(settings.size - settings.segment_bytes, settings.class_limits, settings.tenant_limit)
        self._janitor = Janitor(folder, self.index, self._reader, limits, self._copy_forward, self._removed)
        self._janitor.recover()
        self.index.set_high_water(self.now())
        self._swept = self._monotonic()
        self._renewals: dict[bytes, Use] = {}
        self._writer = Writer(
            self._files,
            self._arena,
            folder,
            self.index,
            self._pool,
            segment_bytes=settings.segment_bytes,
            backlog_bytes=settings.backlog,
            make_room=lambda size: self._janitor.make_room(size, self.now()),
            tick=self._tick,
            now=self.now,
            tick_s=min(1.0, settings.sweep_s),
            count=self._count,
            sealer=sealer,
        )

    def _fitting(self, settings: StoreSettings, folder: Path) -> StoreSettings:
        """The settings with no more size than the device has room for."""
        room = self.index.allocated() + self._files.free(folder) - settings.spare
        if settings.size <= room or settings.size >= UNLIMITED:
            return settings
        room = max(0, room) // 2**20 * 2**20
        log.warning(
            "disk cache %s: %s instead of %s, so that %s of the device stay free",
            *(folder, format_bytes(room), format_bytes(settings.size), format_bytes(settings.spare)),
        )
        return replace(settings, size=room)

    def now(self) -> float:
        """Cache time: see SteadyClock."""
        return self._clock.now(self._wall(), self._monotonic())

    def put(
        self,
        blocks: Sequence[tuple[bytes, Buffer]],
        *,
        namespace: str,
        cls: str,
        tenant: str = "",
        keep_s: float | None = None,
        sealed: Seal | None = None,
    ) -> Future[list[bytes]]:
        """Stores blocks behind the caller's back; the future has the names that are durable now.

        keep_s: how long they stay after their last use, instead of the class's retention; 0 stores nothing. Blocks
        that are there already are renewed instead. The memory must not change until the future is done. sealed: how
        they are encrypted already.
        """
        for word in (namespace, cls, tenant):
            assert len(word.encode()) <= MAX_WORD, f"{word!r} is too long for a record"
        keep = self.settings.retention.of(cls) if keep_s is None else keep_s
        known = self._find([name for name, _ in blocks], namespace)
        now = self.now()
        if keep > 0:
            self._renewals.update(dict.fromkeys(known, Use(now, keep)))
        fresh = [(name, payload) for name, payload in blocks if name not in known and keep > 0]
        group = expiry_group(now + keep, keep)
        return self._writer.put(fresh, Placing(namespace, cls, tenant, now, now + keep, keep, group), sealed=sealed)

    def contains(self, names: Sequence[bytes], namespace: str) -> int:
        """How many of the leading blocks are there."""
        return leading(self.present(names, namespace))

    def present(self, names: Sequence[bytes], namespace: str) -> list[bool]:
        """Which of the blocks are there."""
        known = self._find(names, namespace)
        return [name in known for name in names]

    def get(self, names: Sequence[bytes], targets: Sequence[Buffer], namespace: str) -> list[bool]:
        """Reads blocks into memory of their size, some at a time; says for each whether it is there and whole.

        What can't be read, or isn't what it should be, is logged, counted and forgotten.
        """
        known = self._find(names, namespace)
        reads = [
            self._pool.submit(self._get_one, known[name], target) if name in known else None
            for name, target in zip(names, targets, strict=True)
        ]
        found = [read is not None and read.result() for read in reads]
        now = self.now()
        self._renewals.update((name, Use(now)) for name, there in zip(names, found, strict=True) if there)
        self.counts["hits"] += sum(found)
        self.counts["misses"] += len(names) - len(known)
        return found

    def remove(self, names: Sequence[bytes]) -> int:
        """Forgets blocks; their room is freed later. Returns how many were there."""
        removed = self.index.remove(names)
        self._removed(removed, "removed")
        return len(removed)

    def names(self, namespace: str) -> list[bytes]:
        """All blocks of a namespace."""
        try:
            return self.index.names(namespace, self.now())
        except OSError as error:
            self._fault("read_index", str(error))
            return []

    def close(self) -> None:
        """Writes what is pending and lets go of the path; closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        self._pool.shutdown()
        self._renew()
        self._reader.readers.forget()
        self.index.close()
        self._lock.close()

    def sweep(self) -> None:
        """Renews, expires and compacts; the commit thread does so by itself every sweep_s."""
        self._renew()
        with self._writer.lock:
            self._janitor.sweep(self.now())

    # ------------------------------------------------------------------------------------------------------- private

    def _find(self, names: Sequence[bytes], namespace: str) -> dict[bytes, Entry]:
        try:
            return self.index.find(names, namespace, self.now())
        except OSError as error:
            self._fault("read_index", str(error))
            return {}

    def _get_one(self, entry: Entry, target: Buffer) -> bool:
        try:
            self._reader.read(entry, target)
        except ReadFault as fault:
            self._fault(f"read_{fault.cause}", f"block {entry.name.hex()} in segment {entry.segment}: {fault.detail}")
            self._drop(entry)
            return False
        return True

    def _drop(self, entry: Entry) -> None:
        try:
            self._removed(self.index.remove([entry.name], segment=entry.segment), "damaged")
        except OSError as error:
            self._fault("read_index", str(error))

    def _copy_forward(self, entry: Entry, payload: memoryview, sealed: Seal | None) -> bool:
        group = expiry_group(entry.expiry, entry.keep)
        placing = Placing(entry.namespace, entry.cls, entry.tenant, self.now(), entry.expiry, entry.keep, group)
        copied = self._writer.append_now(entry.name, payload, placing, sealed)
        self._count("copied_forward", copied)
        return copied

    def _tick(self) -> None:
        if self._monotonic() - self._swept < self.settings.sweep_s:
            return
        self._swept = self._monotonic()
        try:
            self.sweep()
        except OSError as error:
            self._fault("sweep", str(error))

    def _renew(self) -> None:
        hits, self._renewals = self._renewals, {}
        if hits:
            self.index.renew(hits)

    def _removed(self, names: Sequence[bytes], cause: str) -> None:
        self._count(f"removed_{cause}", len(names))
        self._told(names, cause)

    def _fault(self, cause: str, detail: str) -> None:
        self._count(cause, 1)
        log.warning("disk cache %s: %s", cause, detail)

    def _count(self, what: str, number: int) -> None:
        self.counts[what] += number
        if what.startswith(("read_", "write_", "dropped_", "sweep")):
            self._told_fault(what)


def open_index(folder: Path) -> DiskIndex:
    """The store's index; made anew from the segments where it is missing, damaged, or of another version."""
    with alone(folder):
        return _open_index(folder)


def _open_index(folder: Path) -> DiskIndex:
    try:
        index = DiskIndex(folder)
    except sqlite3.DatabaseError as error:
        log.warning("disk cache %s: the index is damaged (%s) and is made anew", folder, error)
        for name in (FILE, f"{FILE}-wal", f"{FILE}-shm"):
            (folder / name).unlink(missing_ok=True)
        index = DiskIndex(folder)
    if not index.complete:
        found = rebuild(folder, index)
        log.info("disk cache %s: %d blocks found", folder, found)
    return index
