"""GB/s of KV blocks, or parts of them, to pinned host memory and back: packed on the card first, or a copy for each.

Run on a card: PYTHONPATH=. python tests/bench/bench_staging.py [--json F]. Every byte that comes back is compared.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flowinfer.engine import block_copies
from flowinfer.engine.layout import KVLayout
from flowinfer.engine.staging import Staging

LAYERS = (1, 4, 15, 60, 240)  # of a block: 16 KB each


def measure(layers: int, packed: bool, total: int) -> dict[str, Any]:
    """Bytes a second in both directions, of blocks in no order."""
    layout = KVLayout(model="bench", dtype="bfloat16", num_layers=layers, num_kv_heads=1, head_dim=64)
    count = total // layout.block_bytes
    kv = torch.empty(count, *layout.block_shape, dtype=torch.bfloat16, device="cuda")
    kv.view(torch.uint8).random_(0, 255)
    before, blocks = kv.clone(), torch.randperm(count).tolist()
    block_copies.PACKED_BYTES = 1 << 40 if packed else 0
    made = Staging(kv, layout)
    kept: list[bytes] = []

    def store(first: int, memory: Sequence[memoryview]) -> list[None]:
        kept.extend(bytes(one) for one in memory[:1])
        return [None] * len(memory)

    def load(first: int, memory: Sequence[memoryview]) -> int:
        return len(memory)

    rates = {}
    for name, run in (("out", lambda: made.write(blocks, made.mark(), store)),
                      ("in", lambda: made.read(blocks, made.mark(), load))):  # fmt: skip
        run()
        began = time.perf_counter()
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        rates[f"{name}_gb_s"] = 3 * total / (time.perf_counter() - began) / 1e9
    assert kept[0] == before[blocks[0]].view(torch.uint8).cpu().numpy().tobytes(), "a byte came out wrong"
    return {"block_bytes": layout.block_bytes, "packed": packed, **rates}


def main() -> None:
    """Prints a line a size and way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--total", type=int, default=256 << 20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [measure(layers, packed, args.total) for layers in LAYERS for packed in (False, True)]
    for row in rows:
        way = "packed" if row["packed"] else "each"
        print(
            f"{row['block_bytes'] / 1024:7.0f} KB {way:>6}  out {row['out_gb_s']:6.2f} GB/s  in {row['in_gb_s']:6.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
