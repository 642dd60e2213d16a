"""Reads blocks into given memory and believes nothing that it hasn't checked. A failure is a miss with a cause."""

from __future__ import annotations

import mmap
from pathlib import Path

from flowinfer.cache.disk.index import DiskIndex, Entry
from flowinfer.cache.disk.io import PAGE, Arena, Buffer, Files, ShortTransfer, is_aligned, padded
from flowinfer.cache.disk.records import checksum, read_record
from flowinfer.cache.disk.segments import Readers


class ReadFault(Exception):
    """Why a block couldn't be read: `cause` is one of gone, io, short, header, length, checksum."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail = cause, detail


class BlockReader:
    """Reads by index entry. Thread-safe."""

    def __init__(self, files: Files, arena: Arena, folder: Path, index: DiskIndex) -> None:
        self._files, self._arena, self._index = files, arena, index
        self.readers = Readers(files, folder)
        self._keys: dict[int, bytes] = {}

    def read(self, entry: Entry, target: Buffer) -> None:
        """Fills `target` with the payload. Raises ReadFault, after which target holds anything."""
        if target.nbytes != entry.length:
            raise ReadFault("length", f"{entry.length} bytes on disk, {target.nbytes} wanted")
        try:
            with self.readers.open(entry.segment) as fd, self._arena.slot() as (page, room):
                self._fill(fd, page, room, entry, target)
                self._check(entry, page, target)
        except FileNotFoundError as error:
            raise ReadFault("gone", str(error)) from error
        except ShortTransfer as error:
            raise ReadFault("short", str(error)) from error
        except OSError as error:
            raise ReadFault("io", str(error)) from error

    def _fill(self, fd: int, page: Buffer, room: Buffer, entry: Entry, target: Buffer) -> None:
        if not self._files.direct or is_aligned(target):
            self._files.read(fd, [page, target], entry.offset)
            return
        size = padded(entry.length)
        bounce = room[:size] if size <= room.nbytes else memoryview(mmap.mmap(-1, size))
        self._files.read(fd, [page, bounce], entry.offset)
        target[:] = bounce[: entry.length]

    def _check(self, entry: Entry, page: Buffer, target: Buffer) -> None:
        record = read_record(page[:PAGE], self._key(entry.segment))
        if record is None:
            raise ReadFault("header", "not a record of this segment")
        found = (record.name, record.namespace, record.offset, record.length)
        if found != (entry.name, entry.namespace, entry.offset, entry.length):
            raise ReadFault("header", "another block lies there")
        if checksum(target) != record.checksum:
            raise ReadFault("checksum", "the payload's xxh3 differs")

    def _key(self, segment: int) -> bytes:
        key = self._keys.get(segment)
        if key is None:
            key = self._index.key_of(segment)
            if key is None:
                raise ReadFault("gone", "its segment was dropped")
            self._keys[segment] = key
        return key
