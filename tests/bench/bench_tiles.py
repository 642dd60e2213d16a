"""Products in tiles of bfloat16 pairs, and of bytes, against oneDNN's in bfloat16, and what the machine can do.

Run: python tests/bench/bench_tiles.py [--rounds 5] [--json FILE]. A number is the median milliseconds of all products
of SmolLM2-135M, 30 layers one after the other, so that weights come from memory; they take turns. The ratio and the
share are those of bfloat16 tiles. The limit is the longer of reading the weights once, at the rate of a sum over
400 MB, and of their arithmetic, at the rate of oneDNN's product of 2,048 rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import machine
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flowinfer.engine.models.linear import PackedLinear
from flowinfer.engine.models.quantized import Int8
from flowinfer.kernels.int8_linear import Int8Weight, int8_linear
from flowinfer.kernels.tile_linear import TileWeight, tile_linear

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
LAYERS = 30
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)


def seconds(call: Callable[[], object]) -> float:
    """Of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def read_rate() -> float:
    """Bytes a second from memory, by all threads."""
    numbers = torch.ones(100_000_000)
    return 4e8 / statistics.median(seconds(numbers.sum) for _ in range(5))


def multiply_rate() -> float:
    """FLOPs a second of a large bfloat16 product."""
    x, weight = torch.randn(2048, 2048).bfloat16(), PackedLinear(torch.randn(2048, 2048).bfloat16())
    return 2 * 2048**3 / statistics.median(seconds(lambda: weight(x)) for _ in range(5))


def compare(rows: int, rounds: int) -> tuple[float, float, float]:
    """Median seconds of all products by tiles, by tiles of bytes and by oneDNN."""
    weights = [(torch.randn(o, i) * i**-0.5).bfloat16() for _ in range(LAYERS) for o, i in SHAPES]
    xs = {i: torch.randn(rows, i).bfloat16() for _, i in SHAPES}
    tiles, packed = [TileWeight(weight) for weight in weights], [PackedLinear(weight) for weight in weights]
    quantized = [Int8(weight) for weight in weights]
    eights = [Int8Weight(weight.codes, weight.scale) for weight in quantized]
    inputs: list[Tensor] = [xs[weight.shape[1]] for weight in weights]
    ours, eight, theirs = [], [], []
    for _ in range(rounds + 1):
        ours.append(seconds(lambda: [tile_linear(x, weight) for x, weight in zip(inputs, tiles, strict=True)]))
        eight.append(seconds(lambda: [int8_linear(x, weight) for x, weight in zip(inputs, eights, strict=True)]))
        theirs.append(seconds(lambda: [weight(x) for x, weight in zip(inputs, packed, strict=True)]))
    return statistics.median(ours[1:]), statistics.median(eight[1:]), statistics.median(theirs[1:])


def main() -> None:
    """Prints a row for each number of rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    numbers = LAYERS * sum(o * i for o, i in SHAPES)
    read, multiply = read_rate(), multiply_rate()
    table = Table("rows", "tiles ms", "int8 ms", "oneDNN ms", "times as fast", "share of limit", title=machine())
    said = []
    for rows in ROWS:
        ours, eight, theirs = compare(rows, args.rounds)
        limit = max(2 * numbers / read, 2 * numbers * rows / multiply)
        said.append({"rows": rows, "tiles_s": ours, "int8_s": eight, "onednn_s": theirs, "limit_s": limit})
        table.add_row(
            str(rows), *(f"{s * 1e3:.1f}" for s in (ours, eight, theirs)), f"{theirs / ours:.2f}", f"{limit / ours:.2f}"
        )
    Console().print(table, f"read {read / 1e9:.1f} GB/s, multiplied {multiply / 1e9:.0f} GFLOP/s")
    if args.json:
        rates = {"bytes_per_s": read, "flops_per_s": multiply}
        args.json.write_text(json.dumps({"machine": machine(), **rates, "rows": said}, indent=1))


if __name__ == "__main__":
    main()
