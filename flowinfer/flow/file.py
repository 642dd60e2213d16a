"""The format of a recording (`.flow`): a header, then messages in order, each with its time and edge. Runs nothing.

MAGIC, then parts of [length: u32][bytes]. The first part is the header, as JSON; each further one is msgpack of
[seconds since the start, edge, frames of the codec]. A file that was cut off is read up to its last whole part.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, get_args

import msgspec

from flowinfer.codec import Codec, CodecError, schema_of
from flowinfer.codec import Header as FrameHeader
from flowinfer.errors import FlowInferError
from flowinfer.message import Message

MAGIC = b"FLOW1\n"
EVENTS = ""  # the edge of control events
_LENGTH = struct.Struct("<I")


class Header(msgspec.Struct, kw_only=True):
    """What was recorded. digest: of the plan; types: schema digest of each message type; skipped: edges left out.

    fields: of each message type and of the structs inside, so that a type that has grown since can still be read.
    """

    file: str
    overlays: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    digest: str
    types: dict[str, str]
    edges: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    wall: float = 0.0
    fields: dict[str, tuple[str, ...]] = {}


class Record(msgspec.Struct):
    """One message: seconds since the start, and the edge that it was put on (EVENTS for control)."""

    at: float
    edge: str
    message: Message


class Writer:
    """Writes a recording; each message is in the file as soon as `add` returns, but for what the system buffers."""

    def __init__(self, path: Path, header: Header) -> None:
        self._file: BinaryIO = path.open("wb")
        self._codec = Codec()
        self._file.write(MAGIC)
        self._part(msgspec.json.encode(header))

    def add(self, at: float, edge: str, message: Message) -> None:
        """Appends a message as it is now; who changes it later doesn't change the recording."""
        header = FrameHeader(type(message).__name__, "record", 1, edge=edge)
        frames = [bytes(frame) for frame in self._codec.encode(header, [message])]
        self._part(msgspec.msgpack.encode((at, edge, frames)))

    def _part(self, data: bytes) -> None:
        self._file.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        self._file.close()


class Recording(msgspec.Struct):
    """A file that was read. cut_off: it ends in the middle of a message, which is left out."""

    header: Header
    records: list[Record]
    cut_off: bool


def read_header(path: Path) -> Header:
    """The header of a recording. Raises FlowInferError for what isn't one or is damaged."""
    return _read(path)[0]


def read(path: Path, edges: Collection[str] | None = None) -> Recording:
    """Reads a recording: all of it, or what was recorded on these edges and the control events.

    Raises FlowInferError for what isn't a recording, is damaged, or holds messages of another version.
    """
    header, parts, cut_off = _read(path)
    wanted = None if edges is None else {EVENTS, *edges}
    return Recording(header, list(_records(parts, header, path, wanted)), cut_off)


def _read(path: Path) -> tuple[Header, list[bytes], bool]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FlowInferError(f"{path} can't be read: {error}.") from error
    parts, cut_off = _parts(data) if data.startswith(MAGIC) else ([], True)
    if not parts:
        raise FlowInferError(f"{path} is no recording.", help="`flowinfer record FILE -o x.flow` makes one.")
    try:
        return msgspec.json.decode(parts[0], type=Header), parts[1:], cut_off
    except msgspec.MsgspecError as error:
        raise FlowInferError(f"{path} is damaged: its header can't be read ({error}).") from error


def _parts(data: bytes) -> tuple[list[bytes], bool]:
    found: list[bytes] = []
    at = len(MAGIC)
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            return found, True
        found.append(data[at : at + length])
        at += length
    return found, at != len(data)


def _has_only_grown(cls: type[Message], recorded: dict[str, tuple[str, ...]]) -> bool:
    now = fields_of(cls)
    for name, fields in now.items():
        before = recorded.get(name)
        if before is None and name == cls.__name__:
            return False
        if before is not None and (
            tuple(fields)[: len(before)] != before or not all(list(fields.values())[len(before) :])
        ):
            return False
    return True


def fields_of(cls: type[Message]) -> dict[str, dict[str, bool]]:
    """Names of the fields of a message type and of the structs inside it, each with whether it has a default."""
    found: dict[str, dict[str, bool]] = {}
    _walk(cls, found)
    return found


def _walk(kind: Any, found: dict[str, dict[str, bool]]) -> None:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__name__ not in found:
        fields = msgspec.structs.fields(kind)
        found[kind.__name__] = {field.encode_name: not field.required for field in fields}
        for field in fields:
            _walk(field.type, found)
    for inner in get_args(kind):
        _walk(inner, found)


class _OldCodec(Codec):
    """Reads messages whose types may have grown: fields behind those that were recorded, with defaults."""

    def __init__(self, header: Header, path: Path) -> None:
        super().__init__()
        self._header, self._path = header, path
        self._known: dict[str, bool] = {}

    def _is_known(self, cls: type[Message], header: FrameHeader) -> bool:
        name = cls.__name__
        if name not in self._known:
            same = header.schema == schema_of(cls)
            self._known[name] = same or _has_only_grown(cls, self._header.fields)
        if not self._known[name]:
            message = f"{self._path} holds messages of type {name} as another version of FlowInfer has them."
            raise OtherVersion(message, help="Record it again, or replay it with the version that recorded it.")
        return True


class OtherVersion(FlowInferError):
    """A recording whose messages can't be read by this version."""


def _records(parts: Sequence[bytes], header: Header, path: Path, edges: Collection[str] | None) -> Iterator[Record]:
    codec = _OldCodec(header, path)
    for number, part in enumerate(parts, start=1):
        try:
            at, edge, frames = msgspec.msgpack.decode(part, type=tuple[float, str, list[bytes]])
            if edges is not None and edge not in edges:
                continue
            _, (message,) = codec.decode(frames)
        except OtherVersion:
            raise
        except (msgspec.MsgspecError, CodecError, ValueError, IndexError) as error:
            raise FlowInferError(f"{path} is damaged: message {number} can't be read ({error}).") from error
        yield Record(at, edge, message)
