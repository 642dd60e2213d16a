"""Blocks encrypted at rest: only the key brings them back, and nothing passes for what it isn't."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowinfer.cache.disk.offline import export, import_, verify
from flowinfer.cache.disk.store import DiskStore, StoreSettings
from flowinfer.cache.sealing import TAG_BYTES, EncryptionConfig, Sealer, parse_key
from flowinfer.errors import FlowInferError

NAMESPACE, MIB, SIZE = "0123456789abcdef", 1 << 20, 8192
KEY, OTHER = bytes(range(32)), bytes(32)


def opened(folder: Path, key: bytes | None = KEY, **changes: object) -> DiskStore:
    wanted = {"size": 64 * MIB, "segment": MIB, "sweep_s": 1e9, "key": key, **changes}
    return DiskStore(StoreSettings(path=folder, **wanted))  # type: ignore[arg-type]


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def payload(number: int, size: int = SIZE) -> memoryview:
    memory = memoryview(mmap.mmap(-1, max(1, size)))[:size]
    memory[:] = random.Random(number).randbytes(size)
    return memory


def put(store: DiskStore, *numbers: int, size: int = SIZE) -> list[bytes]:
    return store.put([(name(n), payload(n, size)) for n in numbers], namespace=NAMESPACE, cls="chat").result()


def held(store: DiskStore, *numbers: int, size: int = SIZE) -> list[int]:
    targets = [memoryview(bytearray(size)) for _ in numbers]
    found = store.get([name(n) for n in numbers], targets, NAMESPACE)
    got = [(n, target) for n, target, there in zip(numbers, targets, found, strict=True) if there]
    assert all(target == payload(n, size) for n, target in got)
    return [n for n, _ in got]


@pytest.mark.parametrize("size", [1, 4095, 4096, 3 * 4096 + 24, 300_000])
def test_blocks_of_any_size_come_back_under_their_key(tmp_path: Path, size: int) -> None:
    store = opened(tmp_path)
    assert put(store, 1, 2, size=size) == [name(1), name(2)]
    store.close()
    store = opened(tmp_path)
    assert held(store, 1, 2, size=size) == [1, 2]
    store.close()


def test_nothing_of_a_block_is_on_the_device(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1)
    store.close()
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    plain = bytes(payload(1))
    assert not any(plain[start : start + 16] in written for start in range(0, SIZE, 16))
    assert KEY not in written


@pytest.mark.parametrize(("wrote", "reads"), [(KEY, OTHER), (KEY, None), (None, KEY)])
def test_another_key_is_a_miss_with_its_cause_and_makes_room_for_what_is_written_anew(
    tmp_path: Path, wrote: bytes | None, reads: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path, wrote)
    put(store, 1)
    store.close()
    store = opened(tmp_path, reads)
    assert held(store, 1) == [] and store.counts["read_key"] == 1 and "read_key" in caplog.text
    assert put(store, 1) == [name(1)] and held(store, 1) == [1]
    store.close()


def test_a_block_in_the_place_of_another_is_a_miss(tmp_path: Path) -> None:
    sealer = Sealer(KEY)
    sealed, plain = memoryview(bytearray(SIZE + TAG_BYTES)), memoryview(bytearray(SIZE))
    seal = sealer.seal(payload(1), sealed, name=name(1), namespace=NAMESPACE)
    assert sealer.open(sealed, plain, seal, name=name(1), namespace=NAMESPACE) and plain == payload(1)
    assert not sealer.open(sealed, plain, seal, name=name(2), namespace=NAMESPACE)
    assert not sealer.open(sealed, plain, seal, name=name(1), namespace="another")


@given(st.integers(0, SIZE + TAG_BYTES - 1), st.integers(0, 7))
def test_any_flipped_bit_is_found(at: int, bit: int) -> None:
    sealer, sealed, plain = Sealer(KEY), memoryview(bytearray(SIZE + TAG_BYTES)), memoryview(bytearray(SIZE))
    seal = sealer.seal(payload(1), sealed, name=name(1), namespace=NAMESPACE)
    sealed[at] ^= 1 << bit
    assert not sealer.open(sealed, plain, seal, name=name(1), namespace=NAMESPACE)


def test_no_nonce_comes_twice() -> None:
    sealer, sealed = Sealer(KEY), memoryview(bytearray(16 + TAG_BYTES))
    seals = {sealer.seal(payload(1, 16), sealed, name=name(1), namespace="n") for _ in range(2000)}
    assert len(seals) == 2000


def test_what_is_copied_forward_and_an_index_made_anew_stay_readable(tmp_path: Path) -> None:
    store = opened(tmp_path, size=4 * MIB, segment=MIB)
    put(store, 0)
    for start in range(1, 500, 100):
        assert held(store, 0) == [0]
        store.sweep()
        put(store, *range(start, start + 100))
        held(store, *range(start, start + 100))
    assert store.counts["copied_forward"] > 0 and held(store, 0, 500) == [0, 500]
    store.close()
    (tmp_path / "index.sqlite").unlink()
    store = opened(tmp_path, size=4 * MIB, segment=MIB)
    assert held(store, 0, 500) == [0, 500]
    store.close()


def test_an_export_stays_encrypted_and_is_verified_without_the_key(tmp_path: Path) -> None:
    store = opened(tmp_path / "a")
    put(store, 1, 2)
    store.close()
    assert list(verify(tmp_path / "a")) == [] and export(tmp_path / "a", tmp_path / "x.tar") == 2
    assert bytes(payload(1))[:64] not in (tmp_path / "x.tar").read_bytes()
    assert import_(tmp_path / "b", tmp_path / "x.tar", size=64 * MIB) == 2
    store = opened(tmp_path / "b")
    assert held(store, 1, 2) == [1, 2]
    store.close()


def test_keys_are_read_in_any_usual_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    for text in (
        KEY,
        KEY.hex().encode(),
        KEY.hex().upper().encode() + b"\n",
        b"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=",
    ):
        file.write_bytes(text)
        file.chmod(0o600)
        assert EncryptionConfig(key_file=str(file)).read_key() == KEY
    monkeypatch.setenv("A_KEY", KEY.hex())
    assert EncryptionConfig(key_env="A_KEY").read_key() == KEY


def test_a_bad_key_is_told_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("hunter2")
    with pytest.raises(FlowInferError, match="others may read"):
        file.chmod(0o644)
        EncryptionConfig(key_file=str(file)).read_key()
    file.chmod(0o600)
    for config in ({"key_file": str(file)}, {"key_file": str(tmp_path / "no")}, {"key_env": "NO_SUCH_KEY"}):
        with pytest.raises(FlowInferError) as caught:
            EncryptionConfig(**config).read_key()  # type: ignore[arg-type]
        assert "hunter2" not in str(caught.value)
    for bad in ({}, {"key_file": "a", "key_env": "B"}):
        with pytest.raises(ValueError, match="one of key_file and key_env"):
            EncryptionConfig(**bad)
    with pytest.raises(FlowInferError, match="no key of 32 bytes"):
        parse_key(os.urandom(31), "there")
