"""The bytes of an object: a record header as on disk (cache.disk.records), then the payload, encrypted or not."""

from __future__ import annotations

from flowinfer.cache.disk.io import PAGE, Buffer
from flowinfer.cache.disk.records import Record, checksum, read_record
from flowinfer.cache.objects.naming import Named
from flowinfer.cache.sealing import TAG_BYTES, Seal, Sealer

_NO_SEGMENT = bytes(16)


class BodyFault(Exception):
    """Why an object isn't what its name says: `cause` is one of header, length, checksum, key."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail = cause, detail


def pack(named: Named, payload: Buffer, sealer: Sealer | None, *, sealed: Seal | None = None) -> bytearray:
    """The object of a block. sealed: how the payload is encrypted already."""
    seals = sealer is not None and sealed is None
    body = bytearray(PAGE + payload.nbytes + (TAG_BYTES if seals else 0))
    with memoryview(body) as whole:
        stored = whole[PAGE:]
        if sealer is not None and seals:
            sealed = sealer.seal(payload, stored, name=named.name, namespace=named.namespace)
        else:
            stored[:] = payload
        words = (named.namespace, named.cls, named.tenant)
        record = Record(
            named.name, *words, 0.0, 0.0, 0, stored.nbytes, checksum(stored), keep=float(named.keep), seal=sealed
        )
        record.pack_into(whole[:PAGE], _NO_SEGMENT)
        stored.release()
    return body


def unpack(named: Named, body: Buffer, target: Buffer, sealer: Sealer | None) -> None:
    """Fills `target` with the block. Raises BodyFault, after which target holds anything."""
    record, stored = check_header(named, body)
    if sealer is None and record.seal is None:
        if target.nbytes != stored.nbytes:
            raise BodyFault("length", f"{stored.nbytes} bytes stored, {target.nbytes} wanted")
        if checksum(stored) != record.checksum:
            raise BodyFault("checksum", "the payload's xxh3 differs")
        target[:] = stored
        return
    if sealer is None or record.seal is None or record.seal.key_id != sealer.key_id:
        raise BodyFault("key", "it isn't encrypted" if record.seal is None else "it has another key than ours")
    if target.nbytes + TAG_BYTES != stored.nbytes:
        raise BodyFault("length", f"{stored.nbytes - TAG_BYTES} bytes stored, {target.nbytes} wanted")
    if not sealer.open(stored, target, record.seal, name=named.name, namespace=named.namespace):
        raise BodyFault("checksum", "the payload isn't what was encrypted")


def check_header(named: Named, body: Buffer) -> tuple[Record, Buffer]:
    """(the header, the payload as it is stored). Raises BodyFault."""
    record = read_record(body[:PAGE], _NO_SEGMENT) if body.nbytes >= PAGE else None
    if record is None:
        raise BodyFault("header", "not a block of ours")
    if (record.name, record.namespace) != (named.name, named.namespace):
        raise BodyFault("header", "another block lies there")
    stored = body[PAGE:]
    if stored.nbytes != record.length:
        raise BodyFault("length", f"{stored.nbytes} bytes there, {record.length} were stored")
    return record, stored


def check(named: Named, body: Buffer) -> Record:
    """The header of a whole object, encrypted or not. Raises BodyFault."""
    record, stored = check_header(named, body)
    if checksum(stored) != record.checksum:
        raise BodyFault("checksum", "the payload's xxh3 differs")
    return record
