"""The disk store: what is put is got, bit by bit, until it expires, is evicted, or is damaged."""

from __future__ import annotations

import errno
import mmap
import random
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.cache.disk.index import FILE
from flowinfer.cache.disk.io import PAGE, Files, ShortTransfer
from flowinfer.cache.disk.retention import Retention
from flowinfer.cache.disk.store import DiskStore, StoreSettings
from flowinfer.errors import FlowInferError

NAMESPACE, MIB = "0123456789abcdef", 1 << 20
DAY = 86_400.0
Open = Callable[..., DiskStore]


class Time:
    """A wall clock and a monotonic one, set by hand."""

    def __init__(self) -> None:
        self.wall, self.monotonic = 1.8e9, 0.0

    def pass_by(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def opened(tmp_path: Path, time: Time) -> Iterator[Open]:
    stores: list[DiskStore] = []

    def open_store(files: Files | None = None, **changes: Any) -> DiskStore:
        wanted = {"size": 64 * MIB, "segment": MIB, "sweep_s": 1e9, **changes}
        settings = StoreSettings(path=tmp_path / "kv", **wanted)
        store = DiskStore(settings, files=files, wall=lambda: time.wall, monotonic=lambda: time.monotonic)
        stores.append(store)
        return store

    yield open_store
    for store in stores:
        close(store)


def close(store: DiskStore) -> None:
    if not getattr(store, "closed_by_test", False):
        store.closed_by_test = True  # type: ignore[attr-defined]
        store.close()


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def payload(number: int, size: int = 2 * PAGE, *, aligned: bool = True) -> memoryview:
    memory = memoryview(mmap.mmap(-1, size + PAGE))[0 if aligned else 24 :][:size]
    memory[:] = random.Random(number).randbytes(size)
    return memory


def put(store: DiskStore, numbers: Sequence[int], *, size: int = 2 * PAGE, **how: Any) -> list[bytes]:
    blocks = [(name(n), payload(n, size)) for n in numbers]
    return store.put(blocks, **{"namespace": NAMESPACE, "cls": "chat", **how}).result()


def held(store: DiskStore, numbers: Sequence[int], *, size: int = 2 * PAGE, namespace: str = NAMESPACE) -> list[int]:
    """Numbers of the blocks that come back; what does is checked."""
    targets = [memoryview(mmap.mmap(-1, size)) for _ in numbers]
    found = store.get([name(n) for n in numbers], targets, namespace)
    got = [(n, target) for n, target, there in zip(numbers, targets, found, strict=True) if there]
    for number, target in got:
        assert target == payload(number, size)
    return [number for number, _ in got]


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "kv").glob("*.seg"))


@pytest.mark.parametrize("size", [1, PAGE - 1, PAGE, 3 * PAGE + 24, 64 * PAGE])
@pytest.mark.parametrize("aligned", [True, False])
def test_blocks_of_any_size_and_alignment_come_back(opened: Open, size: int, aligned: bool) -> None:
    store = opened()
    block = payload(1, size, aligned=aligned)
    assert store.put([(name(1), block)], namespace=NAMESPACE, cls="chat").result() == [name(1)]
    target = payload(2, size, aligned=aligned)
    assert store.get([name(1)], [target], NAMESPACE) == [True] and target == block


def test_a_filesystem_without_o_direct_is_used_through_the_page_cache(opened: Open) -> None:
    class Buffered(Files):
        def probe(self, folder: Path) -> bool:
            self.direct = False
            return False

    store = opened(Buffered())
    assert len(put(store, range(9), size=PAGE + 1)) == 9 and held(store, range(9), size=PAGE + 1) == list(range(9))


def test_blocks_outlive_the_process_and_are_found_by_leading_names(opened: Open) -> None:
    first = opened()
    put(first, [1, 2, 4])
    close(first)
    again = opened()
    assert again.contains([name(n) for n in (1, 2, 3, 4)], NAMESPACE) == 2
    assert held(again, [1, 2, 3, 4]) == [1, 2, 4]
    assert again.names(NAMESPACE) and again.names("another") == []


def test_another_layout_finds_nothing(opened: Open) -> None:
    store = opened()
    put(store, [1])
    assert held(store, [1], namespace="fedcba9876543210") == []
    assert held(store, [1], size=PAGE) == []


def test_services_share_a_path_and_nobody_else_has_it_meanwhile(opened: Open) -> None:
    first, beside = opened(), opened()
    put(first, [1])
    put(beside, [2])
    assert held(beside, [1, 2]) == held(first, [1, 2]) == [1, 2]
    with pytest.raises(FlowInferError, match="a service uses the cache"):
        opened(alone=True)
    close(first)
    close(beside)
    assert held(opened(alone=True), [1, 2]) == [1, 2]


def test_the_tighter_of_two_limits_counts_and_neither_service_is_disturbed(opened: Open) -> None:
    large, small = opened(size=64 * MIB, segment=MIB), opened(size=8 * MIB, segment=MIB)
    for start in range(0, 1600, 100):
        put(large if start % 200 else small, range(start, start + 100))
    close(small)
    assert large.index.allocated() <= 8 * MIB + 5 * MIB  # beyond, what both are still writing to
    assert held(large, range(1500, 1600)) == list(range(1500, 1600))


def test_a_store_takes_no_more_than_the_device_has_to_spare(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    class Nearly(Files):
        def free(self, folder: Path) -> int:
            return 40 * MIB

    store = opened(Nearly(), spare=8 * MIB)
    assert store.settings.size == 32 * MIB and "32MiB instead of 64MiB" in caplog.text
    assert len(put(store, [1, 2])) == 2


def test_no_room_at_all_stores_nothing_and_stops_nobody(opened: Open) -> None:
    class Full(Files):
        def free(self, folder: Path) -> int:
            return 0

    store = opened(Full(), spare=MIB)
    assert put(store, [1, 2]) == [] and held(store, [1]) == [] and store.counts["dropped_too_large"] == 2


def test_blocks_of_another_version_of_the_tables_are_found_again(opened: Open, tmp_path: Path) -> None:
    put(first := opened(), [1, 2])
    close(first)
    with sqlite3.connect(tmp_path / "kv" / FILE) as db:
        db.execute("PRAGMA user_version=1")
    db.close()
    assert held(opened(), [1, 2]) == [1, 2]


def test_a_lost_index_is_made_anew_from_the_segments(opened: Open, tmp_path: Path) -> None:
    store = opened()
    put(store, range(40))
    put(store, [50], cls="agent", tenant="alice")
    close(store)
    for path in (tmp_path / "kv").glob(f"{FILE}*"):
        path.unlink()
    again = opened()
    assert held(again, range(60)) == [*range(40), 50]
    assert {(u.cls, u.tenant, u.blocks) for u in again.index.usage()} == {("chat", "", 40), ("agent", "alice", 1)}


def test_a_damaged_index_is_made_anew(opened: Open, tmp_path: Path) -> None:
    store = opened()
    put(store, range(4))
    close(store)
    (tmp_path / "kv" / FILE).write_bytes(b"not a database" * 1000)
    assert held(opened(), range(4)) == [0, 1, 2, 3]


# --------------------------------------------------------------------------------------------------------- retention


def test_each_class_stays_for_its_retention_and_a_hit_renews(opened: Open, time: Time) -> None:
    store = opened(retention=Retention({"agent": 3 * DAY, "chat": 7 * DAY, "default": 3600.0}))
    put(store, [1], cls="agent")
    put(store, [2], cls="chat")
    put(store, [3], cls="other")
    put(store, [4], cls="agent")
    time.pass_by(3601)
    store.sweep()
    assert held(store, [3]) == []
    time.pass_by(2 * DAY)
    assert held(store, [1]) == [1]
    time.pass_by(0.99 * DAY)
    store.sweep()
    assert held(store, [1, 2, 4]) == [1, 2]
    time.pass_by(8 * DAY)
    store.sweep()
    assert held(store, [1, 2, 4]) == []


def test_a_retention_of_zero_stores_nothing(opened: Open) -> None:
    store = opened(retention=Retention({"secret": 0.0, "chat": DAY}))
    assert put(store, [1], cls="secret") == [] and put(store, [2], keep_s=0) == []
    assert put(store, [3], keep_s=60) == [name(3)]


def test_what_expires_together_is_deleted_as_a_file(opened: Open, time: Time, tmp_path: Path) -> None:
    store = opened(retention=Retention({"chat": 8 * DAY, "agent": DAY}))
    put(store, range(8), cls="agent")
    put(store, range(10, 18), cls="chat")
    close(store)
    store = opened(retention=Retention({"chat": 8 * DAY, "agent": DAY}))
    assert len(segments(tmp_path)) == 2
    time.pass_by(1.5 * DAY)
    store.sweep()
    assert len(segments(tmp_path)) == 1 and held(store, range(20)) == list(range(10, 18))


def test_blocks_still_in_use_are_copied_forward_before_their_segment_goes(
    opened: Open, time: Time, tmp_path: Path
) -> None:
    how = {"retention": Retention({"chat": DAY})}
    store = opened(**how)
    put(store, range(8))
    close(store)
    store, before = opened(**how), segments(tmp_path)
    time.pass_by(0.9 * DAY)
    assert held(store, [3, 5]) == [3, 5]
    time.pass_by(0.2 * DAY)
    store.sweep()
    assert not set(before) & set(segments(tmp_path)) and store.counts["copied_forward"] == 2
    assert held(store, range(8)) == [3, 5]


def test_a_clock_set_back_a_day_neither_expires_nor_keeps_for_longer(opened: Open, time: Time) -> None:
    store = opened(retention=Retention({"chat": DAY}))
    put(store, [1])
    time.wall -= DAY
    store.sweep()
    assert held(store, [1]) == [1]
    close(store)
    store = opened(retention=Retention({"chat": DAY}))
    assert held(store, [1]) == [1]
    time.pass_by(DAY + 700)
    assert held(store, [1]) == []


@pytest.mark.parametrize("restart", [True, False])
def test_a_clock_that_leaps_a_month_ahead_by_mistake_expires_nothing(opened: Open, time: Time, restart: bool) -> None:
    store = opened(retention=Retention({"chat": DAY}))
    put(store, [1])
    if restart:
        close(store)
    time.wall += 30 * DAY
    store = opened(retention=Retention({"chat": DAY})) if restart else store
    store.sweep()
    time.pass_by(300)
    store.sweep()
    assert held(store, [1]) == [1]
    time.wall -= 30 * DAY
    time.pass_by(600)
    store.sweep()
    assert held(store, [1]) == [1]


def test_a_leap_that_lasts_is_believed(opened: Open, time: Time) -> None:
    store = opened(retention=Retention({"chat": DAY}))
    put(store, [1])
    time.wall += 30 * DAY
    store.sweep()
    time.pass_by(601)
    store.sweep()
    assert held(store, [1]) == []


# ------------------------------------------------------------------------------------------------------------- limits


def test_a_full_store_stays_within_its_size_and_keeps_the_newest(opened: Open, tmp_path: Path) -> None:
    store = opened(size=4 * MIB, segment=MIB)
    for start in range(0, 1000, 40):
        assert len(put(store, range(start, start + 40))) == 40
        assert sum(path.stat().st_blocks * 512 for path in segments(tmp_path)) <= 4 * MIB
    assert held(store, range(980, 1000)) == list(range(980, 1000))
    assert held(store, range(100)) == []


def test_blocks_that_were_hit_outlive_those_that_were_not(opened: Open) -> None:
    store = opened(size=4 * MIB)
    put(store, range(20))
    for start in range(100, 900, 80):
        assert held(store, [7]) == [7]
        store._renew()
        put(store, range(start, start + 80))
    assert held(store, range(20)) == [7]


def test_a_tenant_that_writes_without_end_does_not_push_out_a_small_one(opened: Open) -> None:
    store = opened(size=4 * MIB)
    put(store, range(20), tenant="small")
    for start in range(100, 1700, 80):
        put(store, range(start, start + 80), tenant="large")
    assert held(store, range(20)) == list(range(20))


def test_classes_and_tenants_keep_their_limits(opened: Open) -> None:
    store = opened(class_limits={"agent": 10 * 3 * PAGE}, tenant_limit=5 * 3 * PAGE)
    put(store, range(20), cls="agent", tenant="a")
    put(store, range(20, 28), cls="agent", tenant="b")
    put(store, range(30, 40), cls="chat", tenant="c")
    store.sweep()
    assert held(store, range(40)) == [*range(15, 20), *range(23, 28), *range(35, 40)]


# ------------------------------------------------------------------------------------------------------------- faults


class Faulty(Files):
    """A device that fails as it's told to."""

    def __init__(self) -> None:
        self.fail: dict[str, OSError] = {}

    def _maybe(self, what: str) -> None:
        if what in self.fail:
            raise self.fail[what]

    def create(self, path: Path, size: int) -> int:
        self._maybe("create")
        return super().create(path, size)

    def read(self, fd: int, buffers: Any, offset: int) -> None:
        self._maybe("read")
        super().read(fd, buffers, offset)

    def write(self, fd: int, buffers: Any, offset: int) -> None:
        if offset:
            self._maybe("write")
        super().write(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self._maybe("sync")
        super().sync(fd)


@pytest.mark.parametrize(
    ("error", "count"),
    [(OSError(errno.EIO, "bad sector"), "read_io"), (ShortTransfer(errno.EIO, "short"), "read_short")],
)
def test_a_failed_read_is_a_miss_and_the_block_is_forgotten(opened: Open, error: OSError, count: str) -> None:
    files = Faulty()
    store = opened(files)
    put(store, [1, 2])
    files.fail["read"] = error
    assert held(store, [1]) == [] and store.counts[count] == 1
    files.fail.clear()
    assert held(store, [1, 2]) == [2]


@pytest.mark.parametrize("where", ["write", "sync", "create"])
@pytest.mark.parametrize(("code", "count"), [(errno.ENOSPC, "write_full"), (errno.EIO, "write_io")])
def test_a_failed_write_is_never_visible_and_the_store_goes_on(
    opened: Open, where: str, code: int, count: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowinfer.cache.disk.writer.PAUSE_S", 0.0)
    files = Faulty()
    store = opened(files)
    if where != "create":
        put(store, [1])
    files.fail[where] = OSError(code, "device says no")
    assert put(store, [2]) == [] and store.counts[count] == 1
    assert held(store, [2]) == []
    files.fail.clear()
    assert put(store, [2]) == [name(2)] and held(store, [2]) == [2]


def test_while_the_device_is_full_nothing_is_tried_and_each_block_is_counted(opened: Open) -> None:
    files = Faulty()
    store = opened(files)
    files.fail["create"] = OSError(errno.ENOSPC, "full")
    assert put(store, [1]) == [] and put(store, [2, 3]) == []
    assert (store.counts["write_full"], store.counts["dropped_paused"]) == (1, 2)


def test_what_exceeds_the_backlog_is_dropped_and_counted(opened: Open) -> None:
    store = opened(backlog=5 * PAGE)
    assert len(put(store, range(8), size=2 * PAGE)) < 8 and store.counts["dropped_backlog"] > 0
    assert put(store, [90], size=2 * PAGE) == [name(90)]


def test_a_block_larger_than_a_segment_is_dropped_and_counted(opened: Open) -> None:
    store = opened()
    assert put(store, [1], size=2 * MIB) == [] and store.counts["dropped_too_large"] == 1


def test_every_flipped_byte_of_a_header_and_of_a_payload_is_a_miss(opened: Open, tmp_path: Path) -> None:
    store = opened()
    put(store, [1, 2])
    close(store)
    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    pristine = (tmp_path / "kv" / FILE).read_bytes()
    fields = [0, 9, 16, 32, 48, 80, 112, 144, 152, 160, 168, 176, 184]  # one byte of each, as records.py packs them
    for at in [*(PAGE + field for field in fields), *range(2 * PAGE, 4 * PAGE, 1023)]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        store = opened()
        assert held(store, [1, 2]) == [2], f"byte {at}"
        assert sum(store.counts[f"read_{cause}"] for cause in ("header", "checksum")) == 1
        close(store)
        (tmp_path / "kv" / FILE).write_bytes(pristine)
        path.write_bytes(whole)


def test_a_record_that_another_block_was_written_over_is_a_miss(opened: Open, tmp_path: Path) -> None:
    store = opened()
    put(store, [1, 2])
    close(store)
    (path,) = segments(tmp_path)
    whole = bytearray(path.read_bytes())
    whole[PAGE : 4 * PAGE] = whole[4 * PAGE : 7 * PAGE]
    path.write_bytes(whole)
    assert held(opened(), [1, 2]) == [2]


@settings(max_examples=6, deadline=None)
@given(st.integers(PAGE, 10 * PAGE - 1))
def test_a_torn_end_loses_only_what_was_cut(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("torn")
    settings_ = StoreSettings(path=folder / "kv", size=64 * MIB, segment=MIB, sweep_s=1e9)
    store = DiskStore(settings_)
    put(store, [0, 1, 2])
    close(store)
    (path,) = segments(folder)
    with path.open("r+b") as file:
        file.truncate(cut)
    whole = [n for n in range(3) if PAGE + (n + 1) * 3 * PAGE <= cut]
    for lost_index in (False, True):
        if lost_index:
            for index in (folder / "kv").glob(f"{FILE}*"):
                index.unlink()
        store = DiskStore(settings_)
        assert held(store, [0, 1, 2]) == whole
        close(store)


def test_a_segment_deleted_by_someone_is_a_miss(opened: Open, tmp_path: Path) -> None:
    store = opened()
    put(store, [1])
    close(store)
    segments(tmp_path)[0].unlink()
    store = opened()
    assert held(store, [1]) == [] and put(store, [1]) == [name(1)] and held(store, [1]) == [1]


def test_what_is_put_into_a_closed_store_is_dropped_at_once(opened: Open) -> None:
    store = opened()
    store.close()
    done = store.put([(bytes(16), memoryview(bytes(4096)))], namespace="n", cls="chat", tenant="")
    assert done.result(timeout=5) == []


def test_a_bug_while_storing_leaves_nobody_waiting(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()

    def bug(*args: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(store._writer, "_enter", bug)
    assert put(store, [1]) == [] and put(store, [2]) == []
    monkeypatch.undo()
    assert put(store, [3]) == [name(3)]
    monkeypatch.setattr("flowinfer.cache.disk.writer.checksum", bug)
    assert put(store, [4]) == []
    monkeypatch.undo()
    assert put(store, [5]) == [name(5)] and store.counts["write_error"] == 2
