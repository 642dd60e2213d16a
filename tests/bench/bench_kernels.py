"""GPU kernels by themselves: tile searches and shares of the card's read or matmul rate. Run as a script on a card.

Run: python tests/bench/bench_kernels.py [--only linear,attention,...] [--json F]. Candidates are compiled by several
processes first; then each is timed as a CUDA graph of calls over weights that together exceed the L2 cache.
"""

# ruff: noqa: B023, E501, F821 -- the closures are called before their loop goes on
from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from flowinfer.kernels import decode_attention as decode_module
from flowinfer.kernels import tuned
from flowinfer.kernels.decode_attention import DecodeBatch, Scratch, decode_attention
from flowinfer.kernels.decode_attention import triton as decode_kernel
from flowinfer.kernels.experts import bucket, gather_gated, route, weighted
from flowinfer.kernels.experts import triton as expert_kernel
from flowinfer.kernels.prefill_attention import plan_tiles, prefill_attention
from flowinfer.kernels.rope import Heads
from flowinfer.kernels.skinny_linear import skinny_linear
from flowinfer.kernels.skinny_linear import triton as linear_kernel

DEVICE = "cuda"
BF16 = torch.bfloat16
MODELS = {  # heads, hidden, ffn, layers
    "smollm2-135m": (Heads(9, 3, 64), 576, 1536),
    "qwen3-8b": (Heads(32, 8, 128), 4096, 12288),
    "qwen3-30b-a3b": (Heads(32, 4, 128), 2048, 768),
}


def graph_us(calls: list[Callable[[], object]], *, repeats: int = 9) -> float:
    """Median microseconds of one call, timed as replays of a graph that holds all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    del graph
    return statistics.median(times[2:])


# ------------------------------------------------------------------------------------------------------------- linear


def linear_cases() -> list[tuple[str, int, int, dict[str, bool]]]:
    """(name, size_in, size_out, what is fused) of every projection of the models."""
    cases: list[tuple[str, int, int, dict[str, bool]]] = []
    for name, (heads, hidden, ffn) in MODELS.items():
        n, _, d = heads
        cases.append((f"{name} out", n * d, hidden, {}))
        if name != "qwen3-30b-a3b":
            cases += [(f"{name} gate_up", hidden, ffn, {"gated": True}), (f"{name} down", ffn, hidden, {})]
    return cases


def linear_candidates(rows: int) -> list[tuple[int, int, int, int, int]]:
    """Tiles to try: BM, BN, BK, warps, stages."""
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    found = []
    for block_n, block_k, warps, stages in itertools.product((16, 32, 64), (64, 128, 256, 512), (2, 4, 8), (3, 5)):
        per_stage = (block_m + block_n) * block_k * 2
        if 24_000 <= per_stage * stages <= 100_000 and block_n * block_k // warps >= 512:
            found.append((block_m, block_n, block_k, warps, stages))
    return found


def linear_calls(size_in: int, size_out: int, rows: int, fused: dict[str, bool]) -> tuple[list[Any], list[Any]]:
    """Calls of ours and of cuBLAS over enough different weights."""
    gated = fused.get("gated", False)
    outs = size_out * (2 if gated else 1)
    copies = max(2, min(40, math.ceil(180e6 / (outs * size_in * 2))))
    weights = [torch.randn(outs, size_in, device=DEVICE, dtype=BF16) * 0.02 for _ in range(copies)]
    x = torch.randn(rows, size_in, device=DEVICE, dtype=BF16)
    norm = torch.ones(size_in, device=DEVICE, dtype=BF16) if fused.get("norm") else None
    residual = torch.randn(rows, size_out, device=DEVICE, dtype=BF16) if fused.get("sum") else None
    ours = [lambda w=w: skinny_linear(x, w, norm_I=norm, eps=1e-6, residual_MO=residual, gated=gated) for w in weights]
    return ours, [lambda w=w: F.linear(x, w) for w in weights]


def warm_linear(job: tuple[int, tuple[int, int, int, int, int], int]) -> None:
    """Compiles one candidate for the fused forms, in a process of its own."""
    rows, tiles, case = job
    linear_kernel.tiles = lambda *args: tiles
    _, size_in, size_out, fused = linear_cases()[case]
    try:
        linear_calls(size_in, min(size_out, 4096), rows, fused)[0][0]()
    except Exception as error:
        print("skip", tiles, str(error)[:80])


def search_linear(rows_list: tuple[int, ...]) -> list[dict[str, Any]]:
    """The best tiles for each projection and row count, beside cuBLAS."""
    found = []
    cases = linear_cases()
    for rows in rows_list:
        for name, size_in, size_out, fused in cases:
            ours, theirs = linear_calls(size_in, size_out, rows, fused)
            results = []
            even = [c for c in linear_candidates(rows) if size_in % c[2] == 0 and size_out % c[1] == 0]
            for tiles in even:
                linear_kernel.tiles = lambda *args, tiles=tiles: tiles
                try:
                    results.append((graph_us(ours, repeats=5), tiles))
                except Exception as error:
                    print("skip", name, tiles, str(error)[:60])
            results.sort()
            bytes_ = size_in * size_out * 2 * (2 if fused.get("gated") else 1)
            cublas = graph_us(theirs, repeats=5)
            best = results[0]
            row = {"op": "linear", "case": name, "rows": rows, "us": best[0], "tiles": best[1], "next": results[1:4],
                   "cublas_us": cublas, "tb_s": bytes_ / best[0] / 1e6, "cublas_tb_s": bytes_ / cublas / 1e6}  # fmt: skip
            print(f"{name:24} rows {rows:3}  {best[0]:7.2f} us {row['tb_s']:.2f} TB/s {best[1]}  "
                  f"cuBLAS {cublas:7.2f} us {row['cublas_tb_s']:.2f}", flush=True)  # fmt: skip
            found.append(row)
    return found


# ---------------------------------------------------------------------------------------------------------- attention


def warm_attention(job: tuple[str, int, tuple[int, int]]) -> None:
    """Compiles one candidate in a process of its own."""
    name, rows, launch = job
    heads = MODELS[name][0]
    n, k, d = heads
    decode_kernel.LAUNCH = launch
    kv = torch.randn(4, 1, 2, k, 64, d, device=DEVICE, dtype=BF16)
    ints = [torch.zeros(rows, device=DEVICE).int() for _ in range(2)]
    batch = DecodeBatch(ints[0], ints[1] + 1, torch.zeros(rows, 16, device=DEVICE).int())
    rope = tuple(torch.randn(2000, d, device=DEVICE).to(BF16) for _ in range(2))
    norms = tuple(torch.ones(d, device=DEVICE, dtype=BF16) for _ in range(2)) if d == 128 else None
    qkv = torch.randn(rows, (n + 2 * k) * d, device=DEVICE, dtype=BF16)
    scratch = Scratch.make(rows, heads, torch.device(DEVICE))
    decode_attention(qkv, kv, 0, heads, batch, rope, norms, 1e-6, scratch)
    torch.cuda.synchronize()


def search_attention() -> list[dict[str, Any]]:
    """Decode attention: share of the read rate over batch sizes, by launch parameters."""
    found = []
    for name, (heads, _, _) in MODELS.items():
        n, k, d = heads
        for rows, context in ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (512, 512), (4, 16_384)):
            per = -(-context // 64)
            copies = max(1, math.ceil(150e6 / (rows * context * 2 * k * d * 2)))
            kv = torch.randn(rows * per * 1, min(copies, 24), 2, k, 64, d, device=DEVICE, dtype=BF16)
            tables = torch.randperm(rows * per, device=DEVICE).int().view(rows, per)
            batch = DecodeBatch(
                torch.arange(rows, device=DEVICE).int(), torch.full((rows,), context, device=DEVICE).int(), tables
            )
            qkv = torch.randn(rows, (n + 2 * k) * d, device=DEVICE, dtype=BF16)
            rope = tuple(torch.randn(20_000, d, device=DEVICE).to(BF16) for _ in range(2))
            norms = tuple(torch.ones(d, device=DEVICE, dtype=BF16) for _ in range(2)) if d == 128 else None
            bytes_ = rows * context * 2 * k * d * 2
            results = []
            for programs, warps, stages in itertools.product((264, 528, 1056), (2, 4, 8), (2, 3, 4)):
                decode_module.PROGRAMS = programs
                decode_kernel.LAUNCH = (warps, stages)
                scratch = Scratch.make(rows, heads, torch.device(DEVICE))
                calls = [
                    lambda layer=layer, s=scratch: decode_attention(qkv, kv, layer, heads, batch, rope, norms, 1e-6, s)
                    for layer in range(kv.shape[1])
                ]
                try:
                    results.append((graph_us(calls, repeats=5), (programs, warps, stages)))
                except Exception as error:
                    print("skip", name, programs, warps, stages, str(error)[:60])
            results.sort()
            best = results[0]
            print(f"{name:16} decode attention {rows:3} x {context:6}  {best[0]:8.2f} us  "
                  f"{bytes_ / best[0] / 1e6:.2f} TB/s {best[1]}  then {results[1:4]}", flush=True)  # fmt: skip
            found.append({"op": "decode_attention", "case": name, "rows": rows, "context": context, "us": best[0],
                          "best": best[1], "all": results, "tb_s": bytes_ / best[0] / 1e6})  # fmt: skip
            del kv
    return found


def search_prefill() -> list[dict[str, Any]]:
    """Prefill attention of one whole prompt: ours and torch's backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    found = []
    for name, (heads, _, _) in MODELS.items():
        n, k, d = heads
        tokens = 8192
        q, key, value = (torch.randn(1, h, tokens, d, device=DEVICE, dtype=BF16) for h in (n, k, k))
        flops = 4 * n * d * tokens * (tokens + 1) / 2
        row: dict[str, Any] = {"op": "prefill_attention", "case": name}
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

            def call(backend: Any = backend) -> Any:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, key, value, is_causal=True, enable_gqa=True)

            try:
                row[backend.name] = flops / graph_us([call]) / 1e6
            except Exception as error:
                row[backend.name] = str(error)[:100]
        try:
            plain = lambda: F.scaled_dot_product_attention(q, key, value, is_causal=True, enable_gqa=True)  # noqa: E731
            row["default"] = flops / graph_us([plain]) / 1e6
        except Exception as error:
            row["default"] = str(error)[:100]
        kv = torch.randn(tokens // 64, 1, 2, k, 64, d, device=DEVICE, dtype=BF16)
        import numpy as np

        tables = np.random.default_rng(0).permutation(tokens // 64).astype(np.int32)[None]
        starts, lens = np.array([0, tokens], np.int32), np.array([tokens], np.int32)
        packed = torch.randn(tokens, n + k, d, device=DEVICE, dtype=BF16)
        tiling = plan_tiles(starts, lens, tables, heads=heads, device=torch.device(DEVICE), dtype=BF16)
        row["ours"] = flops / graph_us([lambda: prefill_attention(packed, kv, 0, heads, tiling)]) / 1e6
        print({key: round(v) if isinstance(v, float) else v for key, v in row.items()}, "TFLOP/s", flush=True)
        found.append(row)
    return found


# ------------------------------------------------------------------------------------------------------------- experts


def expert_candidates() -> list[tuple[int, int, int, int]]:
    """BN, BK, warps, stages of both products."""
    sizes = ((32, 64), (32, 128), (64, 64), (64, 128), (128, 64), (128, 128))
    return [(bn, bk, warps, stages) for (bn, bk), warps, stages in itertools.product(sizes, (4, 8), (3, 4))]


def expert_fits(block_m: int, candidate: tuple[int, int, int, int], which: str) -> bool:
    """Whether the tiles in flight fit the shared memory of a multiprocessor."""
    block_n, block_k, _, stages = candidate
    return (block_m + block_n * (2 if which == "gated" else 1)) * block_k * 2 * stages <= 220_000


def expert_setup(rows: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    hidden, width, num, top, layers = 2048, 768, 128, 8, 3
    gate_up = [torch.randn(num, 2 * width, hidden, device=DEVICE, dtype=BF16) * 0.02 for _ in range(layers)]
    down = [torch.randn(num, hidden, width, device=DEVICE, dtype=BF16) * 0.02 for _ in range(layers)]
    x = torch.randn(rows, hidden, device=DEVICE, dtype=BF16)
    # Some experts are liked more, so that 128 rows use about 110 of the 128, as in models of random weights.
    logits = torch.randn(rows, num, device=DEVICE) + 0.8 * torch.randn(num, device=DEVICE)
    ids, weights = route(logits.to(BF16), top, norm_topk=True)
    return gate_up, down, x, bucket(ids, weights, num)


def set_expert_tiles(block_m: int, gated: Any, down: Any) -> None:
    def tiles(*args: Any, gated: bool, g: Any = gated, d: Any = down) -> Any:
        return (block_m, *(g if gated else d))

    expert_kernel._tiles = tiles


def warm_expert(job: tuple[int, tuple[int, int, int, int], str]) -> None:
    """Compiles one candidate in a process of its own."""
    block_m, candidate, which = job
    try:
        gate_up = torch.empty(128, 1536, 2048, device=DEVICE, dtype=BF16)
        down = torch.empty(128, 2048, 768, device=DEVICE, dtype=BF16)
        x = torch.randn(8, 2048, device=DEVICE, dtype=BF16)
        ids, weights = route(torch.randn(8, 128, device=DEVICE, dtype=BF16), 8, norm_topk=True)
        routing = bucket(ids, weights, 128)
        set_expert_tiles(block_m, candidate, candidate)
        if which == "gated":
            gather_gated(x, gate_up, routing)
        else:
            weighted(torch.randn(64, 768, device=DEVICE, dtype=BF16), down, routing)
    except Exception as error:
        print("skip", job, str(error)[:80])


def search_experts(rows_list: tuple[int, ...]) -> list[dict[str, Any]]:
    found = []
    for rows in rows_list:
        gate_up, down, x, routing = expert_setup(rows)
        touched = int((routing.counts > 0).sum())
        set_expert_tiles(16, (32, 128, 4, 3), (64, 128, 4, 3))
        h = gather_gated(x, gate_up[0], routing)
        for which in ("gated", "down"):
            results = []
            for block_m, candidate in itertools.product((16, 32, 64), expert_candidates()):
                if (block_m > 16 and rows < 128) or (block_m < 32 and rows > 256):
                    continue
                set_expert_tiles(block_m, candidate, candidate)
                if which == "gated":
                    calls: list[Any] = [lambda w=w: gather_gated(x, w, routing) for w in gate_up]
                else:
                    calls = [lambda w=w: expert_kernel.launch_down(h, w, routing, y) for w in down]
                    y = torch.empty(h.shape[0], 2048, device=DEVICE, dtype=BF16)
                try:
                    results.append((graph_us(calls, repeats=5), (block_m, *candidate)))
                except Exception as error:
                    print("skip", which, block_m, candidate, str(error)[:60])
            results.sort()
            size = touched * (2 if which == "gated" else 1) * 768 * 2048 * 2
            best = results[0]
            print(f"experts {which:5} rows {rows:3} touched {touched:3}  {best[0]:8.2f} us  "
                  f"{size / best[0] / 1e6:.2f} TB/s {best[1]} then {results[1:4]}", flush=True)  # fmt: skip
            found.append({"op": "experts", "case": which, "rows": rows, "us": best[0], "tiles": best[1],
                          "tb_s": size / best[0] / 1e6, "next": results[1:6]})  # fmt: skip
    return found


def keep_experts(results: list[dict[str, Any]]) -> None:
    """Enters the best tiles by mean rows of an expert (8 choices of 128)."""
    shapes: dict[str, Any] = {}
    for row in results:
        if row["op"] == "experts":
            key = f"{row['case']} 128 x {2048 if row['case'] == 'gated' else 768}"
            shapes.setdefault(key, []).append([row["rows"] * 8 / 128, list(row["tiles"])])
    tuned.write("experts", tuned.card(), shapes)


def time_grouped() -> list[dict[str, Any]]:
    """torch's grouped product at prefill sizes."""
    rows, num = 16_384 * 8, 128
    ends = (torch.arange(1, num + 1, device=DEVICE) * (rows // num)).int()
    found = []
    for name, size_in, size_out in (("up", 2048, 1536), ("down", 768, 2048)):
        x = torch.randn(rows, size_in, device=DEVICE, dtype=BF16)
        w = torch.randn(num, size_out, size_in, device=DEVICE, dtype=BF16)
        us = graph_us([lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends)])
        found.append({"op": "grouped_mm", "case": name, "us": us, "tflop_s": 2 * rows * size_in * size_out / us / 1e6})
        print(found[-1], flush=True)
    return found


def main() -> None:
    """Runs the parts named by --only and writes all results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="prefill,grouped,attention,linear,experts")
    parser.add_argument("--rows", default="1,32,64")
    parser.add_argument("--expert-rows", default="8,128,256,512")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="keep the best tiles in the kernels' tuned.json")
    args = parser.parse_args()
    only, rows = args.only.split(","), tuple(int(r) for r in args.rows.split(","))
    expert_rows = tuple(int(r) for r in args.expert_rows.split(","))
    began = time.perf_counter()
    jobs_linear = [
        (r, tiles, case)
        for r in rows for tiles in linear_candidates(r) for case in (0, 1, 4)
    ] if "linear" in only else []  # fmt: skip
    jobs_expert = [
        (m, c, which)
        for m in (16, 32, 64) for c in expert_candidates() for which in ("gated", "down") if expert_fits(m, c, which)
    ] if "experts" in only else []  # fmt: skip
    jobs_attention = [
        (name, rows, launch) for name in MODELS for rows in (1, 512) for launch in itertools.product((2, 4, 8), (2, 3, 4))
    ] if "attention" in only else []  # fmt: skip
    if jobs_linear or jobs_expert or jobs_attention:
        with multiprocessing.get_context("spawn").Pool(15) as pool:
            pool.map(warm_linear, jobs_linear, chunksize=2)
            pool.map(warm_expert, jobs_expert, chunksize=2)
            pool.map(warm_attention, jobs_attention, chunksize=1)
        print(
            f"compiled {len(jobs_linear) + len(jobs_expert) + len(jobs_attention)} in {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "prefill": search_prefill,
        "grouped": time_grouped,
        "attention": search_attention,
        "linear": lambda: search_linear(rows),
        "experts": lambda: search_experts(expert_rows),
    }
    results: list[dict[str, Any]] = []
    for name, part in parts.items():
        if name in only:
            began = time.perf_counter()
            try:
                results += part()
            except Exception as error:
                print(name, "broke:", repr(error)[:300])
            if name == "experts" and args.write:
                keep_experts(results)
            print(f"-- {name}: {time.perf_counter() - began:.0f} s", flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
