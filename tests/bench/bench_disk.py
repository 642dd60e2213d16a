"""GB/s of the disk tier, written and read, against plain O_DIRECT of the same device in the same run.

PYTHONPATH=. python tests/bench/bench_disk.py [--folder DIR] [--gib 1] [--block-mib 1.41] [--encrypt]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flowinfer.cache.disk.io import Files, padded
from flowinfer.cache.disk.retention import Retention
from flowinfer.cache.disk.store import DiskStore, StoreSettings

THREADS = 4
RANDOM_POOL = 64 << 20  # bytes of noise that blocks are cut from


def memory(size: int) -> memoryview:
    """Page-aligned memory that has been touched."""
    view = memoryview(mmap.mmap(-1, size))
    noise = os.urandom(min(size, RANDOM_POOL))
    for start in range(0, size, len(noise)):
        view[start : start + len(noise)] = noise[: size - start]
    return view


def plain(folder: Path, data: memoryview, block: int) -> tuple[float, float]:
    """Bytes a second written (with one fdatasync) and read by THREADS threads, whole file, O_DIRECT."""
    files = Files()
    files.probe(folder)
    path = folder / "plain"
    fd = files.create(path, data.nbytes)
    offsets = range(0, data.nbytes - block + 1, block)
    with ThreadPoolExecutor(THREADS) as pool:
        began = time.perf_counter()
        list(pool.map(lambda at: files.write(fd, [data[at : at + block]], at), offsets))
        files.sync(fd)
        written = time.perf_counter() - began
        began = time.perf_counter()
        list(pool.map(lambda at: files.read(fd, [data[at : at + block]], at), offsets))
        read = time.perf_counter() - began
    os.close(fd)
    path.unlink()
    return len(offsets) * block / written, len(offsets) * block / read


def stored(folder: Path, data: memoryview, block: int, key: bytes | None) -> tuple[float, float]:
    """The same through the store: from put to durable, then from get to checked."""
    settings = StoreSettings(
        path=folder / "kv", size=32 * data.nbytes, segment=data.nbytes + (64 << 20),
        retention=Retention({"bench": 86_400.0}), threads=THREADS, backlog=2 * data.nbytes,
        key=key,
    )  # fmt: skip
    store = DiskStore(settings)
    offsets = range(0, data.nbytes - block + 1, block)
    names = [at.to_bytes(16, "little") for at in offsets]
    blocks = [data[at : at + block] for at in offsets]
    warm_up = store.put([(b"warm up".ljust(16), blocks[0])], namespace="bench", cls="bench")
    assert warm_up.result(), "its segment is there, as the file of the plain run"
    began = time.perf_counter()
    batches = [
        store.put(list(zip(names[i : i + 16], blocks[i : i + 16], strict=True)), namespace="bench", cls="bench")
        for i in range(0, len(names), 16)
    ]
    num_stored = sum(len(batch.result()) for batch in batches)
    written = time.perf_counter() - began
    assert num_stored == len(names), store.counts
    began = time.perf_counter()
    found = [ok for i in range(0, len(names), 64) for ok in store.get(names[i : i + 64], blocks[i : i + 64], "bench")]
    read = time.perf_counter() - began
    assert all(found), store.counts
    store.close()
    shutil.rmtree(folder / "kv")
    return len(names) * block / written, len(names) * block / read


def main() -> None:
    """Prints a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--block-mib", type=float, default=1.40625, help="a block of SmolLM2-135M in bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--encrypt", action="store_true", help="AES-GCM, as `tiers.encryption` does")
    arguments = parser.parse_args()
    key = os.urandom(32) if arguments.encrypt else None
    block = padded(int(arguments.block_mib * (1 << 20)))
    folder = Path(tempfile.mkdtemp(dir=arguments.folder, prefix="flowinfer-disk-"))
    data = memory(int(arguments.gib * (1 << 30)))
    try:
        # Turn by turn, best of each: other users of the device disturb both alike.
        runs = [(plain(folder, data, block), stored(folder, data, block, key)) for _ in range(arguments.rounds)]
    finally:
        shutil.rmtree(folder)
    (device_w, device_r), (store_w, store_r) = (
        [max(run[side][way] for run in runs) / 1e9 for way in (0, 1)] for side in (0, 1)
    )
    print(
        json.dumps(
            {
                "write_gb_s": round(store_w, 2),
                "device_write_gb_s": round(device_w, 2),
                "write_ratio": round(store_w / device_w, 2),
                "read_gb_s": round(store_r, 2),
                "device_read_gb_s": round(device_r, 2),
                "read_ratio": round(store_r / device_r, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
