"""Speed of the model alone: milliseconds a step, tokens a second. Run as a script; --help lists its settings."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from flowinfer.engine import hub
from flowinfer.engine.models import load_model
from flowinfer.engine.models.decoder import Model
from flowinfer.engine.step import StepInput


def arena(model: Model, num_blocks: int) -> torch.Tensor:
    """A KV arena of zeros; real values don't change the speed."""
    config = model.config
    return torch.zeros(num_blocks, config.num_layers, 2, 64, config.num_kv_heads, config.head_dim, dtype=model.dtype)


def step_of(batch: int, queries: int, context: int, *, logits: bool) -> StepInput:
    """batch sequences with `queries` new tokens each, over `context` tokens in all."""
    blocks = -(-context // 64)
    table = np.random.default_rng(0).permutation(batch * blocks).astype(np.int32).reshape(batch, blocks)
    last = torch.arange(1, batch + 1) * queries - 1
    return StepInput(
        tokens=torch.randint(0, 40_000, (batch * queries,)),
        positions=torch.arange(context - queries, context).repeat(batch),
        query_starts=np.arange(0, (batch + 1) * queries, queries, dtype=np.int32),
        kv_lens=np.full(batch, context, np.int32),
        block_tables=table,
        logit_rows=last if logits else None,
    )


def median_ms(run: Callable[[], object], *, seconds: float) -> float:
    """Median over at least five runs after two that don't count."""
    run(), run()
    times: list[float] = []
    while len(times) < 5 or sum(times) < seconds:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    """Prints one table for each dtype."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="per row")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for dtype in args.dtypes.split(","):
        Console().print(bench(args.model, dtype, threads=args.threads, seconds=args.seconds))


def bench(name: str, dtype: str, *, threads: int, seconds: float) -> Table:
    """One row for each kind of step."""
    start = time.perf_counter()
    model = load_model(hub.resolve(name), dtype=dtype, device="cpu")
    model.warmup()
    loaded = time.perf_counter() - start
    table = Table("step", "ms", "tokens/s", title=f"{dtype}, {threads} threads, load and warm-up {loaded:.1f} s")
    kv = arena(model, 64 * 4)
    steps = {f"decode, {batch} sequences of 256": step_of(batch, 1, 256, logits=True) for batch in (1, 4, 16, 64)}
    for queries, context in ((512, 512), (2048, 2048), (512, 2048)):
        steps[f"prefill, {queries} tokens up to {context}"] = step_of(1, queries, context, logits=False)
    for title, step in steps.items():
        ms = median_ms(lambda step=step: model.forward(step, kv), seconds=seconds)
        table.add_row(title, f"{ms:.1f}", f"{step.num_tokens / ms * 1e3:,.0f}")
    return table


if __name__ == "__main__":
    main()
