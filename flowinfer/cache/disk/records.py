"""Layout of the bytes on disk: a page of header before each payload, and one at the head of each segment.

Every field is under a checksum, the payload under one of its own (xxh3: 60 GB/s here, zlib.crc32 5.9). A record names
the segment that it belongs to by 16 random bytes, so that no payload can pose as a record when a segment is scanned.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from flowinfer.cache.disk.io import PAGE, Buffer, padded
from flowinfer.cache.sealing import Seal

VERSION = 2
RECORD_MAGIC = b"FIKVREC\x02"
SEGMENT_MAGIC = b"FIKVSEG\x02"
NOT_SEALED = Seal(bytes(8), bytes(12))
MAX_WORD = 32  # bytes of a class, tenant or namespace

# magic, version, unused, segment key, name, namespace, class, tenant, written, expiry, keep, offset, length, payload's
# xxh3, id of the encryption key (zeros: none), nonce
_RECORD = struct.Struct("<8sHxxxxxx16s16s32s32s32sdddQQQ8s12s")
_SEGMENT = struct.Struct("<8sHxxxxxx16sQQ32s")  # magic, version, key, id, size, class
_SUM = struct.Struct("<Q")


@dataclass(frozen=True)
class Record:
    """A block on disk. offset: of its header in the segment.  length: bytes of payload.  Times in cache time.

    keep: seconds that it stays after a use.  checksum: xxh3 of the payload as it is stored, encrypted or not.
    """

    name: bytes
    namespace: str
    cls: str
    tenant: str
    written: float
    expiry: float
    offset: int
    length: int
    checksum: int
    keep: float = 0.0
    seal: Seal | None = None

    @property
    def size(self) -> int:
        """Bytes that it takes in the segment."""
        return record_size(self.length)

    def pack_into(self, page: Buffer, segment_key: bytes) -> None:
        """Writes the header into a page."""
        words = (self.namespace.encode(), self.cls.encode(), self.tenant.encode())
        packed = _RECORD.pack(
            RECORD_MAGIC, VERSION, segment_key, self.name, *words,
            self.written, self.expiry, self.keep, self.offset, self.length, self.checksum, *(self.seal or NOT_SEALED),
        )  # fmt: skip
        _fill(page, packed)


def record_size(length: int) -> int:
    """Bytes that a payload of `length` bytes takes in a segment."""
    return PAGE + padded(length)


def checksum(payload: Buffer | bytes) -> int:
    """xxh3 of a payload."""
    import xxhash  # here: an engine that is only measured has no disk, and no need of it

    return xxhash.xxh3_64_intdigest(payload)


def read_record(page: Buffer, segment_key: bytes) -> Record | None:
    """The record whose header this page is; None where it isn't one of this segment, or is damaged."""
    packed = _checked(page, _RECORD.size)
    if packed is None:
        return None
    magic, version, key, name, *fields = _RECORD.unpack(packed)
    if (magic, version, key) != (RECORD_MAGIC, VERSION, segment_key):
        return None
    namespace, cls, tenant = (_text(word) for word in fields[:3])
    written, expiry, keep, offset, length, total, key_id, nonce = fields[3:]
    seal = Seal(key_id, nonce) if (key_id, nonce) != NOT_SEALED else None
    return Record(name, namespace, cls, tenant, written, expiry, offset, length, total, keep, seal)


def pack_segment(page: Buffer, key: bytes, id: int, size: int, cls: str) -> None:
    """Writes the first page of a segment."""
    _fill(page, _SEGMENT.pack(SEGMENT_MAGIC, VERSION, key, id, size, cls.encode()))


def read_segment(page: Buffer) -> tuple[bytes, int, str] | None:
    """(key, id, class) of the segment that this page opens; None where it isn't one, or is damaged."""
    packed = _checked(page, _SEGMENT.size)
    if packed is None:
        return None
    magic, version, key, id, _size, cls = _SEGMENT.unpack(packed)
    return (key, id, _text(cls)) if (magic, version) == (SEGMENT_MAGIC, VERSION) else None


def _fill(page: Buffer, packed: bytes) -> None:
    whole = packed + _SUM.pack(checksum(packed))
    page[:] = whole.ljust(PAGE, b"\0")


def _checked(page: Buffer, size: int) -> bytes | None:
    packed = bytes(page[:size])
    (total,) = _SUM.unpack(page[size : size + _SUM.size])
    return packed if total == checksum(packed) else None


def _text(word: bytes) -> str:
    return word.rstrip(b"\0").decode(errors="replace")
