"""Tokens a second of flowinfer-mini's training step, eager and compiled, by batch; needs a CUDA GPU to mean anything.

Run: python tests/bench/bench_train_step.py [--flags FILE], which gets the options of `flowinfer.train.run` that were
the fastest. On a CPU it runs one tiny step of each kind.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowinfer.engine.models.deepseek_v4.config import parse_v4
from flowinfer.train import run
from flowinfer.train.model import TrainableV4


def measure(batch: int, size: int, *, compile: bool, steps: int) -> dict[str, Any]:
    """One variant: warm-up seconds, tokens a second, peak memory, the loss after the steps."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    tokens = np.random.default_rng(0).integers(11, 8192, 4 * size * batch).astype(np.uint16)
    tokens[::300] = run.BOS_ID
    starts = np.flatnonzero(tokens == run.BOS_ID)
    rng = np.random.default_rng(1)
    model = TrainableV4(parse_v4(run.MINI, eos=None)).to(device).train()
    tuner = run.optimizer(model, 1e-3)

    def context() -> torch.autocast:
        return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    def step(apart: bool) -> torch.Tensor:
        rows = run.batch(tokens, starts, size, batch, rng).to(device, non_blocking=True)
        with context():
            loss, losses = run.loss_of(model, rows, apart=apart)
        torch.autograd.backward(loss + 0.1 * torch.stack(losses).mean())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        tuner.step()
        tuner.zero_grad(set_to_none=True)
        return loss.detach()

    began = time.perf_counter()
    worked = not compile or run.compiles(model, run.batch(tokens, starts, size, batch, rng).to(device), context)
    for i in range(min(3, steps)):
        loss = step(i % 2 == 0)
    float(loss)
    warm = time.perf_counter() - began
    began = time.perf_counter()
    for i in range(steps):
        loss = step(i % 2 == 0)
    last = float(loss)
    took = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {
        "batch": batch, "compile": compile, "worked": worked, "warm_s": round(warm, 1), "loss": round(last, 3),
        "tokens_per_s": round(steps * batch * size / took), "peak_gib": round(peak, 1),
    }  # fmt: skip


def main() -> None:
    """Prints a line a variant, and the choice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flags", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    size = 4096 if gpu else 256
    found = []
    for batch, compile in ((8, False), (16, True), (32, True)) if gpu else ((1, False),):
        try:
            found.append(measure(batch, size, compile=compile, steps=args.steps if gpu else 1))
        except Exception as error:  # one variant may not fit; the others still say something
            found.append({"batch": batch, "compile": compile, "worked": False, "error": str(error)[:300]})
        print(json.dumps(found[-1]), flush=True)
        if args.flags:
            args.flags.write_text(choice(found))
        torch._dynamo.reset()
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    print(json.dumps({"flags": choice(found)}), flush=True)


def choice(found: list[dict[str, Any]]) -> str:
    """Options of the best variant; 32 must be a quarter faster, as 16 makes more steps of the same tokens."""
    good = [each for each in found if each["worked"] and np.isfinite(each["loss"])]
    if not good:
        return "--batch 8"
    best = max(good, key=lambda each: each["tokens_per_s"] * (0.8 if each["batch"] > 16 else 1))
    return f"--batch {best['batch']}" + (" --compile" if best["compile"] else "")


if __name__ == "__main__":
    main()
