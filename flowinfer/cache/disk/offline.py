"""Looks at a store without a service, and changes it only while no service has it: for the command line."""

from __future__ import annotations

import mmap
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flowinfer.cache.disk.index import FILE, DiskIndex, Entry, Usage
from flowinfer.cache.disk.io import Arena, Files
from flowinfer.cache.disk.reader import BlockReader, ReadFault
from flowinfer.cache.disk.segments import segment_path
from flowinfer.cache.disk.store import UNLIMITED, DiskStore, StoreSettings
from flowinfer.cache.disk.writer import AS_IS
from flowinfer.cache.export import Exported, blocks_of, write_block
from flowinfer.errors import FlowInferError


@dataclass(frozen=True)
class Summary:
    """What a store holds. allocated: bytes of its files.  live: bytes of blocks that are still wanted."""

    usage: list[Usage]
    segments: int
    allocated: int
    live: int


def summary(folder: Path) -> Summary:
    """Sums by class and tenant; works beside a running service."""
    with _reading(folder) as index:
        segments = index.segments()
        return Summary(index.usage(), len(segments), sum(s.size for s in segments), sum(s.live for s in segments))


def entries(folder: Path, *, cls: str | None = None, tenant: str | None = None) -> list[Entry]:
    """All blocks of a class and tenant, those used longest ago first; works beside a running service."""
    with _reading(folder) as index:
        return list(index.matching(cls=cls, tenant=tenant))


def verify(folder: Path) -> Iterator[tuple[Entry, str]]:
    """Reads every block and yields those that are damaged, with the cause; works beside a running service."""
    with _reading(folder) as index:
        reader = _reader(folder, index)
        for entry in index.matching():
            if cause := _damage(reader, entry):
                yield entry, cause


def remove(folder: Path, *, cls: str | None = None, tenant: str | None = None, damaged: bool = False) -> int:
    """Deletes blocks, and wipes their headers, so that no index made anew finds them. Raises while a service runs."""
    with _changing(folder) as store:
        index = store.index
        reader = _reader(folder, index)
        chosen = [e for e in index.matching(cls=cls, tenant=tenant) if not damaged or _damage(reader, e)]
        for entry in chosen:
            _wipe(folder, entry)
        removed = store.remove([entry.name for entry in chosen])
        store.sweep()
        return removed


def export(folder: Path, to: Path) -> int:
    """Writes all blocks that pass their checksums to a tar file; works beside a running service."""
    count = 0
    with _reading(folder) as index, tarfile.open(to, "w") as tar:
        reader = _reader(folder, index)
        for entry in index.matching():
            payload = memoryview(mmap.mmap(-1, max(1, entry.length)))[: entry.length]
            try:
                seal = reader.read_stored(entry, payload)
            except ReadFault:
                continue
            block = Exported(entry.name, entry.namespace, entry.cls, entry.tenant, entry.keep, seal)
            write_block(tar, block, payload)
            count += 1
    return count


def import_(folder: Path, source: Path, *, size: int) -> int:
    """Puts the blocks of an export into a store of `size` bytes. Raises while a service runs."""
    count = 0
    with _changing(folder, size=size) as store:
        for block, payload in blocks_of(source):
            how = {"namespace": block.namespace, "cls": block.cls, "tenant": block.tenant}
            stored = store.put([(block.name, payload)], keep_s=block.keep_s, sealed=block.seal or AS_IS, **how)
            count += len(stored.result())
    return count


def _damage(reader: BlockReader, entry: Entry) -> str:
    target = memoryview(mmap.mmap(-1, max(1, entry.length)))[: entry.length]
    try:
        reader.read_stored(entry, target)
    except ReadFault as fault:
        return f"{fault.cause}: {fault.detail}"
    return ""


def _wipe(folder: Path, entry: Entry) -> None:
    with segment_path(folder, entry.segment).open("r+b") as file:
        file.seek(entry.offset)
        file.write(bytes(4096))


def _reader(folder: Path, index: DiskIndex) -> BlockReader:
    files = Files()
    files.direct = False
    return BlockReader(files, Arena(1), folder, index)


@contextmanager
def _reading(folder: Path) -> Iterator[DiskIndex]:
    if not (folder / FILE).exists():
        raise FlowInferError(f"there is no disk cache in {folder}.", help="Name its folder by --path.")
    try:
        index = DiskIndex(folder, read_only=True)
    except sqlite3.Error as error:
        raise FlowInferError(f"the index of the disk cache in {folder} can't be read: {error}.") from error
    try:
        yield index
    finally:
        index.close()


@contextmanager
def _changing(folder: Path, *, size: int | None = None) -> Iterator[DiskStore]:
    """Opens the store as a service would, but alone. Nothing is evicted to make room but by `size`."""
    if not (folder / FILE).exists() and size is None:
        raise FlowInferError(f"there is no disk cache in {folder}.", help="Name its folder by --path.")
    store = DiskStore(StoreSettings(path=folder, size=size or UNLIMITED, alone=True))
    try:
        yield store
    finally:
        store.close()
