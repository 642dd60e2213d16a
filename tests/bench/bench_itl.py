"""Gaps between the tokens of running streams while long prompts arrive on the same device, for several step budgets.

Run: PYTHONPATH=. python tests/bench/bench_itl.py --config qwen3-8b [--streams 32] [--prompt 8192] [--json F]
Prefill and decode share the device and the loop: between two decode steps runs a chunk of prefill that is predicted to
take at most the budget, so a gap should be at most budget + decode step. "none" is what happens without: each prompt
is computed in one step. One prompt is in the service at all times. Public stages, random weights, greedy.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowinfer.bench.service import EngineService
from flowinfer.engine import hub
from flowinfer.engine.models.named import write_random
from flowinfer.message import Cancel, Prompt, Sampling


class Load:
    """Streams that decode without end, and prompts that come one after the other."""

    def __init__(self, service: EngineService, vocab: int) -> None:
        self.service, self.client, self.vocab = service, service.client, vocab
        self.rng = np.random.default_rng(0)
        self.client.times = {}
        self.num_sent = 0

    def send(self, tokens: int, max_tokens: int) -> str:
        """A request of random tokens."""
        self.num_sent += 1
        prompt = self.rng.integers(3, self.vocab, tokens).astype(np.int32)
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        id = f"q{self.num_sent}"
        self.client.outbox.append(Prompt(id=id, tokens=prompt, sampling=sampling))
        return id

    def turn_until(self, done: Callable[[], bool], most_s: float = 120.0) -> None:
        """Runs the loop. Raises where a request fails or nothing comes of it."""
        until = time.perf_counter() + most_s
        while not done():
            self.service.group.turn()
            if self.client.failed or time.perf_counter() > until:
                raise RuntimeError(self.client.failed or f"still running after {most_s:g} s")

    def start_streams(self, count: int, context: int, room: int) -> list[str]:
        """Streams of which each has had tokens."""
        ids = [self.send(context, room) for _ in range(count)]
        times = self.times
        self.turn_until(lambda: all(len(times.get(id, ())) > 2 for id in ids))
        return ids

    @property
    def times(self) -> dict[str, list[float]]:
        """When tokens came, by request."""
        assert self.client.times is not None
        return self.client.times

    def prompts(self, count: int, tokens: int) -> list[float]:
        """Seconds to the first token of prompts that each come when the one before has been answered."""
        found = []
        for _ in range(count):
            began, id = time.perf_counter(), self.send(tokens, 1)
            self.turn_until(lambda id=id: id in self.client.ended)  # type: ignore[misc]
            found.append(self.times[id][0] - began)
        return found

    def gaps(self, ids: list[str], began: float, ended: float) -> NDArray[np.float64]:
        """Milliseconds between tokens of these streams that came in a span of time."""
        found = [np.diff([at for at in self.times[id] if began <= at <= ended]) for id in ids]
        return np.concatenate(found) * 1e3

    def stop(self, ids: list[str]) -> None:
        """Cancels streams, and lets what they hold be freed."""
        self.service.group.emit(Cancel(ids=ids))
        for _ in range(10):
            self.service.group.turn()


def measure(load: Load, streams: list[str], budget_ms: float | None, args: argparse.Namespace) -> dict[str, Any]:
    """Gaps without and with prompts, and how long prompts take, at one budget; None: a prompt a step."""
    set_budget(load.service, budget_ms, args.prompt)
    load.prompts(1, args.prompt)  # the step-time model learns
    quiet_from = time.perf_counter()
    mark = {id: len(load.times[id]) for id in streams}
    load.turn_until(lambda: all(len(load.times[id]) >= mark[id] + args.steps for id in streams))
    began = time.perf_counter()
    waits = load.prompts(args.prompts, args.prompt)
    ended = time.perf_counter()
    alone, during = load.gaps(streams, quiet_from, began), load.gaps(streams, began, ended)
    if not during.size:
        during = np.array([(ended - began) * 1e3])  # not one token came meanwhile
    step, (p50, p99) = float(np.median(alone)), np.percentile(during, (50, 99))
    return {
        "step_budget_ms": budget_ms, "decode_step_ms": step, "p50_ms": float(p50), "p99_ms": float(p99),
        "most_ms": float(during.max()), "bar_ms": budget_ms + step if budget_ms else None,
        "ttft_s": float(np.median(waits)), "prefill_tokens_s": args.prompts * args.prompt / (ended - began),
        "decode_tokens_s": during.size / (ended - began),
    }  # fmt: skip


def set_budget(service: EngineService, budget_ms: float | None, prompt: int) -> None:
    """For the next steps of prefill; None: a whole prompt a step."""
    prefill = service.group.by_name["prefill"].stage
    changed = {"step_budget": (budget_ms or 50) / 1e3, "token_budget": None if budget_ms else prompt}
    prefill.config = prefill.config.model_copy(update=changed)
    prefill.reconfigure(prefill.config)  # type: ignore[attr-defined]


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    budget = f"{row['step_budget_ms']:g} ms" if row["step_budget_ms"] else "none"
    bar = f"{row['bar_ms']:.1f}" if row["bar_ms"] else ""
    times = f"{row['p50_ms']:>8.1f} {row['p99_ms']:>8.1f} {row['most_ms']:>8.1f} {bar:>8} {row['ttft_s']:>8.2f}"
    rates = f"{row['prefill_tokens_s']:>12,.0f} {row['decode_tokens_s']:>10,.0f}"
    return f"{budget:>8} {row['decode_step_ms']:>12.2f} {times} {rates}"


def main() -> None:
    """Prints a line a budget and writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="qwen3-8b")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024, help="tokens of each stream's prompt")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of each prompt that arrives")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40, help="decode steps measured without prompts")
    parser.add_argument("--budgets", default="10,25,50,100,0", help="milliseconds; 0: none")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.room = 4096  # tokens that a stream may yield at most
    most = max(args.context + args.room, args.prompt + 8)
    with tempfile.TemporaryDirectory() as folder:
        path = write_random(args.config, Path(folder), positions=most)
        vocab = hub.describe(path).config.vocab_size
        blocks = args.streams * (-(-(args.context + args.room) // 64) + 1) + 4 * (args.prompt // 64 + 2)
        service = EngineService(
            str(path), device=args.device, dtype="auto", num_blocks=blocks, max_batch=args.streams + 2,
            max_tokens=most, chunk=args.prompt,
        )  # fmt: skip
    load = Load(service, vocab)
    name = torch.cuda.get_device_name(args.device) if args.device != "cpu" else "cpu"
    print(f"{args.config} on {name}: {args.streams} streams of {args.context} tokens, prompts of {args.prompt}")
    heads = ("budget", "decode step", "p50 ms", "p99 ms", "most ms", "bar ms", "TTFT s", "prefill t/s", "decode t/s")
    print("{:>8} {:>12} {:>8} {:>8} {:>8} {:>8} {:>8} {:>12} {:>10}".format(*heads), flush=True)
    load.prompts(2, args.prompt)  # warms caches of kernels and memory
    streams = load.start_streams(args.streams, args.context, args.room)
    sizes = {"streams": args.streams, "context": args.context, "prompt": args.prompt, "prompts": args.prompts}
    rows: list[dict[str, Any]] = []
    for budget in (float(text) for text in args.budgets.split(",")):
        rows.append(measure(load, streams, budget or None, args))
        print(line(rows[-1]), flush=True)
        if args.json:
            found = {"config": args.config, "device": name, **sizes, "rows": rows}
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    load.stop(streams)
    service.close()


if __name__ == "__main__":
    main()
