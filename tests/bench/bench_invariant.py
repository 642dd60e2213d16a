"""batch_invariant: proves that bytes don't depend on the batch, and measures what that costs beside the default mode.

Run: python tests/bench/bench_invariant.py --config qwen3-8b --random-weights --device cuda:0 --json F
  pairs: logits and KV of texts in random batches and chunks against each text alone.  answers: greedy ones of an engine
  alone, in a batch, in other chunks, with n-gram drafts.  cost: decode steps and prefill. All in both modes.
  --ops (on a card): each product by its candidates of tiles, attention and experts, beside what the default mode runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowinfer.bench.service import EngineService
from flowinfer.engine import hub
from flowinfer.engine.models import load_model
from flowinfer.engine.models.config import ModelConfig
from flowinfer.engine.models.named import write_random
from flowinfer.engine.step import StepInput

Ids = np.ndarray[Any, np.dtype[np.int32]]
MODES = ("default", "invariant")


def main() -> None:
    """Runs what is asked for and prints it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--config", default="flowinfer-mini", help="model, or with --random-weights a named shape")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--batch", type=int, nargs="*", default=None, help="decode batches; default 16 64, on a card 64"
    )
    parser.add_argument("--context", type=int, default=None, help="default 256, on a card 1024")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--skip", nargs="*", default=[], choices=["pairs", "answers", "cost"])
    parser.add_argument("--ops", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    on_card = asked.device.startswith("cuda")
    batches = asked.batch or ([64] if on_card else [16, 64])
    context = asked.context or (1024 if on_card else 256)
    found: dict[str, Any] = {"machine": machine(asked.device), "model": asked.config, "dtype": asked.dtype}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        if asked.random_weights:
            write_random(asked.config, path, positions=context + 512)
        else:
            path = hub.resolve(asked.config)
        if asked.ops:
            found["ops"] = ops(hub.describe(path).config)
        if "pairs" not in asked.skip:
            tell(found, "pairs", lambda: {m: pairs(path, asked.dtype, asked.device, m == "invariant") for m in MODES})
        if "answers" not in asked.skip:
            tell(found, "answers", lambda: {m: answers(path, asked, m == "invariant") for m in MODES})
        if "cost" not in asked.skip:
            tell(found, "cost", lambda: cost(path, asked, batches, context))
    text = json.dumps(found, indent=1)
    print(text)
    if asked.json:
        asked.json.write_text(text + "\n", encoding="utf-8")


def tell(found: dict[str, Any], name: str, measure: Callable[[], Any]) -> None:
    """Measures and says how long that took, so that a run that is cut off has shown something."""
    began = time.perf_counter()
    found[name] = measure()
    print(f"{name} ({time.perf_counter() - began:.0f} s): {json.dumps(found[name])}", flush=True)


def machine(device: str) -> str:
    """Where this ran."""
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{torch.get_num_threads()} threads, torch {torch.__version__}"


# ---------------------------------------------------------------------------------------------------- bytes of a model


class Runner:
    """A model over an arena of its own."""

    def __init__(self, path: Path, dtype: str, device: str, *, invariant: bool, blocks: int = 64) -> None:
        self.device = torch.device(device)
        self.model: Any = load_model(path, dtype=dtype, device=device, batch_invariant=invariant)
        layout = hub.describe(path).layout(dtype)
        self.block, self.vocab = layout.block_tokens, self.model.config.vocab_size
        self.kv = torch.zeros((blocks, *layout.block_shape), dtype=getattr(torch, dtype), device=device)

    def run(self, parts: list[tuple[Ids, int, Ids]]) -> list[torch.Tensor]:
        """Float32 logits of (tokens, start, block table) of several sequences in one step."""
        counts = [len(tokens) for tokens, _, _ in parts]
        width = max(len(table) for _, _, table in parts)
        flat = np.concatenate([tokens for tokens, _, _ in parts]).astype(np.int64)
        positions = np.concatenate([start + np.arange(len(tokens)) for tokens, start, _ in parts])
        step = StepInput(
            tokens=torch.from_numpy(flat).to(self.device),
            positions=torch.from_numpy(positions).to(self.device),
            query_starts=np.cumsum([0, *counts]).astype(np.int32),
            kv_lens=np.array([start + len(tokens) for tokens, start, _ in parts], np.int32),
            block_tables=np.stack([np.pad(table, (0, width - len(table))) for _, _, table in parts]).astype(np.int32),
            logit_rows=torch.arange(len(flat), device=self.device),
        )
        with torch.inference_mode():
            logits: torch.Tensor = self.model.forward(step, self.kv)
        return list(logits.split(counts))


def pairs(path: Path, dtype: str, device: str, invariant: bool) -> dict[str, int]:
    """Rows of logits and blocks of KV that differ between a text alone and the same text in batches and chunks."""
    runner = Runner(path, dtype, device, invariant=invariant)
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, runner.vocab, n).astype(np.int32) for n in (300, 5, 130, 64, 201, 17)]
    places = iter(rng.permutation(64))
    tables = [np.array([next(places) for _ in range(-(-len(t) // runner.block))], np.int32) for t in texts]
    alone, kv = [], []
    for tokens, table in zip(texts, tables, strict=True):
        alone.append(runner.run([(tokens, 0, table)])[0].clone())
        kv.append(runner.kv[torch.from_numpy(table).long().to(runner.device)].clone())
    runner.kv.zero_()
    done, rows = [0] * len(texts), [list[torch.Tensor]() for _ in texts]
    while any(d < len(t) for d, t in zip(done, texts, strict=True)):
        going = [i for i, tokens in enumerate(texts) if done[i] < len(tokens)]
        members = rng.permutation(going)[: rng.integers(1, len(going) + 1)].tolist()
        sizes = [min(len(texts[i]) - done[i], int(rng.choice([1, 1, 2, 4, 33, 90]))) for i in members]
        step = [(texts[i][done[i] : done[i] + n], done[i], tables[i]) for i, n in zip(members, sizes, strict=True)]
        for i, n, logits in zip(members, sizes, runner.run(step), strict=True):
            rows[i].append(logits)
            done[i] += n
    together = [torch.cat(parts) for parts in rows]
    differ = sum(int((a != b).any(1).sum()) for a, b in zip(alone, together, strict=True))
    blocks = 0
    for before, table in zip(kv, tables, strict=True):
        after = runner.kv[torch.from_numpy(table).long().to(runner.device)]
        blocks += int((before != after).flatten(1).any(1).sum())
    total = sum(len(tokens) for tokens in texts)
    del runner
    forget()
    return {
        "rows": total,
        "rows_that_differ": differ,
        "blocks": len(np.concatenate(tables)),
        "blocks_that_differ": blocks,
    }


# ----------------------------------------------------------------------------------------------- answers of the engine


@contextmanager
def service(path: Path, asked: Any, *, invariant: bool, **changes: Any) -> Iterator[EngineService]:
    """An engine with its stages; its memory is free again behind it."""
    sizes = {"num_blocks": 256, "max_batch": 64, "max_tokens": 1024, "chunk": 2048} | changes
    made = EngineService(str(path), device=asked.device, dtype=asked.dtype, batch_invariant=invariant, **sizes)
    try:
        yield made
    finally:
        made.close()
        del made
        forget()


def forget() -> None:
    """Gives a card's memory back."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def answers(path: Path, asked: Any, invariant: bool, tokens: int = 24) -> dict[str, Any]:
    """Greedy answers that aren't what the prompt gets alone: how many, and where the first of them parts."""
    vocab = hub.describe(path).config.vocab_size
    rng = np.random.default_rng(1)
    prompts = [np.tile(rng.integers(3, vocab, 20 + 7 * i), 2).astype(np.int32) for i in range(12)]
    ways: dict[str, tuple[dict[str, Any], bool]] = {
        "in a batch": ({}, True),
        "in other chunks": ({"chunk": 70}, True),
        "with drafts": ({"verify": {"draft": "ngram", "tokens": 4}}, True),
        "with drafts, alone": ({"verify": {"draft": "ngram", "tokens": 4}}, False),
    }
    with service(path, asked, invariant=invariant) as engine:
        wanted = [output for prompt in prompts for output in greedy(engine, [prompt], tokens)]
    found = {}
    for name, (changes, together) in ways.items():
        with service(path, asked, invariant=invariant, **changes) as engine:
            if together:
                got = greedy(engine, prompts, tokens)
            else:
                got = [output for prompt in prompts for output in greedy(engine, [prompt], tokens)]
        parted = [i for i, (a, b) in enumerate(zip(wanted, got, strict=True)) if a != b]
        first = [next(n for n in range(tokens) if wanted[i][n] != got[i][n]) for i in parted]
        found[name] = {"differ": len(parted), "of": len(prompts), "first_at": min(first, default=None)}
    return found


def greedy(engine: EngineService, prompts: list[Ids], tokens: int) -> list[list[int]]:
    """Their answers, all asked for at once."""
    engine.client.outputs = {}
    engine.answer(prompts, tokens)
    return [engine.client.outputs[id] for id in engine.sent]


# ---------------------------------------------------------------------------------------------------------------- cost


def cost(path: Path, asked: Any, batches: list[int], context: int) -> dict[str, Any]:
    """Milliseconds of a decode step and tokens a second of prefill, in both modes and their ratio.

    On a CPU both engines are there at once and take turns, and the best of three rounds counts; a card holds one.
    """
    most = max(batches)
    blocks = most * (-(-(context + asked.steps + 40) // 64) + 1)
    sizes = {"num_blocks": blocks, "max_batch": most, "max_tokens": context + asked.steps + 64, "chunk": 8192}
    turns = [MODES] if asked.device == "cpu" else [(mode,) for mode in MODES]
    found: dict[str, Any] = {mode: {} for mode in MODES}
    for modes in turns:
        with ExitStack() as stack:
            settings = {"verify": {"draft": "none"}, **sizes}
            engines = {
                m: stack.enter_context(service(path, asked, invariant=m == "invariant", **settings)) for m in modes
            }
            for _ in range(3 if len(modes) > 1 else 1):
                for mode, engine in engines.items():
                    measure(engine, batches, context, asked.steps, found[mode])
    found["ratio"] = {}
    for name, plain in found["default"].items():
        own = found["invariant"][name]
        found["ratio"][name] = round(own / plain if "ms" in name else plain / own, 3)
    return found


def measure(engine: EngineService, batches: list[int], context: int, steps: int, best: dict[str, float]) -> None:
    """One round of an engine's figures; the best so far stays."""
    vocab = engine.engine.model.config.vocab_size
    engine.answer([random_prompt(vocab, 40, 0)], 4)
    for batch in batches:
        name = f"decode {batch} x {context}, ms"
        best[name] = min(best.get(name, 1e9), decode_ms(engine, vocab, batch, context, steps))
    name = "prefill, tokens/s"
    best[name] = max(best.get(name, 0.0), prefill_speed(engine, vocab, context, min(max(batches), 16)))


def random_prompt(vocab: int, tokens: int, seed: int) -> Ids:
    """Token ids that mean nothing."""
    return np.random.default_rng(seed).integers(3, vocab, tokens).astype(np.int32)


def decode_ms(engine: EngineService, vocab: int, batch: int, context: int, steps: int) -> float:
    """Median time between steps that ran the whole batch."""
    prompts = [random_prompt(vocab, context, i) for i in range(batch)]
    arrivals = engine.answer(prompts, steps + 24)
    times = [arrival.at for arrival in arrivals if arrival.num_sequences == batch][2:]
    return round(1e3 * statistics.median(np.diff(times).tolist()), 3)


def prefill_speed(engine: EngineService, vocab: int, context: int, num: int) -> float:
    """Prompt tokens a second, with one token of each answer."""
    times = []
    for seed in range(3):
        prompts = [random_prompt(vocab, context, 1000 * seed + i) for i in range(num)]
        began = time.perf_counter()
        engine.answer(prompts, 1)
        times.append(time.perf_counter() - began)
    return round(num * context / min(times), 1)


# ------------------------------------------------------------------------------------------------------- ops on a card


TILES = (
    (64, 16, 128, 4, 4), (64, 32, 128, 4, 4), (64, 32, 128, 4, 6), (64, 64, 128, 4, 4), (64, 128, 64, 4, 4),
    (128, 128, 64, 8, 4), (128, 256, 64, 8, 3),
)  # fmt: skip
EXPERT_TILES = ((16, 64, 128), (64, 32, 128), (64, 64, 64), (64, 64, 128), (64, 128, 64))


def ops(config: ModelConfig) -> dict[str, Any]:
    """Microseconds of single kernels, and which tiles give the bytes of the first."""
    n, k, d, hidden = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
    shapes = {"qkv": ((n + 2 * k) * d, hidden), "out": (hidden, n * d), "head": (config.vocab_size, hidden)}
    if config.num_experts:
        shapes["router"] = (config.num_experts, hidden)
    else:
        shapes |= {"gate_up": (2 * config.intermediate_size, hidden), "down": (hidden, config.intermediate_size)}
    found: dict[str, Any] = {}
    for name, shape in shapes.items():
        for rows in (64, 4096) if name != "head" else (64,):
            found[f"{name} {list(shape)} x {rows}"] = linear_us(shape, rows)
            print(name, rows, found[f"{name} {list(shape)} x {rows}"], flush=True)
    found["attention 64 x 1024"] = attention_us(config)
    if config.num_experts:
        for rows in (64, 1024):
            found[f"experts x {rows}"] = experts_us(config, rows)
    return found


def time_us(calls: list[Callable[[], object]]) -> float:
    """Median of replays of a graph of these calls, a call."""
    from bench_kernels import graph_us  # here: it imports Triton

    return round(graph_us(calls, repeats=7), 2)


def linear_us(shape: tuple[int, int], rows: int) -> dict[str, Any]:
    """The library's product and ours by tiles, over weights that exceed the cache together."""
    from flowinfer.kernels.invariant_linear import invariant_linear
    from flowinfer.kernels.invariant_linear.triton import launch

    copies = max(2, min(24, (120 << 20) // (2 * shape[0] * shape[1]) + 1))
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02) for _ in range(copies)]
    x = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
    out = x.new_empty(rows, shape[0])
    found: dict[str, Any] = {"library": time_us([partial(torch.nn.functional.linear, x, w) for w in weights])}
    found["ours"] = time_us([partial(invariant_linear, x, w) for w in weights])
    first: torch.Tensor | None = None
    for sizes in TILES:
        if sizes[0] > 64 and rows < 128:
            continue
        try:
            us = time_us([partial(launch, x, w, None, False, out, sizes) for w in weights])
        except Exception as error:
            found[str(sizes)] = type(error).__name__
            continue
        launch(x, weights[0], None, False, out, sizes)
        first = out.clone() if first is None else first
        found[str(sizes)] = [us, "same" if torch.equal(out, first) else "other"]
    return found


def attention_us(config: ModelConfig, rows: int = 64, context: int = 1024) -> dict[str, float]:
    """A decode step's attention of one layer: by splits, and by the tiles of the mode."""
    from flowinfer.kernels.decode_attention import DecodeBatch, Scratch, decode_attention
    from flowinfer.kernels.invariant_attention import Parts, invariant_attention
    from flowinfer.kernels.prefill_attention import Tiling
    from flowinfer.kernels.rope import Heads

    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
    blocks = context // 64
    kv = torch.randn(
        rows * blocks, 1, 2, heads.num_kv_heads, 64, heads.head_dim, device="cuda", dtype=torch.bfloat16
    )  # fmt: skip
    tables = torch.arange(rows * blocks, dtype=torch.int32, device="cuda").view(rows, blocks)
    lengths = torch.full((rows,), context, dtype=torch.int32, device="cuda")
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    qkv = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    rope = (torch.ones(2048, heads.head_dim, device="cuda", dtype=torch.bfloat16),) * 2
    batch = DecodeBatch(starts[:-1].contiguous(), lengths, tables)
    scratch = Scratch.make(rows, heads, torch.device("cuda"))
    group = heads.num_heads // heads.num_kv_heads
    tiling = Tiling(torch.stack((starts[:-1], starts[:-1] * 0), 1), starts, lengths, tables, tokens=64 // group)
    parts = Parts.make(rows, blocks, heads, torch.device("cuda"))
    q = qkv.view(rows, -1, heads.head_dim)
    return {
        "decode_attention": time_us(
            [lambda: decode_attention(qkv, kv, 0, heads, batch, rope, None, 1e-5, scratch)] * 8
        ),
        "ours": time_us([lambda: invariant_attention(q, kv, 0, heads, tiling, parts=parts)] * 8),
    }


def experts_us(config: ModelConfig, rows: int) -> dict[str, Any]:
    """Both products of one expert layer: tiles by load, and tiles of one shape."""
    from flowinfer.kernels.experts import bucket, gather_gated, route, weighted
    from flowinfer.kernels.experts import triton as kernel

    num, width, hidden = config.num_experts, config.expert_size, config.hidden_size
    gate_up = torch.randn(num, 2 * width, hidden, device="cuda", dtype=torch.bfloat16).mul_(0.02)
    down = torch.randn(num, hidden, width, device="cuda", dtype=torch.bfloat16).mul_(0.02)
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    ids, weights = route(torch.randn(rows, num, device="cuda"), config.experts_per_token, norm_topk=True)
    routing = bucket(ids, weights, num)

    def both(fixed: bool) -> object:
        return weighted(gather_gated(x, gate_up, routing, fixed=fixed), down, routing, fixed=fixed)

    found: dict[str, Any] = {"by load": time_us([lambda: both(False)] * 4)}
    kept = kernel.FIXED
    for sizes in EXPERT_TILES:
        kernel.FIXED = sizes
        try:
            found[str(sizes)] = time_us([lambda: both(True)] * 4)
        except Exception as error:
            found[str(sizes)] = type(error).__name__
    kernel.FIXED = kept
    return found


if __name__ == "__main__":
    main()
