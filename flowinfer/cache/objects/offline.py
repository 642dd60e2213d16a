"""Looks at an object tier without a service, and changes it: for the command line. Services may go on beside it."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

from flowinfer.cache.disk.io import PAGE
from flowinfer.cache.export import Exported, blocks_of, write_block
from flowinfer.cache.objects.aging import Stored
from flowinfer.cache.objects.body import BodyFault, check, pack
from flowinfer.cache.objects.client import Client
from flowinfer.cache.objects.naming import ROOT, Named, parse, whole_seconds
from flowinfer.errors import FlowInferError

_DELETED = 1000  # in one request


def stored(client: Client, *, cls: str | None = None, tenant: str | None = None) -> list[Stored]:
    """All blocks of a class and tenant, those written longest ago first. Raises FlowInferError."""
    try:
        found = [
            Stored(named, listed.size, listed.modified)
            for listed in client.list(ROOT)
            if (named := parse(listed.key)) is not None
        ]
    except OSError as error:
        raise FlowInferError(f"the object store {client.url} can't be listed: {error}.") from error
    chosen = [s for s in found if cls in (None, s.named.cls) and tenant in (None, s.named.tenant)]
    return sorted(chosen, key=lambda one: one.modified)


def verify(client: Client) -> Iterator[tuple[Stored, str]]:
    """Reads every block and yields those that are damaged, with the cause."""
    for one in stored(client):
        if cause := _damage(client, one):
            yield one, cause


def remove(client: Client, *, cls: str | None = None, tenant: str | None = None, damaged: bool = False) -> int:
    """Deletes blocks; services miss them from then on."""
    chosen = [one for one in stored(client, cls=cls, tenant=tenant) if not damaged or _damage(client, one)]
    try:
        for start in range(0, len(chosen), _DELETED):
            client.delete([one.named.key for one in chosen[start : start + _DELETED]])
    except OSError as error:
        raise FlowInferError(f"blocks of {client.url} can't be deleted: {error}.") from error
    return len(chosen)


def export(client: Client, to: Path) -> int:
    """Writes all whole blocks to a tar file, as the disk tier's export."""
    count = 0
    with tarfile.open(to, "w") as tar:
        for one in stored(client):
            try:
                body = client.get(one.named.key)
                record = check(one.named, body)
            except (OSError, BodyFault):
                continue
            named = one.named
            words = (named.namespace, named.cls, named.tenant)
            write_block(tar, Exported(named.name, *words, float(named.keep), record.seal), body[PAGE:])
            count += 1
    return count


def import_(client: Client, source: Path) -> int:
    """Puts the blocks of an export into the store."""
    count = 0
    for block, payload in blocks_of(source):
        named = Named(block.namespace, block.name, block.cls, whole_seconds(block.keep_s), block.tenant)
        try:
            client.put(named.key, pack(named, payload, None, sealed=block.seal))
        except OSError as error:
            raise FlowInferError(f"{count} blocks were written, then {client.url} refused one: {error}.") from error
        count += 1
    return count


def _damage(client: Client, one: Stored) -> str:
    try:
        check(one.named, client.get(one.named.key))
    except (OSError, BodyFault) as fault:
        return str(fault)
    return ""
