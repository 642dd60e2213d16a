"""DeepSeek-V4 on a card: its two large kernels against their rooflines, right answers, and time a decode step.

Run: python tests/bench/bench_v4.py [--only check,kernels,search,steps] [--json F]. Kernels have V4-Flash's shapes (64
heads of 512, 64 index heads of 128, 512 of the entries); answers and steps are flowinfer-mini's. "before" is the model
of plain torch operations, a step of which the host starts one by one; "after" the fused one in a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_kernels import graph_us
from torch import Tensor

from flowinfer.engine import hub
from flowinfer.engine.models import load_model
from flowinfer.engine.models.deepseek_v4 import load as loading
from flowinfer.engine.step import StepInput
from flowinfer.kernels import sparse_attention as module
from flowinfer.kernels.decode_attention import DecodeBatch, Scratch
from flowinfer.kernels.indexer_topk import indexer_topk, indexer_topk_reference
from flowinfer.kernels.indexer_topk import triton as indexer_kernel
from flowinfer.kernels.sparse_attention import Parts, num_splits, sparse_attention, sparse_attention_reference
from flowinfer.kernels.sparse_attention import triton as kernel
from flowinfer.kernels.token_rows import TokenRows

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
READ, MATMUL = 4.15e6, 770e6  # bytes and FLOPs a microsecond of an H200
HEADS, SIZE, REACH, TOP = 64, 512, 128, 512
INDEX_HEADS, INDEX_SIZE, PAGE = 64, 128, 128
# Warps, stages, keys of a tile, tiles of a split, and whether places of keys are looked up before.
LAUNCHES = ((8, 2, 64, 2, False), (8, 3, 64, 2, True), (8, 5, 32, 4, True), (8, 5, 32, 8, True), (8, 3, 64, 4, True))
MODEL = "flowinfer-mini"


def rows_at(context: int, tokens: int, *, sequences: int) -> TokenRows:
    """The last tokens of sequences of one length, pages dealt at random."""
    pages = -(-context // PAGE)
    tables = torch.randperm(sequences * pages, device=DEVICE).int().view(sequences, pages)
    each = tokens // sequences
    slots = torch.arange(sequences, device=DEVICE).int().repeat_interleave(each)
    positions = (context - each + torch.arange(each, device=DEVICE)).int().repeat(sequences)
    none = torch.zeros_like(slots)
    return TokenRows(
        slots, positions, none + context - each, none + context, none, none, tables, PAGE, single=each == 1
    )


def time_indexer(context: int, tokens: int, sequences: int) -> dict[str, Any]:
    """Scores of all visible entries and the choice."""
    rows = rows_at(context, tokens, sequences=sequences)
    entries = context // 4
    keys = torch.randn(rows.block_tables.numel(), PAGE // 4, INDEX_SIZE, device=DEVICE, dtype=BF16)
    q = torch.randn(tokens, INDEX_HEADS, INDEX_SIZE, device=DEVICE, dtype=BF16)
    weights = torch.randn(tokens, INDEX_HEADS, device=DEVICE, dtype=BF16)
    us = graph_us([lambda: indexer_topk(q, weights, keys, rows, rate=4, top=TOP)] * 5)
    bytes_ = sequences * entries * INDEX_SIZE * 2 + q.numel() * 2 + tokens * TOP * 4
    flops = 2 * tokens * INDEX_HEADS * INDEX_SIZE * entries
    found = indexer_topk(q[-1:], weights[-1:], keys, rows.part(slice(-1, None)), rate=4, top=TOP)
    want = indexer_topk_reference(
        q[-1:].double(), weights[-1:].double(), keys.double(), rows.part(slice(-1, None)), rate=4, top=TOP
    )
    same = len(set(found[0].tolist()) & set(want[0].tolist())) / TOP
    return row("indexer_topk", f"{tokens} tokens of {sequences} x {context}", us, bytes_, flops) | {"as_float64": same}


def time_attention(context: int, tokens: int, sequences: int, *, rate: int) -> dict[str, Any]:
    """Over the window and the chosen (rate 4) or all (rate 128) entries."""
    rows = rows_at(context, tokens, sequences=sequences)
    each = PAGE // rate
    arena = torch.randn(rows.block_tables.numel(), (PAGE + each) * SIZE, device=DEVICE, dtype=BF16)
    window = arena[:, : PAGE * SIZE].view(-1, PAGE, SIZE)
    entries = arena[:, PAGE * SIZE :].view(-1, each, SIZE)
    q = torch.randn(tokens, HEADS, SIZE, device=DEVICE, dtype=BF16)
    sinks = torch.randn(HEADS, device=DEVICE)
    chosen, seen = None, context // rate
    if rate == 4:
        seen = min(TOP, seen)
        chosen = torch.rand(tokens, context // rate, device=DEVICE).topk(seen).indices.sort(-1).values.int()
    splits = num_splits(REACH, seen, kernel.tile_keys(SIZE, 2))
    parts = Parts.make(tokens, HEADS, SIZE, splits, DEVICE)
    options: dict[str, Any] = {"reach": REACH, "rate": rate, "sinks_N": sinks}
    us = graph_us([lambda: sparse_attention(q, window, entries, rows, chosen_TK=chosen, parts=parts, **options)] * 5)
    got = sparse_attention(q, window, entries, rows, chosen_TK=chosen, parts=parts, **options)[-1:]
    last = rows.part(slice(-1, None))
    want = sparse_attention_reference(
        q[-1:].double(), window.double(), entries.double(), last, chosen_TK=None if chosen is None else chosen[-1:],
        reach=REACH, rate=rate, sinks_N=sinks.double(),
    )  # fmt: skip
    keys = tokens * min(seen, context // rate) if rate == 4 else sequences * seen
    bytes_ = (keys + sequences * (REACH + tokens // sequences - 1)) * SIZE * 2 + 2 * q.numel() * 2
    if rate == 4:  # tokens of a sequence may choose the same entries: no more is read than there are
        most = sequences * context // rate
        bytes_ -= max(0, keys - most) * SIZE * 2
    flops = 4 * tokens * HEADS * SIZE * (REACH + seen)
    error = float((got.double() - want).norm() / want.norm())
    name = f"{tokens} tokens of {sequences} x {context}, rate {rate}"
    return row("sparse_attention", name, us, bytes_, flops) | {"error": error}


def row(op: str, case: str, us: float, bytes_: float, flops: float) -> dict[str, Any]:
    """A line of the table; share: of the roofline."""
    limit = max(bytes_ / READ, flops / MATMUL)
    return {"op": op, "case": case, "us": us, "roofline_us": limit, "share": limit / us}


def kernels() -> list[dict[str, Any]]:
    """Both kernels at decode and prefill sizes."""
    found = []
    cases = ((8_192, 1, 1), (65_536, 1, 1), (8_192, 32, 32), (65_536, 32, 32), (16_384, 512, 1))
    for context, tokens, sequences in cases:
        found.append(time_indexer(context, tokens, sequences))
        for rate in (4, 128):
            found.append(time_attention(context, tokens, sequences, rate=rate))
    for one in found:
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in one.items()}, flush=True)
    return found


def search() -> list[dict[str, Any]]:
    """Attention of sequences and of a prompt, by warps, stages, keys of a tile, and where those are looked up."""
    found = []
    keep = kernel.LAUNCH, kernel.tile_keys, kernel.PLACED_FROM, module.SPLIT_TILES
    for launch in LAUNCHES:
        warps, stages, keys, tiles, placed = launch
        module.SPLIT_TILES = kernel.SPLIT_TILES = tiles
        kernel.LAUNCH, kernel.PLACED_FROM = (warps, stages), 0 if placed else 1 << 20
        kernel.tile_keys = lambda size, bytes_, keys=keys: keys
        for tokens, sequences in ((1, 1), (32, 32), (512, 1)):
            try:
                one = time_attention(16_384, tokens, sequences, rate=4)
                found.append(one | {"launch": launch})
                print(*launch, tokens, f"{one['us']:.1f} us {one['share']:.2f} {one['error']:.1e}", flush=True)
            except Exception as error:
                print("skip", *launch, str(error)[:80])
    kernel.LAUNCH, kernel.tile_keys, kernel.PLACED_FROM, module.SPLIT_TILES = keep
    kernel.SPLIT_TILES = module.SPLIT_TILES
    at_once = indexer_kernel.AT_ONCE
    for indexer_kernel.AT_ONCE in (4_096, 8_192, 16_384):
        for tokens in (1, 32):
            one = time_indexer(65_536, tokens, tokens)
            found.append(one | {"at_once": indexer_kernel.AT_ONCE})
            print("top-k", indexer_kernel.AT_ONCE, tokens, f"{one['us']:.1f} us {one['as_float64']}", flush=True)
    indexer_kernel.AT_ONCE = at_once
    return found


# ------------------------------------------------------------------------------------------------------- flowinfer-mini


class Runner:
    """flowinfer-mini over an arena of its own."""

    def __init__(self, device: str, dtype: str, *, sequences: int = 1, context: int = 1_024, **options: Any) -> None:
        folder = hub.resolve(MODEL)
        self.model: Any = load_model(folder, dtype=dtype, device=device, **options)
        layout = hub.describe(folder).layout(dtype)
        pages = -(-context // layout.block_tokens)
        made = torch.Generator().manual_seed(0)
        self.tables = torch.randperm(sequences * pages, generator=made).int().view(sequences, pages)
        self.kv = torch.zeros((sequences * pages, *layout.block_shape), dtype=self.model.dtype, device=device)

    def step(self, tokens: np.ndarray, starts: list[int], counts: list[int]) -> Tensor:
        """Logits of tokens[starts[s] : starts[s] + counts[s]] of each sequence."""
        device = self.model.device
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        ends = np.cumsum([0, *counts]).astype(np.int32)
        step = StepInput(
            tokens=torch.from_numpy(tokens[positions]).to(device),
            positions=torch.from_numpy(positions).to(device),
            query_starts=ends,
            kv_lens=np.array([s + n for s, n in zip(starts, counts, strict=True)], np.int32),
            block_tables=self.tables.numpy()[: len(counts)],
            logit_rows=torch.arange(len(positions), device=device),
        )
        with torch.inference_mode():
            logits: Tensor = self.model.forward(step, self.kv)
        return logits

    def batch(self, lengths: list[int]) -> DecodeBatch:
        """Decode of all sequences at these lengths."""
        device = self.model.device
        ints = [torch.tensor(values, dtype=torch.int32, device=device) for values in (range(len(lengths)), lengths)]
        return DecodeBatch(ints[0], ints[1], self.tables.to(device))

    def scratch(self, rows: int) -> Scratch:
        """For `rows` rows of decode."""
        return Scratch.make(rows, self.model.heads, self.model.device)


def prompt(count: int) -> np.ndarray:
    """Token ids that the model has."""
    return np.random.default_rng(5).integers(10, 8_000, count).astype(np.int64)


def answers(run: Runner, tokens: np.ndarray, count: int, new: int, *, decode: bool) -> tuple[Tensor, list[int]]:
    """Logits of a prompt in two chunks, and the greedy tokens behind it."""
    text = tokens[:count].copy()
    cut = count * 2 // 3
    rows = torch.cat([run.step(text, [0], [cut]), run.step(text, [cut], [count - cut])]).float().cpu()
    chosen = [int(rows[-1].argmax())]
    for _ in range(new - 1):
        text = np.append(text, chosen[-1])
        if decode:
            last = torch.tensor([chosen[-1]], dtype=torch.int32, device=run.model.device)
            with torch.inference_mode():
                logits = run.model.decode(last, run.batch([len(text)]), run.kv, run.scratch(1))
        else:
            logits = run.step(text, [len(text) - 1], [1])
        chosen.append(int(logits[0].argmax()))
    return rows, chosen


def check() -> list[dict[str, Any]]:
    """The card's answers beside the CPU's float32 ones, and bytes of decode beside those of prefill."""
    torch.set_num_threads(8)
    tokens, found = prompt(1_000), []
    plain = Runner("cpu", "float32")
    kept = {count: answers(plain, tokens, count, 16, decode=False) for count in (9, 200, 720)}
    for dtype, options in (("float32", {}), ("bfloat16", {}), ("bfloat16", {"batch_invariant": True})):
        run = Runner("cuda:0", dtype, **options)
        for count, (rows, chosen) in kept.items():
            got, ours = answers(run, tokens, count, 16, decode=True)
            error = float((got - rows).norm() / rows.norm())
            same = sum(a == b for a, b in zip(ours, chosen, strict=True))
            found.append({"dtype": dtype, **options, "prompt": count, "error": error, "greedy_alike": f"{same}/16"})
            print(found[-1], flush=True)
        if options:
            found.append(alike(run, tokens))
            print(found[-1], flush=True)
    return found


def alike(run: Runner, tokens: np.ndarray) -> dict[str, Any]:
    """Rows of logits whose bytes differ between one step over all tokens, chunks, and single tokens by decode."""
    whole = run.step(tokens, [0], [730])
    chunks = torch.cat([run.step(tokens, [a], [b - a]) for a, b in ((0, 131), (131, 132), (132, 700), (700, 720))])
    alone = []
    for at in range(720, 730):
        last = torch.from_numpy(tokens[at : at + 1].astype(np.int32)).to(run.model.device)
        with torch.inference_mode():
            alone.append(run.model.decode(last, run.batch([at + 1]), run.kv, run.scratch(1)).float())
    again = torch.cat([chunks, *alone])
    return {"bytes_differ": int((again != whole).any(1).sum()), "of": len(whole)}


def steps() -> list[dict[str, Any]]:
    """Milliseconds of a decode step of flowinfer-mini at 1,024 tokens, by batch size."""
    found = []
    for name in ("before", "after", "after, invariant"):
        can_fuse = loading._can_fuse
        if name == "before":
            loading._can_fuse = lambda device, dtype: False
        try:
            run = Runner("cuda:0", "bfloat16", sequences=32, context=1_152, batch_invariant="invariant" in name)
        finally:
            loading._can_fuse = can_fuse
        for rows in (1, 32):
            ms = _eager_ms(run, rows) if name == "before" else _graph_ms(run, rows)
            found.append({"step": name, "batch": rows, "ms": ms})
            print(found[-1], flush=True)
    return found


def _eager_ms(run: Runner, rows: int) -> float:
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run.step(prompt(1_100), [1_024] * rows, [1] * rows)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[2:])


def _graph_ms(run: Runner, rows: int) -> float:
    batch = run.batch([1_025] * 32)
    batch = DecodeBatch(batch.slots[:rows], *batch[1:])
    last, scratch = torch.full((32,), 100, dtype=torch.int32, device=DEVICE), run.scratch(rows)
    with torch.inference_mode():
        return graph_us([lambda: run.model.decode(last, batch, run.kv, scratch)]) / 1e3


def main() -> None:
    """Runs the parts named by --only and writes all results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="check,kernels,steps")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    parts = {"check": check, "kernels": kernels, "search": search, "steps": steps}
    results: dict[str, Any] = {"card": torch.cuda.get_device_name()}
    for name in args.only.split(","):
        began = time.perf_counter()
        try:
            results[name] = parts[name]()
        except Exception as error:
            import traceback

            print(name, "broke:", "".join(traceback.format_exception(error))[-900:])
        print(f"-- {name}: {time.perf_counter() - began:.0f} s", flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
