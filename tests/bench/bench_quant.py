"""What weights of 4 and 8 bits lose and gain on a CPU: perplexity of held-out text, steps interleaved, memory, loading.

Run: python tests/bench/bench_quant.py [--threads 1] [--rounds 15] [--tokens 6000] [--json FILE]. For the figures alone
that no load of the machine changes: --rounds 0. Text: the README files of this repository, which the model can't have
seen, and questions of GSM8K (tests/data). Perplexity is over windows of 2,048 tokens; many rows and few rows are
products of the same numbers, so it holds for both. Not so fp8, which is of GPUs and emulated here: there activations of
many rows are quantized too. A step is the whole model without sampling: 1 and 16 rows at a context of 256 tokens, and a
chunk of 256 tokens of a prompt. Rounds take every kind in turn, in another order each.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_model import arena, step_of
from harness import ROOT, machine

from flowinfer.engine import hub
from flowinfer.engine.models import load_model
from flowinfer.engine.models.decoder import Model
from flowinfer.engine.step import StepInput
from flowinfer.text.tokenizer import load_tokenizer

MODEL, WINDOW = "smollm2-135m", 2048
LOSSES = ("float32", "bfloat16", "fp8", "fp8 few rows", "fp8 KV", "int8", "int4", "int4:64", "int4:128")
SPEEDS = ("bfloat16", "int8", "int4", "int4:64", "int4-only")
STEPS = {"1 row": (1, 1, 256), "2 rows": (2, 1, 256), "4 rows": (4, 1, 256), "5 rows": (5, 1, 256)}
STEPS |= {"6 rows": (6, 1, 256), "8 rows": (8, 1, 256), "16 rows": (16, 1, 256), "256 of a prompt": (1, 256, 256)}
_LOAD = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[2]))
sys.path.insert(0, sys.argv[3])
from bench_quant import loaded, resident
before, began = resident(), time.perf_counter()
model = loaded(sys.argv[1])
print(time.perf_counter() - began, resident() - before)
"""


def loaded(kind: str) -> Model:
    """The model in a dtype, or in bfloat16 with such weights, ready to run."""
    if kind.startswith("fp8"):
        return emulated(kind)
    plain = kind in ("float32", "bfloat16")
    model = load_model(hub.resolve(MODEL), dtype=kind if plain else "bfloat16", weights="checkpoint" if plain else kind)
    assert isinstance(model, Model)
    model.warmup()
    return model


def emulated(kind: str) -> Model:
    """What a GPU computes with `weights: fp8`, where few rows stay in bfloat16, or with `kv_dtype: fp8`.

    All keys and values are rounded here; on a card those of the step itself aren't.
    """
    from flowinfer.engine.models import fp8, load
    from flowinfer.engine.models.config import read_config
    from flowinfer.engine.models.linear import make_linear
    from flowinfer.engine.models.load import _Loader
    from flowinfer.engine.models.quantized import Makers
    from flowinfer.engine.weights import Weights

    fp8.FEW_ROWS = 0 if kind == "fp8" else 1 << 30
    usual, load.COMPILED_FROM = load.COMPILED_FROM, 1 << 60  # the plain decoder: others attend by kernels of their own
    folder = hub.resolve(MODEL)
    with Weights(folder, dtype=torch.bfloat16, device=torch.device("cpu")) as files, torch.inference_mode():
        own = Makers(make_linear if kind == "fp8 KV" else fp8.make_fp8, make_linear)
        model = _Loader(read_config(folder), files, None, own).model(None)
    load.COMPILED_FROM = usual
    if kind == "fp8 KV":
        heads = model._heads

        def rounded(*args: Any) -> tuple[torch.Tensor, ...]:
            q, *kv = heads(*args)
            return q, *(x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) for x in kv)

        model._heads = rounded  # type: ignore[assignment,method-assign]
    return model


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def texts(most: int) -> dict[str, list[int]]:
    """Token ids of each text, at most so many."""
    tokenizer = load_tokenizer(hub.resolve(MODEL))
    files = [ROOT / "README.md", *sorted(ROOT.glob("stages/*/README.md"))]
    readme = tokenizer.encode_plain("\n\n".join(file.read_text(encoding="utf-8") for file in files))
    gsm8k = json.loads((ROOT / "tests" / "data" / "smollm2_gsm8k_ids.json").read_text())["ids"]
    return {"READMEs": readme[:most].tolist(), "GSM8K": gsm8k[:most]}


def perplexity(model: Model, ids: list[int]) -> float:
    """exp of the mean loss of every token behind the first of its window."""
    loss, count = 0.0, 0
    kv = arena(model, WINDOW // 64)
    table = np.arange(WINDOW // 64, dtype=np.int32)[None]
    for start in range(0, len(ids) - 1, WINDOW):
        part = ids[start : start + WINDOW]
        for at in range(0, len(part), 256):
            chunk = part[at : at + 256]
            step = StepInput(
                tokens=torch.tensor(chunk),
                positions=torch.arange(at, at + len(chunk)),
                query_starts=np.array([0, len(chunk)], np.int32),
                kv_lens=np.array([at + len(chunk)], np.int32),
                block_tables=table,
                logit_rows=torch.arange(len(chunk)),
            )
            logits = model.forward(step, kv)
            targets = torch.tensor(part[at + 1 : at + len(chunk) + 1])
            assert logits is not None
            loss += float(torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="sum"))
            count += len(targets)
    return math.exp(loss / count)


def speeds(rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of each step, by kind."""
    models = {kind: loaded(kind) for kind in SPEEDS}
    kvs = {kind: arena(model, 64) for kind, model in models.items()}
    steps = {name: step_of(*sizes, logits=True) for name, sizes in STEPS.items()}
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for kind in (*SPEEDS[number % len(SPEEDS) :], *SPEEDS[: number % len(SPEEDS)]):
            for name, step in steps.items():
                ms = timed(lambda kind=kind, step=step: models[kind].forward(step, kvs[kind]))
                if number:  # the first round warms up
                    times.setdefault((kind, name), []).append(ms)
    return {kind: {name: statistics.median(times[kind, name]) for name in STEPS} for kind in SPEEDS}


def timed(run: Callable[[], Any]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


def loading(kind: str, threads: int) -> tuple[float, float]:
    """Seconds to load, and MiB that it takes, in a process of its own."""
    command = [sys.executable, "-c", _LOAD, kind, str(threads), str(Path(__file__).parent)]
    seconds, size = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(seconds), float(size) / 2**20


def main() -> None:
    """Prints two tables; with --json also writes them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=6000, help="of each text; 0 measures no perplexity")
    parser.add_argument("--kinds", default=",".join(LOSSES), help="whose perplexity is measured")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{machine()}, {args.threads} threads; {MODEL}")
    result: dict[str, Any] = {"machine": machine(), "threads": args.threads, "model": MODEL}
    if args.tokens:
        found = texts(args.tokens)
        print(f"\n| weights | {' | '.join(f'perplexity, {len(ids):,} tokens of {n}' for n, ids in found.items())} |")
        print(f"|---|{'---|' * len(found)}")
        for kind in args.kinds.split(","):
            model = loaded(kind)
            row = result.setdefault("perplexity", {})[kind] = {n: perplexity(model, ids) for n, ids in found.items()}
            del model
            print(f"| {kind} | {' | '.join(f'{value:.3f}' for value in row.values())} |", flush=True)
    if args.rounds:
        result["ms"] = speeds(args.rounds)
        print(f"\n| weights | {' | '.join(f'{name}, ms' for name in STEPS)} | tokens/s at 1, 16 | loading, s | MiB |")
        print(f"|---|{'---|' * (len(STEPS) + 3)}")
        for kind, row in result["ms"].items():
            seconds, size = result.setdefault("loading", {})[kind] = loading(kind, args.threads)
            rate = f"{1e3 / row['1 row']:,.0f}, {16e3 / row['16 rows']:,.0f}"
            cells = " | ".join(f"{ms:.1f}" for ms in row.values())
            print(f"| {kind} | {cells} | {rate} | {seconds:.1f} | {size:,.0f} |")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
