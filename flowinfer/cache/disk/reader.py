"""Reads blocks into given memory and believes nothing that it hasn't checked. A failure is a miss with a cause."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowinfer.cache.disk.index import DiskIndex, Entry
from flowinfer.cache.disk.io import PAGE, Arena, Buffer, Files, ShortTransfer, is_aligned, within
from flowinfer.cache.disk.records import Record, checksum, read_record
from flowinfer.cache.disk.segments import Readers
from flowinfer.cache.sealing import TAG_BYTES, Seal, Sealer


class ReadFault(Exception):
    """Why a block couldn't be read: `cause` is one of gone, io, short, header, length, checksum, key."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail = cause, detail


class BlockReader:
    """Reads by index entry. Thread-safe. With a sealer, blocks must be encrypted under its key; else not at all."""

    def __init__(
        self, files: Files, arena: Arena, folder: Path, index: DiskIndex, sealer: Sealer | None = None
    ) -> None:
        self._files, self._arena, self._index, self._sealer = files, arena, index, sealer
        self.readers = Readers(files, folder)
        self._keys: dict[int, bytes] = {}

    def read(self, entry: Entry, target: Buffer) -> None:
        """Fills `target` with the payload. Raises ReadFault, after which target holds anything."""
        plain = target.nbytes == entry.length and self._sealer is None
        with self._reading(entry) as (fd, page, room):
            if plain:
                self._fill(fd, page, room, entry, target)
                stored = target
            else:
                whole = within(room, entry.length)
                self._files.read(fd, [page, whole], entry.offset)
                stored = whole[: entry.length]
            record = self._record(entry, page)
            if self._sealer is not None or record.seal is not None:
                self._open(record, stored, target)
            elif not plain:
                raise ReadFault("length", f"{entry.length} bytes on disk, {target.nbytes} wanted")
            elif checksum(target) != record.checksum:
                raise ReadFault("checksum", "the payload's xxh3 differs")

    def read_stored(self, entry: Entry, target: Buffer) -> Seal | None:
        """Fills `target`, of entry.length, with the payload as it is stored; returns how it is encrypted."""
        with self._reading(entry) as (fd, page, room):
            self._fill(fd, page, room, entry, target)
            record = self._record(entry, page)
            if checksum(target) != record.checksum:
                raise ReadFault("checksum", "the payload's xxh3 differs")
            return record.seal

    @contextmanager
    def _reading(self, entry: Entry) -> Iterator[tuple[int, Buffer, Buffer]]:
        try:
            with self.readers.open(entry.segment) as fd, self._arena.slot() as (page, room):
                yield fd, page, room
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
        bounce = within(room, entry.length)
        self._files.read(fd, [page, bounce], entry.offset)
        target[:] = bounce[: entry.length]

    def _open(self, record: Record, stored: Buffer, target: Buffer) -> None:
        """Decrypts; GCM's tag vouches for the bytes, better than xxh3."""
        if self._sealer is None or record.seal is None or record.seal.key_id != self._sealer.key_id:
            raise ReadFault("key", "it isn't encrypted" if record.seal is None else "it has another key than ours")
        if target.nbytes + TAG_BYTES != stored.nbytes:
            raise ReadFault("length", f"{stored.nbytes - TAG_BYTES} bytes on disk, {target.nbytes} wanted")
        if not self._sealer.open(stored, target, record.seal, name=record.name, namespace=record.namespace):
            raise ReadFault("checksum", "the payload isn't what was encrypted")

    def _record(self, entry: Entry, page: Buffer) -> Record:
        record = read_record(page[:PAGE], self._key(entry.segment))
        if record is None:
            raise ReadFault("header", "not a record of this segment")
        found = (record.name, record.namespace, record.offset, record.length)
        if found != (entry.name, entry.namespace, entry.offset, entry.length):
            raise ReadFault("header", "another block lies there")
        return record

    def _key(self, segment: int) -> bytes:
        key = self._keys.get(segment)
        if key is None:
            key = self._index.key_of(segment)
            if key is None:
                raise ReadFault("gone", "its segment was dropped")
            self._keys[segment] = key
        return key
