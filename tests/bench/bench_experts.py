"""How even expert load gets by copies of hot experts: the real routing of flowinfer-mini, on steps not yet seen.

Run: python tests/bench/bench_experts.py [--steps 600] [--json FILE]. Decodes chats and stories in a batch of 64 and
notes the rows of each expert, layer and step. Each placement is made from 100 steps and measured on the next 100; a
number is the busiest worker's load over the mean worker's, summed over steps, mean of the layers, mean of the windows.
`in order` is without copies. Deterministic but for the last bits of the model's arithmetic: no time is measured but
that of placing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from pathlib import Path

import numpy as np
import torch
from decode_loop import Service, prompt
from harness import machine

from flowinfer.engine import hub
from flowinfer.engine.expert_load import Counts, LoadWindow
from flowinfer.stages.moe_decode.experts import Experts
from flowinfer.stages.moe_decode.moves import moves, settle
from flowinfer.stages.moe_decode.placement import Placement, Policy, imbalance, place, plain, slots_for
from flowinfer.text.tokenizer import load_tokenizer

MODEL = "flowinfer-mini"
BATCH, WINDOW = 64, 100
WORKERS = (4, 8, 16, 64)
POLICIES: tuple[Policy, ...] = ("sums", "peaks")

HEROES = ("brave mouse", "singing bird", "lost puppy", "kind giant", "sleepy dragon", "clever fox", "small robot")
THINGS = ("a silver bell", "an old map", "a birthday cake", "a red kite", "a broken clock", "a paper boat")
ABOUT = ("telling the truth", "being brave", "sharing with friends", "the first snow", "going home")
QUESTIONS = (
    "What is the capital of France?",
    "How do plants make their food?",
    "Can you suggest a simple dinner for two?",
    "What are three ways to save water at home?",
    "Why is the sky blue?",
    "How can I learn to play the guitar?",
    "What should I pack for a weekend in the mountains?",
    "Explain what a computer does, in simple words.",
    "What is a good name for a cat?",
    "How does a bicycle stay upright?",
    "Give me a plan for a quiet Sunday.",
    "What is the difference between a lake and a sea?",
)


def texts(count: int) -> list[str]:
    """Stories and questions in turn."""
    rng = random.Random(0)
    stories = [
        f"Write three short paragraphs about a {hero}, {thing} and {about}."
        for hero, thing, about in itertools.product(HEROES, THINGS, ABOUT)
    ]
    rng.shuffle(stories)
    questions = itertools.cycle(QUESTIONS)
    return [next(questions) if i % 3 == 2 else stories[i % len(stories)] for i in range(count)]


def record(steps: int) -> Counts:
    """int32 [steps, L, E]: rows of each expert, decoding up to BATCH sequences that come and go."""
    tokenizer = load_tokenizer(hub.resolve(MODEL))
    service = Service(Path(MODEL), num_blocks=6 * BATCH, max_batch=BATCH)
    load = service.decode.engine.expert_load
    layers, experts = load.counts_LE.shape
    window = load.windows["decode"] = LoadWindow(layers, experts, steps)
    for i, text in enumerate(texts(steps)):
        segments = tokenizer.render([{"role": "user", "content": text}], None, add_generation_prompt=True)
        ids = tokenizer.encode_segments(segments).tolist()
        service.send(prompt(f"r{i}", ids, max_tokens=256, temperature=0.7, ignore_eos=False, seed=i))
    while len(service.decode.batch) < BATCH:
        service.turn()
    window.num_steps = 0  # what ran while the batch filled up isn't decoding as it goes on
    while window.num_steps < steps:
        service.turn()
    return window.recent()


def measure(loads_WLE: Counts, workers: int) -> dict[str, float]:
    """Imbalance on the window behind the one that a placement was made from; moves a layer and placement."""
    _, layers, experts = loads_WLE.shape
    slots = Experts().slots(experts, workers)
    windows = np.split(loads_WLE, len(loads_WLE) // WINDOW)
    found = {
        "slots": float(slots),
        "in order": mean(imbalance(w, plain(layers, experts, workers)) for w in windows[1:]),
    }
    for policy in POLICIES:
        began = time.perf_counter()
        placed = [place(policy, w, slots, workers) for w in windows[:-1]]
        found[f"{policy} ms"] = (time.perf_counter() - began) / len(placed) * 1e3
        after = [imbalance(w, p) for w, p in zip(windows[1:], placed, strict=True)]
        found[policy] = mean(after)
        found[f"{policy} worst layer"] = max(float(np.max(each)) for each in after)
        bare = [place(policy, w, slots_for(experts, workers, 0), workers) for w in windows[:-1]]
        found[f"{policy}, no copies"] = mean(imbalance(w, p) for w, p in zip(windows[1:], bare, strict=True))
        found[f"{policy} moves, as made"] = num_moves(placed, layers)
        found[f"{policy} moves"] = num_moves(settled(placed, windows), layers)
    return found


def settled(placed: list[Placement], windows: list[Counts]) -> list[Placement]:
    """Each placement in the names that move the least from the one before."""
    found = placed[:1]
    for after, window in zip(placed[1:], windows[1:], strict=False):
        found.append(settle(found[-1], after, window))
    return found


def num_moves(placed: list[Placement], layers: int) -> float:
    """Slots a layer that change from one placement to the next."""
    return (
        mean(np.array([len(moves(a, b)) / layers]) for a, b in itertools.pairwise(placed)) if len(placed) > 1 else 0.0
    )


def mean(values: object) -> float:
    """Over all arrays and what is in them."""
    return float(np.mean([np.mean(value) for value in values]))  # type: ignore[attr-defined]


def main() -> None:
    """Prints the table; with --json also writes it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600, help="decode steps to record, a multiple of 100")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    loads = record(args.steps)
    rows = {workers: measure(loads, workers) for workers in WORKERS}
    print(machine())
    print(
        f"{MODEL}, {len(loads)} steps of {loads.sum(2).mean() / 2:.0f} rows, 16 experts, 2 a token, 1 copy per worker"
    )
    layer = loads.sum(0)
    print(f"busiest expert over the mean, by layer: {np.round(layer.max(1) / layer.mean(1), 2).tolist()}\n")
    print("| workers | slots | in order | sums, no copies | peaks, no copies | sums | peaks | moved | moved, renamed |")
    print("|---|---|---|---|---|---|---|---|---|")
    for workers, row in rows.items():
        names = ("in order", "sums, no copies", "peaks, no copies", "sums", "peaks")
        moved = f"{row['peaks moves, as made']:.1f} | {row['peaks moves']:.1f}"
        print(f"| {workers} | {row['slots']:.0f} | {' | '.join(f'{row[name]:.2f}' for name in names)} | {moved} |")
    if args.json:
        result = {"model": MODEL, "steps": len(loads), "machine": machine(), "workers": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
