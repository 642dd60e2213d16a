"""The file that `flowinfer cache export` writes: a tar of blocks as they are stored, encrypted ones too."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import msgspec

from flowinfer.cache.sealing import Seal
from flowinfer.errors import FlowInferError


class Exported(msgspec.Struct, frozen=True):
    """A block in an export, beside its payload as it is stored: an encrypted one stays so.

    keep_s: how long it stays after a use, which the import is.
    """

    name: bytes
    namespace: str
    cls: str
    tenant: str
    keep_s: float
    seal: Seal | None = None


def write_block(tar: tarfile.TarFile, block: Exported, payload: bytes | memoryview) -> None:
    """Appends a block."""
    _add(tar, f"{block.name.hex()}.json", msgspec.json.encode(block))
    _add(tar, f"{block.name.hex()}.kv", bytes(payload))


def blocks_of(source: Path) -> Iterator[tuple[Exported, memoryview]]:
    """All blocks of an export with their payloads. Raises FlowInferError where it isn't one."""
    try:
        with tarfile.open(source) as tar:
            while (head := tar.next()) is not None and (body := tar.next()) is not None:
                block = msgspec.json.decode(_bytes(tar, head), type=Exported)
                yield block, memoryview(bytearray(_bytes(tar, body)))
    except (tarfile.TarError, msgspec.DecodeError, OSError) as error:
        raise FlowInferError(f"{source} isn't an export of a cache: {str(error).splitlines()[0]}.") from error


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, BytesIO(data))


def _bytes(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    if file is None:
        raise FlowInferError(f"{tar.name!s} isn't an export of a cache.")
    return file.read()
