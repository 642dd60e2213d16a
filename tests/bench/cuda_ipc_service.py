"""A service of true processes whose prefill and decode workers share one GPU: KV goes by cuda_ipc, and answers stay.

PYTHONPATH=.:tests/bench python tests/bench/cuda_ipc_service.py [--device cuda:0] [--transport auto] [--json FILE]

A small Llama of random weights answers the same prompts with prefill and decode in one worker (nothing moves), and in
two: first one after the other, which must give the same tokens, then all at once, where the sizes of batches differ and
a near tie may fall otherwise. Ends with 1 where a token of the former differs, where KV went another way, or where a
request failed. Needs no HTTP packages.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from decode_loop import save_random_llama

from flowinfer.graph.plan import EdgePlan, Plan, StagePlan, WorkerPlan
from flowinfer.message import Ended, Event, Failure, Message, Prompt, Sampling, Serving, Stats, Tokens
from flowinfer.runtime.supervisor import Supervisor
from flowinfer.stage import Stage, StageConfig

VOCAB, CONTEXT, NUM_PROMPTS, OUTPUT = 96, 4_096, 24, 40
EDGES = (
    ("door", "lookup", "Prompt", "prompts", "messages"),
    ("lookup", "prefill", "Prompt", "prompts", "messages"),
    ("prefill", "transfer", "Sequence", "sequences", "blocks"),
    ("transfer", "decode", "Sequence", "sequences", "messages"),
    ("decode", "verify", "Logits", "logits", "messages"),
    ("verify", "decode", "Proposal", "proposals", "messages"),
    ("verify", "door", "Tokens", "tokens", "messages"),
)


class Door(Stage):
    """Asks prompt by prompt, then all at once; writes down what comes back, and ends the service."""

    listens = (Serving, Failure, Stats)

    class Config(StageConfig):
        """file: for the answers."""

        file: str

    def open(self) -> None:
        rng = random.Random(0)
        lengths = [rng.choice([1, 2, 64, 65, 130, 700, 1_500]) for _ in range(NUM_PROMPTS)]
        shared = [rng.randrange(3, VOCAB) for _ in range(max(lengths))]
        sampling = Sampling(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
        self.later: list[Prompt] = []
        for kind in ("alone", "together"):
            for n, length in enumerate(lengths):
                tokens = shared[: length // 2] + [rng.randrange(3, VOCAB) for _ in range(length - length // 2)]
                self.later.append(Prompt(id=f"{kind}{n}", tokens=np.array(tokens, np.int32), sampling=sampling))
        self.outbox: list[Prompt] = []
        self.answers: dict[str, list[int]] = {prompt.id: [] for prompt in self.later}
        self.ended: dict[str, str] = {}
        self.moved: dict[str, float] = {}
        self.exposed: dict[str, float] = {}

    @property
    def busy(self) -> bool:
        return bool(self.outbox)

    def step(self, tokens: list[Tokens]) -> Iterable[Prompt]:
        for batch in tokens:
            ends = np.cumsum(batch.counts)
            for i, id in enumerate(batch.ids):
                self.answers[id] += batch.tokens[ends[i] - batch.counts[i] : ends[i]].tolist()
                if i in batch.finished:
                    self.end(id, batch.finished[i].reason)
        prompts, self.outbox = self.outbox, []
        return prompts

    def ask(self) -> None:
        """The next prompt, or all that are left."""
        count = 1 if self.later and self.later[0].id.startswith("alone") else len(self.later)
        self.outbox, self.later = self.later[:count], self.later[count:]
        self.ctx.wake()

    def end(self, id: str, how: str) -> None:
        """The request is over; with the last one, the service is, once its workers have told their counts."""
        self.ended[id] = how
        self.ctx.send(Ended(ids=[id]))
        if id.startswith("alone"):
            self.ask()
        if len(self.ended) == len(self.answers):
            self.ctx.call_at(self.ctx.clock.now() + 2.0, self.finish)

    def finish(self) -> None:
        """Writes all down and tells the supervisor to stop."""
        result = {"answers": self.answers, "ended": self.ended, "moved": self.moved, "exposed_s": self.exposed}
        Path(self.config.file).write_text(json.dumps(result))
        os.kill(os.getppid(), signal.SIGTERM)

    def observe(self, event: Event) -> Iterable[Message] | None:
        if isinstance(event, Serving):
            self.ask()
        elif isinstance(event, Failure):
            self.end(event.id, f"failed: {event.message}")
        elif isinstance(event, Stats):
            for name, labels, value in event.samples:
                if name.startswith("flowinfer:transfer_bytes_total") and value:
                    self.moved[labels["transport"]] = value
                if name.startswith("flowinfer:transfer_exposed_seconds_sum"):
                    self.exposed[labels["transport"]] = value
        return None


def plan_of(model: Path, folder: Path, device: str, transport: str, *, split: bool) -> Plan:
    """Prefill in a worker of its own, or beside decode."""
    named = {"model": str(model), "dtype": "float32"}
    network = {"interfaces": ["lo"]} if transport == "nixl" else {}
    kinds: dict[str, tuple[str, dict[str, Any], str]] = {
        "door": ("cuda_ipc_service:Door", {"file": str(folder / "result.json")}, "front"),
        "lookup": ("cache-lookup", named, "front"),
        "prefill": ("prefill", {**named, "token_budget": 512}, "prefill" if split else "decode"),
        "transfer": ("kv-transfer", {**named, **network, "transport": transport}, "decode"),
        "decode": ("moe-decode", {**named, "max_batch": 8}, "decode"),
        "verify": ("spec-verify", {"draft": "none"}, "decode"),
    }
    stages = {n: StagePlan(name=n, kind=k, config=c, worker=w) for n, (k, c, w) in kinds.items()}
    edges = tuple(
        EdgePlan(
            name=f"{a} -> {b}",
            source=a,
            target=b,
            message=m,
            port=p,
            unit=unit,
            back=m == "Proposal",
            fused=stages[a].worker == stages[b].worker,
            capacity=1 if unit == "blocks" else 64,
        )
        for a, b, m, p, unit in EDGES
    )
    workers = {}
    for name in dict.fromkeys(stage.worker for stage in stages.values()):
        own = tuple(n for n in stages if stages[n].worker == name)
        on = "cpu" if name == "front" else device
        workers[name] = WorkerPlan(name=name, stages=own, device=on, kv_bytes=0 if name == "front" else 64 << 20)
    return Plan(name="bench", digest="", file=str(folder / "none.yaml"), stages=stages, edges=edges, workers=workers)


def answered(plan: Plan, folder: Path) -> dict[str, Any]:
    """Runs the service until all prompts are answered."""
    file = folder / "result.json"
    file.unlink(missing_ok=True)
    began = time.perf_counter()
    Supervisor(plan, say=lambda line: print(line, flush=True)).run()
    result: dict[str, Any] = json.loads(file.read_text())
    return result | {"seconds": round(time.perf_counter() - began, 2)}


def main() -> None:
    """Prints JSON; ends with 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--expect", default="cuda_ipc", help="the transport by which KV must have gone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_random_llama(folder / "model", VOCAB, CONTEXT)
        joint = answered(plan_of(folder / "model", folder, args.device, "auto", split=False), folder)
        split = answered(plan_of(folder / "model", folder, args.device, args.transport, split=True), folder)
    wrong = [id for id, tokens in joint["answers"].items() if tokens != split["answers"][id]]
    figures = {
        "device": args.device,
        "requests": len(joint["answers"]),
        "different": [id for id in wrong if id.startswith("alone")],
        "different_together": [id for id in wrong if not id.startswith("alone")],
        "ended": sorted(set(joint["ended"].values()) | set(split["ended"].values())),
        "moved_bytes": split["moved"],
        "exposed_s": split["exposed_s"],
        "seconds": [joint["seconds"], split["seconds"]],
    }
    print(json.dumps(figures, indent=1))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    right = not figures["different"] and figures["ended"] == ["length"] and list(split["moved"]) == [args.expect]
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
