"""kill -9 while the store writes: what was acknowledged is there, what is there is right."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowinfer.cache.disk.index import FILE
from flowinfer.cache.disk.store import DiskStore, StoreSettings

MIB = 1 << 20
WRITER = """
import itertools, random, sys
from pathlib import Path
from flowinfer.cache.disk.store import DiskStore, StoreSettings
store = DiskStore(StoreSettings(path=Path(sys.argv[1]), size=64 << 20, segment=1 << 20))
first = int(sys.argv[2])
for n in itertools.count(first, 8):
    names = [i.to_bytes(16, "little") for i in range(n, n + 8)]
    blocks = [(name, memoryview(bytearray(random.Random(n + i).randbytes(20_000)))) for i, name in enumerate(names)]
    for name in store.put(blocks, namespace="n", cls="chat").result():
        print(int.from_bytes(name, "little"), flush=True)
"""


def write_and_kill(folder: Path, first: int, after_s: float) -> list[int]:
    """Numbers of the blocks that a process acknowledged before it was killed."""
    command = [sys.executable, "-c", WRITER, str(folder), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        acknowledged = [int(child.stdout.readline())]  # it has begun
        time.sleep(after_s)
        child.kill()
        rest = child.stdout.read().splitlines(keepends=True)
    return acknowledged + [int(line) for line in rest if line.endswith("\n")]


def check(folder: Path, numbers: list[int], *, upto: int) -> None:
    """All of these are there; whatever is there, of any number, is right."""
    store = DiskStore(StoreSettings(path=folder, size=64 * MIB, segment=MIB))
    try:
        candidates = sorted({*numbers, *range(max(0, upto - 400), upto)})
        targets = [memoryview(bytearray(20_000)) for _ in candidates]
        found = store.get([n.to_bytes(16, "little") for n in candidates], targets, "n")
        there = {n for n, is_there in zip(candidates, found, strict=True) if is_there}
        assert set(numbers) <= there, f"lost {sorted(set(numbers) - there)[:5]}"
        assert not store.counts["read_header"] + store.counts["read_checksum"], "a torn block was visible"
        for n, target in zip(candidates, targets, strict=True):
            assert n not in there or target == random.Random(n).randbytes(20_000)
    finally:
        store.close()


def rounds(folder: Path, count: int) -> None:
    rng = random.Random(0)
    for number in range(count):
        first = number * 1_000_000
        acknowledged = write_and_kill(folder, first, rng.uniform(0, 0.3))[-300:]  # older ones may be evicted by now
        if number % 4 == 3:
            for index in folder.glob(f"{FILE}*"):
                index.unlink()
        check(folder, acknowledged, upto=acknowledged[-1] + 100)


def test_nothing_acknowledged_is_lost_and_nothing_torn_is_seen(tmp_path: Path) -> None:
    rounds(tmp_path / "kv", 8)


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_in_fifty_rounds(tmp_path: Path) -> None:
    rounds(tmp_path / "kv", 50)


def test_a_file_size_limit_stops_writing_and_nothing_else(tmp_path: Path) -> None:
    script = f"""
import resource, sys
from pathlib import Path
from flowinfer.cache.disk.store import DiskStore, StoreSettings
store = DiskStore(StoreSettings(path=Path({str(tmp_path / "kv")!r}), size=64 << 20, segment=1 << 20))
block = lambda n: [(bytes([n]) * 16, memoryview(bytearray([n]) * 20_000))]
assert store.put(block(1), namespace="n", cls="chat").result()
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, {resource.RLIM_INFINITY}))
assert store.put(block(2), namespace="n", cls="agent").result() == []
assert store.counts["write_full"] + store.counts["write_io"] == 1, store.counts
target = memoryview(bytearray(20_000))
assert store.get([bytes([1]) * 16], [target], "n") == [True] and target == bytes([1]) * 20_000
store.close()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
