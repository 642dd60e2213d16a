"""Appends blocks to segments behind the caller's back and makes them visible once they are durable, many at a time.

Order is all: payload and header, fdatasync, then the index. A crash leaves at worst bytes that nothing points to.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flowinfer.cache.disk.index import DiskIndex, Entry
from flowinfer.cache.disk.io import Arena, Buffer, Files, is_aligned, within
from flowinfer.cache.disk.records import NOT_SEALED, Record, checksum, record_size
from flowinfer.cache.disk.segments import OpenSegment, create_segment, segment_path
from flowinfer.cache.sealing import TAG_BYTES, Seal, Sealer

log = logging.getLogger(__name__)
MAX_OPEN = 4  # segments that a process writes to: each takes its whole size on the device until it is sealed
GROUP_BYTES = 128 << 20  # what one fdatasync covers at most, so that no block waits long for those behind it
PAUSE_S = 30.0  # after a full or broken device, writes are dropped for so long
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Placing:
    """What all blocks of one put share. group: as in retention.expiry_group."""

    namespace: str
    cls: str
    tenant: str
    written: float
    expiry: float
    keep: float
    group: int


Written = tuple[OpenSegment, Entry | None]  # None where the device refused the record
Block = tuple[bytes, Buffer]  # name and payload
AS_IS = NOT_SEALED  # of a block that isn't encrypted and shall stay so


@dataclass
class _Batch:
    records: list[Future[Written]] = field(default_factory=list)
    size: int = 0
    done: Future[list[bytes]] = field(default_factory=Future)


class Writer:
    """One per process. `make_room(bytes)` is called before a segment of that size is made. `tick` runs now and then."""

    def __init__(
        self,
        files: Files,
        arena: Arena,
        folder: Path,
        index: DiskIndex,
        pool: ThreadPoolExecutor,
        *,
        segment_bytes: int,
        backlog_bytes: int,
        make_room: Callable[[int], None],
        tick: Callable[[], None],
        now: Callable[[], float],
        tick_s: float,
        count: Callable[[str, int], None],
        sealer: Sealer | None = None,
    ) -> None:
        self._sealer = sealer
        self._files, self._arena, self._folder, self._index, self._pool = files, arena, folder, index, pool
        self._segment_bytes, self._backlog_bytes = segment_bytes, backlog_bytes
        self._make_room, self._count, self._now = make_room, count, now
        self.lock = threading.RLock()
        self._open: dict[tuple[str, int], OpenSegment] = {}  # by class and group, last used last
        self._spare: OpenSegment | None = None  # made ahead, since making one takes as long as writing 150 MB
        self._spare_cls: str | None = None  # whose it is, or should be
        self._pending_bytes = 0
        self._paused_until = 0.0
        self._closed = False
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._tick, self._tick_s = tick, tick_s
        self._thread = threading.Thread(target=self._commit_all, name="disk-commit", daemon=True)
        self._thread.start()

    def put(self, blocks: Sequence[Block], placing: Placing, *, sealed: Seal | None = None) -> Future[list[bytes]]:
        """Names that were stored, once they are durable. The memory must not change until then. Never raises OSError.

        sealed: how the blocks are encrypted already. What exceeds the backlog, or comes while the device is full, is
        dropped and counted.
        """
        batch = _Batch()
        for name, payload in blocks:
            with self.lock:
                if self._closed:
                    self._count("dropped_closed", 1)
                    continue
                place = self._reserve(self._stored_bytes(payload, sealed), placing)
                if place is None:
                    continue
                self._pending_bytes += payload.nbytes
            batch.size += payload.nbytes
            batch.records.append(self._pool.submit(self.write, place, name, payload, placing, sealed))
        with self.lock:
            if self._closed:  # nobody takes batches any more: who waits for this one must not wait for ever
                batch.done.set_result([])
            else:
                self._batches.put(batch)
        return batch.done

    def write(
        self, place: tuple[OpenSegment, int], name: bytes, payload: Buffer, placing: Placing, sealed: Seal | None
    ) -> Written:
        """Writes one record at its reserved place."""
        segment, offset = place
        words = (placing.namespace, placing.cls, placing.tenant)
        try:
            with self._arena.slot() as (page, room):
                stored, whole, seal = self._stored(name, payload, placing.namespace, room, sealed)
                times, sum_ = (placing.written, placing.expiry), checksum(stored)
                record = Record(name, *words, *times, offset, stored.nbytes, sum_, placing.keep, seal)
                record.pack_into(page, segment.key)
                self._files.write(segment.fd, [page, whole], offset)
        except OSError as error:
            self._give_up(segment, error)
            return segment, None
        at = (segment.id, offset, record.length, record.size)
        return segment, Entry(name, *words, *at, placing.expiry, placing.keep)

    def append_now(self, name: bytes, payload: Buffer, placing: Placing, sealed: Seal | None) -> bool:
        """Writes one record, which is as it was stored, and waits until it is durable and visible.

        For copying forward, with the lock held.
        """
        place = self._reserve(payload.nbytes, placing, may_make_room=False)
        return place is not None and bool(self._commit([self.write(place, name, payload, placing, sealed or AS_IS)]))

    def close(self) -> None:
        """Stores what is pending, then seals the open segments. What is put from now on is dropped and counted."""
        with self.lock:
            self._closed = True
            self._batches.put(None)
        self._thread.join()
        with self.lock:
            for key in list(self._open):
                self._seal(key)
            self._drop_spare()

    # ----------------------------------------------------------------------------------------------------- reserving

    def _reserve(self, length: int, placing: Placing, *, may_make_room: bool = True) -> tuple[OpenSegment, int] | None:
        size = record_size(length)
        if cause := self._refusal(length, size):
            self._count(f"dropped_{cause}", 1)
            return None
        key = (placing.cls, placing.group)
        segment = self._open.pop(key, None)
        offset = segment.reserve(size) if segment else None
        if segment is not None:
            self._open[key] = segment
            if self._spare_cls is None and segment.end > segment.size // 2:
                self._spare_cls = placing.cls
        if offset is None:
            segment = self._next_segment(key, may_make_room)
            offset = segment.reserve(size) if segment else None
        return (segment, offset) if segment is not None and offset is not None else None

    def _refusal(self, length: int, size: int) -> str:
        if size + record_size(0) > self._segment_bytes:
            return "too_large"
        if time.monotonic() < self._paused_until:
            return "paused"
        return "backlog" if self._pending_bytes + length > self._backlog_bytes else ""

    def _next_segment(self, key: tuple[str, int], may_make_room: bool) -> OpenSegment | None:
        if key in self._open:
            self._seal(key)
        idle = [k for k, segment in self._open.items() if not segment.pending]
        if len(self._open) >= MAX_OPEN and idle:
            self._seal(idle[0])
        try:
            spare = self._take_spare(key[0])
            if spare is None and may_make_room:
                self._make_room(self._segment_bytes)
            self._open[key] = spare or self._create(key[0])
        except OSError as error:
            self._give_up(None, error)
            return None
        return self._open[key]

    def _take_spare(self, cls: str) -> OpenSegment | None:
        if self._spare is None or self._spare_cls != cls:
            return None
        spare, self._spare, self._spare_cls = self._spare, None, None
        return spare

    def _make_spare(self) -> None:
        """Makes a segment ahead, if one is wanted; writers go on meanwhile."""
        cls = self._spare_cls
        if cls is None or self._spare is not None:
            return
        try:
            with self.lock:
                self._make_room(self._segment_bytes)
            made = self._create(cls)
        except OSError:
            self._spare_cls = None  # who needs one will find out why there is none
            return
        with self.lock:
            self._spare = made
            if self._closed:
                self._drop_spare()

    def _drop_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare.fd)
            segment_path(self._folder, self._spare.id).unlink(missing_ok=True)
            self._index.drop_segment(self._spare.id)
            self._spare = None

    def _create(self, cls: str) -> OpenSegment:
        secret = secrets.token_bytes(16)
        id = self._index.new_segment(secret, cls, self._segment_bytes)
        try:
            return create_segment(self._files, self._arena, self._folder, id, secret, cls, self._segment_bytes)
        except OSError:
            self._index.drop_segment(id)
            raise

    def _seal(self, key: tuple[str, int]) -> None:
        """Takes a segment out of use; with records in flight its last commit closes it."""
        segment = self._open.pop(key)
        segment.broken = True
        if not segment.pending:
            self._close(segment)

    def _close(self, segment: OpenSegment) -> None:
        end = max(self._index.end_of(segment.id), record_size(0))
        os.ftruncate(segment.fd, end)
        self._index.seal(segment.id, end)
        os.close(segment.fd)

    def _give_up(self, segment: OpenSegment | None, error: OSError) -> None:
        """The device is full or broken: nothing is written for a while, and the service goes on."""
        cause = "full" if error.errno in _FULL else "io"
        with self.lock:
            if segment is not None:
                segment.broken = True
            if time.monotonic() >= self._paused_until:
                log.warning("disk cache %s: no writes for %.0f s: %s", self._folder, PAUSE_S, error)
            self._paused_until = time.monotonic() + PAUSE_S
        self._count(f"write_{cause}", 1)

    def _stored_bytes(self, payload: Buffer, sealed: Seal | None) -> int:
        return payload.nbytes + (TAG_BYTES if self._sealer is not None and sealed is None else 0)

    def _stored(
        self, name: bytes, payload: Buffer, namespace: str, room: Buffer, sealed: Seal | None
    ) -> tuple[Buffer, Buffer, Seal | None]:
        """(the bytes of the record, the same as O_DIRECT takes them, how they are encrypted)."""
        if sealed is None and self._sealer is not None:
            whole = within(room, payload.nbytes + TAG_BYTES)
            stored = whole[: payload.nbytes + TAG_BYTES]
            return stored, whole, self._sealer.seal(payload, stored, name=name, namespace=namespace)
        seal = None if sealed is AS_IS else sealed
        if not self._files.direct or is_aligned(payload):
            return payload, payload, seal
        whole = within(room, payload.nbytes)
        whole[: payload.nbytes] = payload
        return payload, whole, seal

    # ---------------------------------------------------------------------------------------------------- committing

    def _commit_all(self) -> None:
        while True:
            batches, more = self._next_group()
            stored: set[bytes] = set()
            with self._survived("blocks weren't stored"):
                stored = self._commit([done for batch in batches for done in self._outcomes(batch)])
            with self.lock:
                self._pending_bytes -= sum(batch.size for batch in batches)
            for batch in batches:
                names = [entry.name for _, entry in self._outcomes(batch) if entry and entry.name in stored]
                batch.done.set_result(names)
            if not more:
                return
            with self._survived("housekeeping failed"):
                self._make_spare()
                self._tick()

    @staticmethod
    def _outcomes(batch: _Batch) -> list[Written]:
        """What became of the records, once all were written or failed."""
        return [future.result() for future in batch.records if future.exception() is None]

    @contextmanager
    def _survived(self, what: str) -> Iterator[None]:
        """A bug must not end the thread that everybody who puts blocks waits for."""
        try:
            yield
        except Exception:
            log.exception("disk cache %s: %s", self._folder, what)
            self._count("write_error", 1)

    def _next_group(self) -> tuple[list[_Batch], bool]:
        """The batches that one fdatasync shall cover; False once there will be no more."""
        batches: list[_Batch] = []
        try:
            while sum(batch.size for batch in batches) < GROUP_BYTES:
                batch = self._batches.get(timeout=0 if batches else self._tick_s)
                if batch is None:
                    return batches, False
                batches.append(batch)
        except queue.Empty:
            pass
        return batches, True

    def _commit(self, written: Sequence[Written]) -> set[bytes]:
        """Syncs the segments and enters the blocks; returns the names that are durable now."""
        segments = {segment.id: segment for segment, entry in written if entry is not None}
        synced = {id for id, segment in segments.items() if self._sync(segment)}
        entries = [entry for _, entry in written if entry is not None and entry.segment in synced]
        stored = self._enter(entries)
        with self.lock:
            for segment, _ in written:
                segment.pending -= 1
                if segment.broken and not segment.pending and segment not in self._open.values():
                    self._close(segment)
        return stored

    def _enter(self, entries: Sequence[Entry]) -> set[bytes]:
        try:
            if entries:
                self._index.add(entries, self._now())
        except OSError as error:
            self._give_up(None, error)
            return set()
        self._count("stored", len(entries))
        return {entry.name for entry in entries}

    def _sync(self, segment: OpenSegment) -> bool:
        try:
            self._files.sync(segment.fd)
        except OSError as error:
            self._give_up(segment, error)  # never retried: after a failed fsync the kernel forgets the dirty pages
            return False
        return True
