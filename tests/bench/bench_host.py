"""Host work of a decode step at batch 64: everything that one turn of the loop does except the model's forward pass.

Run: python tests/bench/bench_host.py [--batch 64]. All eight stages in this process, greedy, no drafts; bar: 1 ms. The
pass over the logits (batch x vocabulary floats) is the model's kind of work and is shown apart; what remains is
scheduling, batch arrays, stops, detokenizing and messages, and is printed by stage.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from harness import ROOT, machine, prompt_ids

from flowinfer.graph import load_plan
from flowinfer.message import Call, Sampling
from flowinfer.runtime.local import LocalService

STEPS = 60


def timed(owner: Any, name: str) -> list[float]:
    """Makes a function note the seconds of each call."""
    seconds: list[float] = []
    function = getattr(owner, name)

    def measured(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - began)

    setattr(owner, name, measured)
    return seconds


def main() -> None:
    """Prints milliseconds a step: the whole turn, the model, the rest, and the rest by stage."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sets = ("stages.verify.with.draft=none", "workers={front: {threads: 1, kv_memory: 1GiB}}")
    with LocalService(load_plan(ROOT / "pipelines" / "quickstart.yaml", sets=sets)) as service:
        decode: Any = service.stage("decode")
        verify: Any = service.stage("verify")
        forward, choose = timed(decode.engine.model, "forward"), timed(verify.sampler, "choose")
        sampling = Sampling(max_tokens=STEPS + 100, temperature=0.0, ignore_eos=True)
        for i in range(args.batch):
            prompt = torch.tensor(prompt_ids(16, i), dtype=torch.int32).numpy()
            service.submit(Call(id=f"r{i}", sampling=sampling, prompt=prompt), lambda piece: None)
        while len(decode.batch) < args.batch:
            service.turn()
        turns, models, picks, before = [], [], [], {run.name: run.busy_s for run in service.group.runs}
        for _ in range(STEPS):
            forward.clear()
            choose.clear()
            began = time.perf_counter()
            service.turn()
            turns.append((time.perf_counter() - began) * 1e3)
            models.append(sum(forward) * 1e3)
            picks.append(sum(choose) * 1e3)
        after = {run.name: (run.busy_s - before[run.name]) / STEPS * 1e3 for run in service.group.runs}
    rest = [turn - model - pick for turn, model, pick in zip(turns, models, picks, strict=True)]
    after["decode"] -= statistics.fmean(models)
    after["verify"] -= statistics.fmean(picks)
    print(machine())
    print(f"batch {args.batch}, {STEPS} steps, median ms a step")
    turn, model, pick = (statistics.median(times) for times in (turns, models, picks))
    print(f"  turn {turn:.2f}  model {model:.2f}  choosing tokens {pick:.2f}")
    print(f"  host {statistics.median(rest):.2f}  (bar 1.00)")
    print("  mean by stage: " + "  ".join(f"{name} {ms:.3f}" for name, ms in after.items() if ms > 0.001))


if __name__ == "__main__":
    main()
