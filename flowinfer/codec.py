"""Turns messages into frames and back: msgpack for structure, arrays as buffers beside it, no pickle. Knows no sockets.

Frame 0 is [format: u8][flags: u8][header length: u16][header][body]; header and body are msgpack, the body a
list of messages of one type. Arrays under 16 KiB stand inside the body, larger ones in frames of their own, which
aren't copied on receipt.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowinfer import message as messages_module
from flowinfer.errors import TransportError
from flowinfer.message import Message, type_registry

FORMAT = 1
INLINE_BYTES = 16_384  # a frame of its own costs 2 us; copying 16 KiB costs about as much
_INLINE, _BESIDE, _IDS = 1, 2, 3  # msgpack extension types; _IDS: a row of int32 and nothing else, the common case
_CACHED = 4_096  # headers remembered; a service has a few hundred
_PREFIX = struct.Struct("<BBH")
_LENGTH = struct.Struct("<H")
_SHAPES = tuple(struct.Struct(f"<BB{ndim}Q") for ndim in range(9))
_INDEX = struct.Struct("<I")
_DTYPES = tuple(
    np.dtype(c) for c in ("<i4", "<i8", "<f4", "<f8", "<f2", "|u1", "|i1", "<i2", "<u2", "<u4", "<u8", "|b1")
)
_INT32 = _DTYPES[0]
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_BROKEN = (
    msgspec.MsgspecError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    OverflowError,
    RecursionError,
    struct.error,
)

Buffer = bytes | memoryview
Frames = Sequence[Buffer]


_FOLLOWED, _MIXED = 1, 2  # flags of a frame: parts follow; it has arrays that aren't rows of int32
_STARTS = tuple(bytes((FORMAT, flags)) for flags in range(4))


def has_parts(first: Buffer) -> bool:
    """Whether frames of arrays follow this one."""
    return len(first) > 1 and bool(first[1] & _FOLLOWED)


class CodecError(TransportError):
    """A frame that isn't ours, or a message that can't travel."""


class Header(NamedTuple):
    """What stands before the messages of a frame. edge "" marks events; cost is the credit that each message took."""

    type: str
    sender: str
    generation: int
    epoch: int = 1
    edge: str = ""
    lane: str = ""
    cost: int = 1
    schema: str = ""  # digest of the type; filled in by the codec


class Codec:
    """Encodes and decodes frames. Not thread-safe: one per channel."""

    def __init__(self) -> None:
        self._beside: list[Buffer] = []
        self._mixed = False
        self._arrived: Frames = ()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_hook)
        self._decoders: dict[str, msgspec.msgpack.Decoder[list[Message]]] = {}
        self._plain: dict[str, msgspec.msgpack.Decoder[list[Message]] | None] = {}
        self._header_bytes: dict[Header, bytes] = {}
        self._headers: dict[bytes, Header] = {}

    def encode(self, header: Header, messages: Sequence[Message]) -> list[Buffer]:
        """Frames of messages, all of type header.type. Raises CodecError for what can't travel."""
        return self.encode_behind(self.head(header), messages)

    def head(self, header: Header) -> bytes:
        """The bytes of a header, to be kept by who sends many frames with it. Raises CodecError for local types."""
        return self._header_bytes.get(header) or self._encode_header(header)

    def encode_behind(self, head: bytes, messages: Sequence[Message]) -> list[Buffer]:
        """Frames of messages behind a header from `head`. Raises CodecError for what can't travel."""
        self._beside = []
        self._mixed = False
        try:
            body = self._encoder.encode(messages)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise CodecError(f"a {type(messages[0]).__name__} can't be sent: {error}") from error
        if not self._mixed:
            return [_STARTS[0] + head + body]
        return [_STARTS[_MIXED | _FOLLOWED if self._beside else _MIXED] + head + body, *self._beside]

    def decode(self, frames: Frames) -> tuple[Header, list[Message]]:
        """Header and messages of frames. Large arrays are read-only views of the frames. Raises CodecError."""
        first = frames[0]
        try:
            form, flags, length = _PREFIX.unpack_from(first)
            start = _PREFIX.size + length
            if form != FORMAT or start > len(first):
                raise ValueError(f"format {form}, {len(first)} bytes")
            raw = bytes(first[_PREFIX.size : start])
            header = self._headers.get(raw) or self._decode_header(raw)
            self._arrived = frames
            decoder = (None if flags else self._plain[header.type]) or self._decoders[header.type]
            return header, decoder.decode(memoryview(first)[start:])
        except CodecError:
            raise
        except _BROKEN as error:
            raise CodecError(f"malformed frame: {error}") from error
        finally:
            self._arrived = ()

    def _encode_header(self, header: Header) -> bytes:
        cls = type_registry.get(header.type)
        if cls is None or cls.local:
            raise CodecError(
                f"{header.type} never leaves its worker.", help="Place both ends of its edge in one worker."
            )
        raw = msgspec.msgpack.encode(header._replace(schema=schema_of(cls)))
        if len(self._header_bytes) >= _CACHED:
            self._header_bytes.clear()
        head = self._header_bytes[header] = _LENGTH.pack(len(raw)) + raw
        return head

    def _decode_header(self, raw: bytes) -> Header:
        header = msgspec.msgpack.decode(raw, type=Header)
        cls = type_registry.get(header.type)
        if cls is None or cls.local or header.cost < 0:
            raise CodecError(f"unknown message type {header.type!r}.")
        if not self._is_known(cls, header):
            raise CodecError(f"{header.sender} has another {header.type}.", help="Run one version in all workers.")
        if header.type not in self._decoders:
            self._decoders[header.type] = self._decoder(cls)
            self._plain[header.type] = _plain_decoder(cls)
        if len(self._headers) >= _CACHED:
            self._headers.clear()
        self._headers[raw] = header
        return header

    def _is_known(self, cls: type[Message], header: Header) -> bool:
        """Whether the sender's messages of this type have the fields that ours have."""
        return header.schema == schema_of(cls)

    def _decoder(self, cls: type[Message]) -> msgspec.msgpack.Decoder[list[Message]]:
        wanted: Any = list[cls]  # type: ignore[valid-type]
        return msgspec.msgpack.Decoder(wanted, ext_hook=self._decode_ext, dec_hook=_check_array)

    # -- arrays --------------------------------------------------------------------------------------------------------

    def _encode_hook(self, value: Any) -> Any:
        if type(value) is np.ndarray:
            return self._encode_array(value)
        if isinstance(value, np.generic):
            return value.item()
        raise NotImplementedError(f"a {type(value).__name__} can't travel")

    def _encode_array(self, array: NDArray[Any]) -> msgspec.msgpack.Ext:
        if array.dtype is _INT32 and array.ndim == 1 and array.nbytes < INLINE_BYTES:
            return msgspec.msgpack.Ext(_IDS, array.tobytes())
        self._mixed = True
        code = _DTYPE_CODES.get(array.dtype)
        if code is None or array.ndim >= len(_SHAPES):
            raise ValueError(f"arrays of {array.dtype} with {array.ndim} dimensions can't travel")
        shape = _SHAPES[array.ndim].pack(code, array.ndim, *array.shape)
        if array.nbytes < INLINE_BYTES:
            return msgspec.msgpack.Ext(_INLINE, shape + array.tobytes())
        self._beside.append(np.ascontiguousarray(array).data.cast("B"))
        return msgspec.msgpack.Ext(_BESIDE, _INDEX.pack(len(self._beside)) + shape)

    def _decode_ext(self, code: int, data: memoryview) -> NDArray[Any]:
        if code == _IDS:
            return _decode_ids(code, data)
        if code == _INLINE:
            dtype, shape, start = _read_shape(data, 0)
            return _view(memoryview(bytearray(data[start:])), dtype, shape)
        if code == _BESIDE:
            (index,) = _INDEX.unpack_from(data)
            dtype, shape, _ = _read_shape(data, _INDEX.size)
            return _view(memoryview(self._arrived[index] if index else b"x"), dtype, shape)
        raise ValueError(f"extension {code} isn't ours")


def _read_shape(data: memoryview, at: int) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    layout = _SHAPES[data[at + 1]]
    code, _, *shape = layout.unpack_from(data, at)
    return _DTYPES[code], tuple(shape), at + layout.size


def _view(data: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if not len(data):
        return np.empty(shape, dtype) if 0 in shape else np.frombuffer(b"x", dtype).reshape(shape)
    return np.frombuffer(data, dtype).reshape(shape)


_wanted_dtypes: dict[Any, np.dtype[Any]] = {}


def _decode_ids(code: int, data: memoryview) -> NDArray[np.int32]:
    if code != _IDS:
        raise ValueError("an array that the frame didn't announce")
    # bytearray: a copy that is aligned and writable, in a third of the time of ndarray.copy.
    return np.frombuffer(bytearray(data), _INT32) if data else np.empty(0, _INT32)


def _plain_decoder(cls: type[Message]) -> msgspec.msgpack.Decoder[list[Message]] | None:
    """A decoder for frames whose arrays are all rows of int32, which spares a check of each; None for other types."""
    arrays: set[Any] = set()
    _arrays_of(cls, arrays, set())
    if not all(_dtype_of(kind) is _INT32 for kind in arrays):
        return None
    wanted: Any = list[cls]  # type: ignore[valid-type]
    return msgspec.msgpack.Decoder(wanted, ext_hook=_decode_ids)


def _arrays_of(kind: Any, found: set[Any], seen: set[Any]) -> None:
    if get_origin(kind) is np.ndarray:
        found.add(kind)
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in seen:
        seen.add(kind)
        for field in msgspec.structs.fields(kind):
            _arrays_of(field.type, found, seen)
    else:
        for inner in get_args(kind):
            _arrays_of(inner, found, seen)


def _dtype_of(kind: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(get_args(get_args(kind)[1])[0])
    return dtype


def _check_array(wanted: Any, value: Any) -> Any:
    dtype = _wanted_dtypes.get(wanted)
    if dtype is None:
        dtype = _wanted_dtypes[wanted] = _dtype_of(wanted)
    if type(value) is not np.ndarray or (value.dtype is not dtype and value.dtype != dtype):
        raise ValueError(f"expected an array of {dtype}")
    return value


# -- schema ------------------------------------------------------------------------------------------------------------

_schemas: dict[type[Message], str] = {}


def schema_of(cls: type[Message]) -> str:
    """Digest (8 hex characters) of the fields of a message type and of the structs inside it."""
    found = _schemas.get(cls)
    if found is None:
        found = _schemas[cls] = hashlib.sha256(_describe(cls).encode()).hexdigest()[:8]
    return found


_RUNTIME_EVENTS = "flowinfer.runtime.events"  # registered in every process of a service


def schema_digest() -> str:
    """Digest (16 hex characters) of the wire format and of all built-in message types; both ends must have the same."""
    built_in = [cls for cls in type_registry.values() if cls.__module__ in (messages_module.__name__, _RUNTIME_EVENTS)]
    lines = [str(FORMAT), *sorted(_describe(cls) for cls in built_in)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _describe(cls: type[Message]) -> str:
    lines: list[str] = []
    _walk(cls, lines.append, set())
    return "\n".join(lines)


def _walk(kind: Any, add: Callable[[str], None], seen: set[Any]) -> None:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in seen:
        seen.add(kind)
        fields = msgspec.structs.fields(kind)
        add(f"{kind.__name__}({', '.join(f'{f.name}: {f.type}' for f in fields)})")
        for field in fields:
            _walk(field.type, add, seen)
    for inner in get_args(kind):
        _walk(inner, add, seen)
