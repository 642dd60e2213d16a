"""Experts over many tokens: the CuTe DSL's products beside torch's grouped product and the passes around it.

Run on a Hopper card: python tests/bench/bench_grouped_experts.py [--tokens 2048,8192,32768] [--json F]. Shares are of
the rate at which the card multiplies 8192 x 8192 x 8192 just before; runs of both sides alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowinfer.kernels import experts as layer
from flowinfer.kernels import grouped_experts
from flowinfer.kernels.activation import silu_mul

HIDDEN, WIDTH, EXPERTS, TOP = 2048, 768, 128, 8  # Qwen3-30B-A3B
DEVICE, BF16 = "cuda", torch.bfloat16


def medians_us(calls: dict[str, Callable[[], object]], *, repeats: int = 7) -> dict[str, float]:
    """Median microseconds of each, one call of each in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            if turn:
                times[name].append(start.elapsed_time(end) * 1e3)
    return {name: statistics.median(taken) for name, taken in times.items()}


def matmul_rate() -> float:
    """TFLOP/s of a square product in bf16."""
    a = torch.randn(8192, 8192, device=DEVICE, dtype=BF16)
    return 2 * 8192**3 / medians_us({"square": lambda: a @ a.T})["square"] / 1e6


def measure(tokens: int, gate_up: Tensor, down: Tensor) -> dict[str, Any]:
    """Times of the parts and of the whole layer on both ways, and how far their results lie apart."""
    generator = torch.Generator(device=DEVICE).manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, device=DEVICE, generator=generator).to(BF16)
    logits = torch.randn(tokens, EXPERTS, device=DEVICE, generator=generator).to(BF16)
    ids, weights = layer.route(logits, TOP, norm_topk=True)
    chosen, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(EXPERTS, device=DEVICE, dtype=torch.int32), right=True).int()
    rows = x[order // TOP]
    wide = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
    h = silu_mul(wide)
    blocks = grouped_experts.lay_out(ids, EXPERTS)
    h_blocks = grouped_experts.gated_rows(x, gate_up, blocks)
    residual = torch.zeros_like(x)
    rate = matmul_rate()
    us = medians_us({
        "torch: gather": lambda: x[order // TOP],
        "torch: gate and up": lambda: torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends),
        "torch: silu": lambda: silu_mul(wide),
        "torch: down": lambda: torch._grouped_mm(h, down.transpose(1, 2), offs=ends),
        "torch: layer": lambda: layer._by_grouped_mm(x, ids, weights, gate_up, down, residual, None),
        "cute: lay out": lambda: grouped_experts.lay_out(ids, EXPERTS),
        "cute: gather, gate and up, silu": lambda: grouped_experts.gated_rows(x, gate_up, blocks),
        "cute: down": lambda: grouped_experts.down_rows(h_blocks, down, blocks),
        "cute: layer": lambda: layer._by_blocks(x, ids, weights, gate_up, down, residual, None),
    })  # fmt: skip
    pairs = tokens * TOP
    flops = {"gate and up": 4 * pairs * HIDDEN * WIDTH, "down": 2 * pairs * HIDDEN * WIDTH}
    tflops = {
        name: flops["down" if name.endswith("down") else "gate and up"] / us[name] / 1e6
        for name in us if name.endswith("down") or "gate and up" in name
    }  # fmt: skip
    mine, other = torch.zeros_like(x), torch.zeros_like(x)
    layer._by_blocks(x, ids, weights, gate_up, down, mine, None)
    layer._by_grouped_mm(x, ids, weights, gate_up, down, other, None)
    apart = ((mine.double() - other.double()).norm() / other.double().norm()).item()
    return {
        "tokens": tokens, "us": us, "tflop_s": tflops, "matmul_tflop_s": rate,
        "share_of_roofline": {name: value / rate for name, value in tflops.items()},
        "layer_speedup": us["torch: layer"] / us["cute: layer"], "relative_difference": apart,
    }  # fmt: skip


def main() -> None:
    """Prints a line for each part and writes all results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="2048,8192,32768")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="to be noted in the file")
    args = parser.parse_args()
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    gate_up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, device=DEVICE, generator=generator).div_(HIDDEN**0.5).to(BF16)
    down = torch.randn(EXPERTS, HIDDEN, WIDTH, device=DEVICE, generator=generator).div_(WIDTH**0.5).to(BF16)
    found = []
    for tokens in map(int, args.tokens.split(",")):
        found.append(measure(tokens, gate_up, down))
        shares = found[-1]["share_of_roofline"]
        for name, us in found[-1]["us"].items():
            share = f"{found[-1]['tflop_s'][name]:6.0f} TFLOP/s {shares[name]:4.0%}" if name in shares else ""
            print(f"{tokens:6} {name:32} {us:8.1f} us {share}", flush=True)
        print(
            f"{tokens:6} layer {found[-1]['layer_speedup']:.3f}x, apart {found[-1]['relative_difference']:.1e}",
            flush=True,
        )
    if args.json:
        about = {"card": torch.cuda.get_device_name(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
        args.json.write_text(json.dumps(about | {"commit": args.commit, "results": found}, indent=1))


if __name__ == "__main__":
    main()
