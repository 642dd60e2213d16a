"""Segment files: preallocated, written from front to end, cut to what was written when sealed. Decides nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowinfer.cache.disk.io import PAGE, Arena, Files
from flowinfer.cache.disk.records import pack_segment

_MAX_OPEN = 64  # files that stay open for reading


def segment_path(folder: Path, id: int) -> Path:
    """The file of a segment."""
    return folder / f"{id:08d}.seg"


@dataclass(eq=False)
class OpenSegment:
    """The segment that one process appends to. Its file is locked: a segment that is not belongs to the dead."""

    id: int
    key: bytes
    fd: int
    size: int
    end: int = PAGE
    pending: int = 0  # records reserved but not committed yet
    broken: bool = False

    def reserve(self, size: int) -> int | None:
        """Where a record of `size` bytes may be written, or None where it doesn't fit."""
        if self.broken or self.end + size > self.size:
            return None
        offset, self.end = self.end, self.end + size
        self.pending += 1
        return offset


def create_segment(files: Files, arena: Arena, folder: Path, id: int, key: bytes, cls: str, size: int) -> OpenSegment:
    """A new segment, durable with its name. Raises OSError, having left no file."""
    path = segment_path(folder, id)
    fd = files.create(path, size)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with arena.slot() as (page, _):
            pack_segment(page, key, id, size, cls)
            files.write(fd, [page], 0)
        files.sync(fd)
        files.sync_folder(folder)
    except OSError:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
    return OpenSegment(id, key, fd, size)


def seal_dead(folder: Path, id: int, end: int) -> int | None:
    """Cuts a segment that its writer left behind to `end` bytes; None where the writer still lives.

    Returns the size that it has now, 0 where there is no file.
    """
    try:
        fd = os.open(segment_path(folder, id), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = min(max(end, PAGE), os.fstat(fd).st_size)
        os.ftruncate(fd, size)
        return size
    except BlockingIOError:
        return None
    finally:
        os.close(fd)


class Readers:
    """Descriptors of segments that are read, a few kept open. Thread-safe."""

    def __init__(self, files: Files, folder: Path) -> None:
        self._files, self._folder = files, folder
        self._lock = threading.Lock()
        self._fds: OrderedDict[int, _Shared] = OrderedDict()

    @contextlib.contextmanager
    def open(self, id: int) -> Iterator[int]:
        """The descriptor of a segment, for the time of the block."""
        shared = self._acquire(id)
        try:
            yield shared.fd
        finally:
            self._release(shared)

    def forget(self, keep: set[int] | None = None) -> None:
        """Closes files of segments that are gone: while one is open its room isn't free."""
        with self._lock:
            for id in [id for id in self._fds if keep is None or id not in keep]:
                self._drop(self._fds.pop(id))

    def _acquire(self, id: int) -> _Shared:
        with self._lock:
            shared = self._fds.get(id)
            if shared is None:
                shared = self._fds[id] = _Shared(self._files.open(segment_path(self._folder, id)))
            self._fds.move_to_end(id)
            shared.users += 1
            if len(self._fds) > _MAX_OPEN:
                self._drop(self._fds.popitem(last=False)[1])
            return shared

    def _release(self, shared: _Shared) -> None:
        with self._lock:
            shared.users -= 1
            if shared.doomed and not shared.users:
                os.close(shared.fd)

    @staticmethod
    def _drop(shared: _Shared) -> None:
        shared.doomed = True
        if not shared.users:
            os.close(shared.fd)


@dataclass
class _Shared:
    fd: int
    users: int = 0
    doomed: bool = False
