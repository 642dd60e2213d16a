"""GB/s between a GPU's KV memory and the disk tier, and what restoring costs the work that the GPU does meanwhile.

PYTHONPATH=. python tests/bench/bench_disk_gpu.py [--folder DIR] [--gib 4] [--json FILE]
FLOWINFER_TEST_DEVICE=cuda:0 pytest tests/cache/test_lower_tiers.py tests/cache/test_disk_tier.py

Blocks have the shape of Qwen3-8B in bfloat16 (9.4 MB of 64 tokens). Rates beside those of plain copies through pinned
memory and of plain O_DIRECT in the same run. Every byte that comes back is compared.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_disk import memory, plain

from flowinfer.cache.disk.io import padded
from flowinfer.cache.disk.retention import Retention
from flowinfer.cache.disk.store import DiskStore, StoreSettings
from flowinfer.engine.layout import KVLayout
from flowinfer.engine.staging import Staging

LAYOUT = KVLayout(model="bench", dtype="bfloat16", num_layers=36, num_kv_heads=8, head_dim=128)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of a piece of work, with what it leaves on the device."""
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


def pinned_copies(kv: torch.Tensor) -> tuple[float, float]:
    """Bytes a second to the host and back, a block at a time through pinned memory."""
    host = torch.empty_like(kv[0], device="cpu", pin_memory=True)
    size = kv.numel() * kv.element_size()
    out = timed(lambda: [host.copy_(block, non_blocking=True) for block in kv], kv.device)
    back = timed(lambda: [block.copy_(host, non_blocking=True) for block in kv], kv.device)
    return size / out, size / back


class Steps(threading.Thread):
    """Matrix products of a fixed size, as decode steps would be: how many a second."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(daemon=True)
        self.device, self.count, self.running = device, 0, True

    def run(self) -> None:
        x = torch.randn(4096, 4096, device=self.device, dtype=torch.bfloat16)
        while self.running:
            for _ in range(8):
                x = torch.nn.functional.normalize(x @ x, dim=-1)
            torch.cuda.current_stream(self.device).synchronize()
            self.count += 8

    def rate(self, work: Callable[[], object]) -> float:
        """Steps a second while `work` runs."""
        before, began = self.count, time.perf_counter()
        work()
        return (self.count - before) / (time.perf_counter() - began)


def run(folder: Path, gib: float) -> dict[str, float]:
    """All figures; raises where a byte differs."""
    device = torch.device("cuda")
    count = int(gib * (1 << 30)) // LAYOUT.block_bytes
    kv = torch.empty((count, *LAYOUT.block_shape), dtype=torch.bfloat16, device=device)
    kv.view(torch.uint8).random_(0, 255)
    size = count * LAYOUT.block_bytes
    staging, blocks = Staging(kv, LAYOUT), list(range(count))
    names = [number.to_bytes(16, "little") for number in blocks]
    retention = Retention({"bench": 86_400.0})
    settings = StoreSettings(path=folder / "kv", size=max(32 << 30, 4 * size), retention=retention, backlog=2 * size)
    store = DiskStore(settings)

    def put(first: int, payloads: list[memoryview]) -> list[bytes]:
        pairs = list(zip(names[first : first + len(payloads)], payloads, strict=True))
        return store.put(pairs, namespace="bench", cls="bench").result()

    def load(first: int, targets: list[memoryview]) -> int:
        return sum(store.get(names[first : first + len(targets)], targets, "bench"))

    def restore() -> None:
        assert staging.read(blocks, staging.mark(), load) == count, store.counts  # type: ignore[arg-type]

    out, back = pinned_copies(kv.clone())
    expected = kv.clone()
    write_s = timed(lambda: staging.write(blocks, staging.mark(), put), device)  # type: ignore[arg-type]
    assert store.contains(names, "bench") == count, store.counts
    kv.zero_()
    read_s = timed(restore, device)
    assert torch.equal(kv.view(torch.uint8), expected.view(torch.uint8)), "a byte came back wrong"
    steps = Steps(device)
    steps.start()
    time.sleep(1.0)
    alone = steps.rate(lambda: time.sleep(2.0))
    beside = steps.rate(restore)
    steps.running = False
    steps.join()
    store.close()
    data = memory(min(size, 2 << 30))
    device_write, device_read = plain(folder, data, padded(LAYOUT.block_bytes))
    figures = {
        "block_mb": LAYOUT.block_bytes / 1e6,
        "write_gb_s": size / write_s / 1e9,
        "device_write_gb_s": device_write / 1e9,
        "read_gb_s": size / read_s / 1e9,
        "device_read_gb_s": device_read / 1e9,
        "pinned_out_gb_s": out / 1e9,
        "pinned_in_gb_s": back / 1e9,
        "steps_a_second": alone,
        "steps_beside_restoring": beside,
        "read_of_device": size / read_s / device_read,
        "steps_kept": beside / alone,
    }
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    """Prints a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder, prefix="flowinfer-disk-"))
    try:
        figures = {"device": torch.cuda.get_device_name(), **run(folder, args.gib)}
    finally:
        shutil.rmtree(folder)
    print(json.dumps(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
