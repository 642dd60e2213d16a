"""File operations of the disk tier: O_DIRECT where the filesystem has it, aligned memory, no partial transfers.

`Files` is the seam that tests put failing devices behind. Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

PAGE = 4096  # O_DIRECT asks for multiples of the device's block: 512 or 4,096 everywhere we know
Buffer = memoryview


class ShortTransfer(OSError):
    """The file ended before all bytes were there, or the device took fewer than it was given."""


def padded(length: int) -> int:
    """The next multiple of PAGE."""
    return -(-length // PAGE) * PAGE


def is_aligned(buffer: Buffer) -> bool:
    """Whether O_DIRECT can use this memory as it is."""
    address = np.frombuffer(buffer, np.uint8).ctypes.data if buffer.nbytes else 0
    return address % PAGE == 0 and buffer.nbytes % PAGE == 0


def within(room: Buffer, size: int) -> Buffer:
    """Whole pages for `size` bytes: in `room` where they fit, else new ones."""
    size = padded(size)
    return room[:size] if size <= room.nbytes else memoryview(mmap.mmap(-1, size))


class Files:
    """What the store asks of a filesystem. All errors are OSErrors; transfers are complete or raise ShortTransfer."""

    direct = True

    def probe(self, folder: Path) -> bool:
        """Whether this folder's filesystem takes O_DIRECT; remembered in `direct`."""
        path = folder / f".probe-{os.getpid()}"
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o600))
            self.direct = hasattr(os, "O_DIRECT")
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.direct = False
        finally:
            path.unlink(missing_ok=True)
        return self.direct

    def free(self, folder: Path) -> int:
        """Bytes that this user could still write there."""
        stats = os.statvfs(folder)
        return stats.f_bavail * stats.f_frsize

    def create(self, path: Path, size: int) -> int:
        """A new file of `size` bytes whose room on the device is taken."""
        fd = os.open(path, self._flags(os.O_RDWR | os.O_CREAT | os.O_EXCL), 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return fd

    def open(self, path: Path, *, write: bool = False) -> int:
        """An existing file."""
        return os.open(path, self._flags(os.O_RDWR if write else os.O_RDONLY))

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """Fills all buffers from `offset` on."""
        self._transfer(os.preadv, fd, list(buffers), offset)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """Writes all buffers at `offset`."""
        self._transfer(os.pwritev, fd, list(buffers), offset)

    def sync(self, fd: int) -> None:
        """Returns once what was written is on the device."""
        os.fdatasync(fd)

    def sync_folder(self, folder: Path) -> None:
        """Makes names of new files durable."""
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _flags(self, flags: int) -> int:
        return flags | os.O_CLOEXEC | (getattr(os, "O_DIRECT", 0) if self.direct else 0)

    def _transfer(self, call: object, fd: int, buffers: list[Buffer], offset: int) -> None:
        while buffers:
            done = call(fd, buffers, offset)  # type: ignore[operator]
            if done <= 0:
                raise ShortTransfer(errno.EIO, f"short transfer at byte {offset}")
            offset += done
            while buffers and done >= buffers[0].nbytes:
                done -= buffers.pop(0).nbytes
            if done:
                if self.direct and done % PAGE:
                    raise ShortTransfer(errno.EIO, f"short transfer at byte {offset}")
                buffers[0] = buffers[0][done:]


class Arena:
    """Page-aligned memory in equal slots: a header page and room for a payload that isn't aligned itself."""

    def __init__(self, slots: int, payload_bytes: int = 4 << 20) -> None:
        self.payload_bytes = padded(payload_bytes)
        self._memory = mmap.mmap(-1, slots * (PAGE + self.payload_bytes))
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(slots):
            self._free.put(slot)

    @contextmanager
    def slot(self) -> Iterator[tuple[Buffer, Buffer]]:
        """(header page, payload room), waiting for one of the slots."""
        slot = self._free.get()
        start = slot * (PAGE + self.payload_bytes)
        whole = memoryview(self._memory)[start : start + PAGE + self.payload_bytes]
        try:
            yield whole[:PAGE], whole[PAGE:]
        finally:
            whole.release()
            self._free.put(slot)
