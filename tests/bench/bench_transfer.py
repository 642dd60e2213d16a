"""What it costs to bring KV from the worker that prefills to the one that decodes, between two processes of this host.

Run: python tests/bench/bench_transfer.py [--out FILE] [--small]. Prints medians and writes JSON; two minutes. Needs
SmolLM2's weights (`flowinfer models pull smollm2-135m`) but with --small, which only shows that all of it runs.

lease    From the end of prefill until decode may begin, for a prefix of 4,000 tokens in the host's shared arena; the
         bar is 1 ms.
tcp      The same blocks as frames over loopback, from the taker's first word until the last block is checked and in its
         pool, against ZeroMQ alone: as many frames of the same size, received into memory (`recv_into`) by another
         process, turn by turn. The bar is 80 % of its rate.
overlap  What decode waits for KV after a prefill of 4,000 tokens has ended: pushed while it computes, and, by not
         hearing of the prompt before, all of it at the end.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from cluster import Cluster, Door, prompt
from harness import machine, prompt_ids

from flowinfer.channel import Channel, Endpoints
from flowinfer.engine.layout import KVLayout
from flowinfer.graph.plan import Plan
from flowinfer.message import KVOffer, Prompt, Serving, WorkerUp
from flowinfer.runtime.clock import SystemClock
from flowinfer.runtime.events import Stop
from flowinfer.runtime.group import Host
from flowinfer.runtime.loading import load_class
from flowinfer.runtime.worker import Worker
from flowinfer.stage import Arena

LEASES, TURNS, PREFILLS = 30, 15, 3
OWNER = "prefill.0"
WARM_UP = 4  # turns until all memory has been touched
IDLE_S = 0.001  # the longest wait for one of two workers in a process


def save_model(folder: Path, context: int) -> None:
    """A model that computes next to nothing and has the KV of SmolLM2-135M: 1.5 MB a block in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"num_hidden_layers": 30, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64}
    config = LlamaConfig(vocab_size=128, hidden_size=48, intermediate_size=48, max_position_embeddings=context, **shape)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


# ------------------------------------------------------------------------------------------- two processes, two workers


def host_of(folder: Path, blocks: int, shared: bool, place: int) -> Host:
    """Memory of a worker: a part of one file, or its own."""

    def arena(layout: KVLayout) -> Arena:
        if not shared:
            return Arena(memoryview(mmap.mmap(-1, blocks * layout.block_bytes)), blocks, 0, blocks)
        with (folder / "arena").open("r+b") as file:
            file.truncate(2 * blocks * layout.block_bytes)
            memory = memoryview(mmap.mmap(file.fileno(), 2 * blocks * layout.block_bytes))
        return Arena(memory, 2 * blocks, place * blocks, (place + 1) * blocks, shared=True)

    return Host(arena=arena)


class Pair(Cluster):
    """front.0 and decode.0 in this process, prefill.0 in another, connected over loopback."""

    def __init__(self, model: str, folder: Path, *, blocks: int, shared: bool, step_tokens: int) -> None:
        (folder / "arena").touch()
        self.process: subprocess.Popen[str] | None = None
        self.step_tokens = step_tokens
        self.taken: list[tuple[float, float, int]] = []  # of each sequence: exposed, whole seconds, bytes
        super().__init__(Path(model), folder, blocks=blocks, shared=shared)
        self._watch()

    def add(self, name: str) -> Any:
        if name == OWNER:
            self._start_owner()
            return None
        channel = Channel(name)
        self.channels[name] = channel, channel.bind_tcp()
        worker = self._worker(name, channel)
        worker.open()
        self.workers[name] = worker
        if name == "decode.0":
            self._connect()
        return worker

    def _worker(self, name: str, channel: Channel) -> Worker:
        load = lambda stage: Door if stage.kind == "api" else load_class(stage.kind)  # noqa: E731
        plan = _with_dtype(self.plan, self.step_tokens)
        host = host_of(self.folder, self.blocks, self.shared, 1)
        return Worker(plan, name.rpartition(".")[0], host, load, channel, clock=SystemClock())

    def _start_owner(self) -> None:
        plan = _with_dtype(self.plan, self.step_tokens)
        (self.folder / "plan").write_bytes(msgspec.json.encode(plan))
        command = [sys.executable, __file__, "--owner", str(self.folder), str(self.blocks), str(int(self.shared))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _connect(self) -> None:
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({n: list(at) for n, (_, at) in self.channels.items()}) + "\n")
        self.process.stdin.flush()
        owner = Endpoints(*json.loads(self.process.stdout.readline()))
        ends = {OWNER: owner} | {name: at for name, (_, at) in self.channels.items()}
        for name, worker in self.workers.items():
            for peer, at in ends.items():
                if peer != name:
                    worker.handle(WorkerUp(worker=peer, generation=1, data=at.data, control=at.control))
            worker.handle(Serving())

    def _watch(self) -> None:
        stage: Any = self.workers["decode.0"].by_name["transfer"].stage

        def count(transport: str, num_bytes: int, began: float, handle: Any) -> None:
            now = stage.ctx.clock.now()
            self.taken.append((now - handle.computed_at, now - began, num_bytes))

        stage._count = count

    def answer(self, one: Prompt) -> tuple[float, float, int]:
        """What the transfer of this prompt took."""
        self.taken.clear()
        self.send(one)
        self.finish([one.id])
        self.until(lambda: not self.engine("decode.0").held)
        return self.taken[0]

    def turn(self, count: int = 1) -> None:
        """As a process of its own would, the decoding worker waits for what comes: whoever sends needs the core."""
        decode: Any = self.workers["decode.0"]
        if not decode.by_name["transfer"].stage.incoming.arrivals:
            self.workers["front.0"].pump(0)
        patience = decode.patience_s()
        decode.pump(IDLE_S if patience is None else min(IDLE_S, patience))

    def until(self, claim: Any, seconds: float = 600.0) -> None:
        """A long prefill takes its time."""
        super().until(claim, seconds)

    def forget(self) -> None:
        """What the decoding worker has cached must be pushed again."""
        self.engine("decode.0").pool.clear_cache()

    def deafen(self, deaf: bool) -> None:
        """Whether the decoding worker doesn't hear of prompts to come."""
        worker: Any = self.workers["decode.0"]
        worker.__dict__.pop("handle", None)
        hear = worker.handle
        if deaf:
            worker.handle = lambda event: None if isinstance(event, KVOffer) else hear(event)

    def close(self) -> None:
        self.workers["decode.0"].channel.send_event(OWNER, Stop())
        super().close()
        if self.process is not None:
            self.process.wait(30)


def _with_dtype(plan: Plan, step_tokens: int) -> Plan:
    stages = {}
    for name, stage in plan.stages.items():
        config = {key: "auto" if key == "dtype" else value for key, value in stage.config.items()}
        if stage.kind == "prefill":
            config["token_budget"] = step_tokens
        stages[name] = msgspec.structs.replace(stage, config=config)
    return msgspec.structs.replace(plan, stages=stages)


def own(folder: Path, blocks: int, shared: bool) -> None:
    """The owner's process."""
    peers = json.loads(sys.stdin.readline())
    plan = msgspec.json.decode((folder / "plan").read_bytes(), type=Plan)
    channel = Channel(OWNER)
    at = channel.bind_tcp()
    host = host_of(folder, blocks, shared, 0)
    worker = Worker(plan, "prefill", host, lambda stage: load_class(stage.kind), channel, clock=SystemClock())
    worker.open()
    for name, (data, control) in peers.items():
        worker.handle(WorkerUp(worker=name, generation=1, data=data, control=control))
    worker.handle(Serving())
    sys.stdout.write(json.dumps(list(at)) + "\n")
    sys.stdout.flush()
    worker.run()
    worker.close()
    channel.close()


@contextmanager
def pair(model: str, **options: Any) -> Iterator[Pair]:
    """Two workers until the block ends."""
    with tempfile.TemporaryDirectory(prefix="kv", dir="/dev/shm" if Path("/dev/shm").exists() else None) as folder:
        made = Pair(model, Path(folder), **options)
        try:
            yield made
        finally:
            made.close()


# --------------------------------------------------------------------------------------------------------- bare ZeroMQ


def send_bare(count: int, size: int) -> None:
    """The other process of `Bare`: sends `count` frames from one piece of memory each time it is asked to."""
    context = zmq.Context()
    asked, out = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    out.sndhwm = 0
    at = asked.bind_to_random_port("tcp://127.0.0.1")
    sys.stdout.write(f"{at}\n")
    sys.stdout.flush()
    out.connect(f"tcp://127.0.0.1:{sys.stdin.readline().strip()}")
    memory = np.random.default_rng(0).integers(0, 255, (count, size), np.uint8)
    while asked.recv():
        for row in memory:
            out.send(row.data, copy=False)


class Bare:
    """ZeroMQ alone, with the same frames."""

    def __init__(self, count: int, size: int) -> None:
        command = [sys.executable, __file__, "--bare", str(count), str(size)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.context = zmq.Context()
        self.ask, self.take = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        self.take.rcvhwm = 0
        self.ask.connect(f"tcp://127.0.0.1:{self.process.stdout.readline().strip()}")
        self.process.stdin.write(f"{self.take.bind_to_random_port('tcp://127.0.0.1')}\n")
        self.process.stdin.flush()
        self.memory = np.ones((count, size), np.uint8)

    def turn(self) -> float:
        """Seconds from asking until all is in memory."""
        began = time.perf_counter()
        self.ask.send(b"go")
        for row in self.memory:
            assert self.take.recv_into(row) == len(row)
        return time.perf_counter() - began

    def close(self) -> None:
        self.ask.send(b"")
        self.process.wait(10)
        self.context.destroy(0)


# --------------------------------------------------------------------------------------------------------- measurements


@dataclass(frozen=True)
class Sizes:
    """What is measured: tokens of the prefix, and how often."""

    tokens: int
    leases: int
    turns: int
    prefills: int


def ids(tokens: int, seed: int) -> list[int]:
    """Token ids of a prompt of which nothing is left to compute once its whole blocks are cached."""
    tokens = -(-tokens // 64) * 64 + 1
    return [int(id) for id in np.random.default_rng(seed).integers(3, 128, tokens)]


def measure_lease(model: str, sizes: Sizes) -> dict[str, Any]:
    """Hand-over of a cached prefix by a lease."""
    with pair(model, blocks=3 * sizes.tokens // 64, shared=True, step_tokens=512) as workers:
        workers.answer(prompt("first", ids(sizes.tokens, 0), max_tokens=1))
        times = [workers.answer(prompt(f"r{n}", ids(sizes.tokens, 0), max_tokens=1)) for n in range(sizes.leases)]
    exposed = [time[0] for time in times]
    return {"ms": 1e3 * statistics.median(exposed), "ms_worst": 1e3 * max(exposed), "bytes": times[0][2]}


def measure_tcp(model: str, sizes: Sizes) -> dict[str, Any]:
    """Frames, turn by turn with bare ZeroMQ."""
    with pair(model, blocks=3 * sizes.tokens // 64, shared=False, step_tokens=512) as workers:
        _, _, num_bytes = workers.answer(prompt("first", ids(sizes.tokens, 0), max_tokens=1))
        layout = workers.engine("decode.0").layout
        bare = Bare(num_bytes // layout.block_bytes, layout.block_bytes)
        ours, theirs = [], []
        for n in range(WARM_UP + sizes.turns):
            workers.forget()
            _, seconds, moved = workers.answer(prompt(f"r{n}", ids(sizes.tokens, 0), max_tokens=1))
            assert moved == num_bytes, "all of it is pushed again"
            ours.append(num_bytes / seconds / 1e9)
            theirs.append(num_bytes / bare.turn() / 1e9)
        del ours[:WARM_UP], theirs[:WARM_UP]
        bare.close()
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    found = {"gb_s": statistics.median(ours), "bare_gb_s": statistics.median(theirs)}
    return {**found, "ratio": statistics.median(ratios), "bytes": num_bytes}


def measure_overlap(model: str, sizes: Sizes, prompts: Iterable[list[int]]) -> dict[str, Any]:
    """Exposed time of a prefill that computes, pushed while it does and behind it."""
    exposed: dict[bool, list[float]] = {True: [], False: []}
    with pair(model, blocks=3 * sizes.tokens // 64, shared=False, step_tokens=256) as workers:
        for n, tokens in enumerate(prompts):
            workers.deafen(n % 2 == 1)
            one = prompt(f"r{n}", tokens, max_tokens=1)
            one.cache_salt = f"salt{n}"
            exposed[n % 2 == 0].append(workers.answer(one)[0])
    with_it, without = (1e3 * statistics.median(exposed[overlap]) for overlap in (True, False))
    return {"ms": with_it, "ms_without": without, "ratio": with_it / without, "step_tokens": 256}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    parser.add_argument("--small", action="store_true", help="a small prefix, few times, no weights needed")
    parser.add_argument("--owner", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--bare", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.owner:
        own(Path(options.owner[0]), int(options.owner[1]), options.owner[2] == "1")
    elif options.bare:
        send_bare(*options.bare)
    else:
        measure(options.out, Sizes(500, 3, 3, 1) if options.small else Sizes(4_000, LEASES, TURNS, PREFILLS))


def measure(out: Path | None, sizes: Sizes) -> None:
    small = sizes.tokens < 4_000
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), 2 * sizes.tokens)
        found: dict[str, Any] = {"machine": machine(), "tokens": sizes.tokens}
        found["lease"] = measure_lease(folder, sizes)
        print("lease", found["lease"], flush=True)
        found["tcp"] = measure_tcp(folder, sizes)
        print("tcp", found["tcp"], flush=True)
        count = 2 * sizes.prefills
        texts = [(ids if small else prompt_ids)(sizes.tokens, seed) for seed in range(count)]
        found["overlap"] = measure_overlap(folder if small else "smollm2-135m", sizes, texts)
        print("overlap", found["overlap"], flush=True)
    print(json.dumps(found, indent=1))
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
