"""Makes the index of a store anew from its segments: every record whose header and payload pass their checksums."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from flowinfer.cache.disk.index import DiskIndex, Entry
from flowinfer.cache.disk.io import PAGE
from flowinfer.cache.disk.records import RECORD_MAGIC, Record, checksum, read_record, read_segment


def rebuild(folder: Path, index: DiskIndex) -> int:
    """Enters all blocks found on disk; returns how many. Segments without a valid head are deleted."""
    count = 0
    for path in sorted(folder.glob("*.seg")):
        found = _scan_file(path)
        if found is None:
            path.unlink()
            continue
        key, id, cls, records, size = found
        index.restore_segment(id, key, cls, size)
        newest = max((record.written for record in records), default=0.0)
        index.add([_entry(record, id) for record in records], newest)
        index.set_high_water(newest)
        count += len(records)
    index.set_complete()
    return count


def scan(data: memoryview, key: bytes) -> Iterator[Record]:
    """The whole records of a segment's bytes. Behind damage it goes on page by page until the next header."""
    at = PAGE
    while at + PAGE <= data.nbytes:
        page = data[at : at + PAGE]
        record = read_record(page, key) if page[: len(RECORD_MAGIC)] == RECORD_MAGIC else None
        if record is None or record.offset != at:
            at += PAGE
            continue
        payload = data[at + PAGE : at + PAGE + record.length]
        if payload.nbytes == record.length and checksum(payload) == record.checksum:
            yield record
            at += record.size
        else:
            at += PAGE


def _scan_file(path: Path) -> tuple[bytes, int, str, list[Record], int] | None:
    with path.open("rb") as file:
        size = path.stat().st_size
        if size < PAGE:
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            head = read_segment(data[:PAGE])
            if head is None or f"{head[1]:08d}" != path.stem:
                return None
            records = list(scan(data, head[0]))
    return *head, records, size


def _entry(record: Record, segment: int) -> Entry:
    return Entry(
        record.name,
        record.namespace,
        record.cls,
        record.tenant,
        segment,
        record.offset,
        record.length,
        record.size,
        record.expiry,
        record.keep,
    )
