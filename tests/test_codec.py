"""Frames: every message type comes back as it was sent, and nothing that arrives can break the receiver."""

from __future__ import annotations

import contextlib
import types
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flowinfer import message as messages
from flowinfer.codec import INLINE_BYTES, Codec, CodecError, Header, has_parts, schema_digest, schema_of
from flowinfer.message import Call, KVData, Logits, Message, Prompt, Sampling

TRAVELLING = sorted(
    (
        cls
        for cls in vars(messages).values()
        if isinstance(cls, type) and issubclass(cls, Message) and cls.__struct_fields__ and not cls.local
    ),
    key=lambda cls: cls.__name__,
)
PLAIN = {
    str: st.text(max_size=8),
    int: st.integers(-(2**40), 2**40),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=8),
    type(None): st.none(),
    Any: st.one_of(st.none(), st.integers(-9, 9), st.text(max_size=5), hnp.arrays(np.int32, st.integers(0, 4))),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation of a message."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs(kind)
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values, args))
    if origin is list:
        return st.lists(values(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple) if args[-1] is ... else st.tuples(*map(values, args))
    if origin is np.ndarray:
        return hnp.arrays(np.dtype(get_args(args[1])[0]), st.integers(0, 6))
    raise NotImplementedError(kind)


def structs(cls: type[Any]) -> st.SearchStrategy[Any]:
    fields = {field.name: values(field.type) for field in msgspec.structs.fields(cls)}
    return st.fixed_dictionaries(fields).map(lambda found: _make(cls, found))


def _make(cls: type[Any], found: dict[str, Any]) -> Any:
    positional = cls.__struct_config__.kw_only is False if hasattr(cls.__struct_config__, "kw_only") else False
    if positional:
        return cls(*found.values())
    return cls(**found)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(same(getattr(a, f), getattr(b, f)) for f in a.__struct_fields__)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    return bool(a == b)


def head(cls: type[Message]) -> Header:
    return Header(cls.__name__, "prefill.0", 3, edge="a -> b", lane="short", cost=2)


@pytest.mark.parametrize("cls", TRAVELLING, ids=lambda cls: cls.__name__)
def test_every_message_type_comes_back_as_it_was_sent(cls: type[Message]) -> None:
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(structs(cls), min_size=1, max_size=3))
    def check(batch: list[Message]) -> None:
        header, got = Codec().decode([bytes(part) for part in Codec().encode(head(cls), batch)])
        assert header == head(cls)._replace(schema=schema_of(cls))
        assert same(got, batch)

    check()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_a_codec_error(noise: bytes) -> None:
    with pytest.raises(CodecError):
        Codec().decode([noise])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_frame_raises_or_decodes_but_never_breaks(data: st.DataObject) -> None:
    prompt = Prompt(id="r", tokens=np.arange(9, dtype=np.int32), sampling=Sampling(stop=("x",)))
    frame = bytearray(Codec().encode(head(Prompt), [prompt])[0])
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frame = frame[: data.draw(st.integers(1, len(frame)))]
    codec = Codec()
    with contextlib.suppress(CodecError):
        codec.decode([bytes(frame)])
    codec.decode(Codec().encode(head(Prompt), [prompt]))  # and what comes next is read as ever


@pytest.mark.parametrize("size", [INLINE_BYTES - 4, INLINE_BYTES, 3 * INLINE_BYTES])
def test_large_arrays_travel_in_frames_of_their_own(size: int) -> None:
    data = np.arange(size, dtype=np.uint8)
    frames = Codec().encode(head(KVData), [KVData(id="r", ticket=1, index=0, layout="", data=data, check=0)])
    assert (len(frames) > 1) == has_parts(frames[0]) == (size >= INLINE_BYTES)
    _, (got,) = Codec().decode(frames)
    assert isinstance(got, KVData) and (got.data == data).all()


def test_a_large_array_is_not_copied_on_receipt() -> None:
    arrived = [
        bytes(f)
        for f in Codec().encode(head(KVData), [KVData(id="", ticket=1, index=0, layout="", data=_big(), check=0)])
    ]
    _, (got,) = Codec().decode(arrived)
    assert isinstance(got, KVData) and np.shares_memory(got.data, np.frombuffer(arrived[1], np.uint8))


def test_small_arrays_can_be_written_to() -> None:
    frames = Codec().encode(head(Prompt), [Prompt(id="r", tokens=np.ones(4, np.int32), sampling=Sampling())])
    _, (got,) = Codec().decode(frames)
    assert isinstance(got, Prompt)
    got.tokens[0] = 7


def test_a_missing_part_is_a_codec_error() -> None:
    frames = Codec().encode(head(KVData), [KVData(id="", ticket=1, index=0, layout="", data=_big(), check=0)])
    with pytest.raises(CodecError):
        Codec().decode(frames[:1])


def test_arrays_of_more_dimensions_and_other_types_keep_their_shape() -> None:
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)
    _, (got,) = Codec().decode(
        Codec().encode(head(Call), [Call(id="r", sampling=Sampling(), template_args={"g": grid})])
    )
    assert isinstance(got, Call) and same(got.template_args["g"], grid)


def test_local_messages_are_refused() -> None:
    row = np.zeros(1, np.int32)
    with pytest.raises(CodecError, match="never leaves its worker"):
        Codec().encode(head(Logits), [Logits(step=1, slots=row, starts=row, logits=None)])


def test_an_array_of_another_dtype_is_refused() -> None:
    floats: Any = np.zeros(3, np.float32)
    frames = Codec().encode(head(Prompt), [Prompt(id="r", tokens=floats, sampling=Sampling())])
    with pytest.raises(CodecError, match="int32"):
        Codec().decode(frames)


def test_a_type_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = Codec().encode(head(Prompt), [Prompt(id="r", tokens=np.ones(4, np.int32), sampling=Sampling())])
    monkeypatch.setattr("flowinfer.codec.schema_of", lambda cls: "00000000")
    with pytest.raises(CodecError, match="another Prompt"):
        Codec().decode(frames)


def test_the_schema_digest_covers_structs_inside_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    before = schema_digest()

    class Longer(Sampling, frozen=True, kw_only=True, array_like=True):
        more: int = 0

    monkeypatch.setitem(Prompt.__annotations__, "sampling", Longer)
    monkeypatch.setattr("flowinfer.codec.msgspec.structs.fields", _with(Longer))
    assert schema_digest() != before


def _with(sampling: type) -> Any:
    fields = msgspec.structs.fields

    def patched(cls: Any) -> Any:
        found = fields(cls)
        if cls is not Prompt:
            return found
        return tuple(
            msgspec.structs.FieldInfo(f.name, f.encode_name, sampling) if f.name == "sampling" else f for f in found
        )

    return patched


def _big() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.zeros(INLINE_BYTES * 2, np.uint8)
