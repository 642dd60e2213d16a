"""What looking costs: a service with and without top, trace, tap, logs and record, in turn, over the same requests.

Run: python tests/bench/bench_observe.py [--rounds 7] [--streams 8]. Each round asks for the same load without a viewer
and with one, in an order that alternates, so that drift cancels. Two figures a viewer: tokens/s, which anything else on
the machine disturbs, and processor time of the service's processes a token, which it disturbs much less. 95 % intervals
from a paired bootstrap. The last line is an edge inside a worker at full speed, which no service comes near.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
from harness import Service, machine, prompt_ids, service

from flowinfer.compare.arms import LocalArm
from flowinfer.compare.asks import Ask
from flowinfer.flow.record import Recorder, header_of
from flowinfer.graph import load_plan
from flowinfer.graph.plan import EdgePlan, Plan, StagePlan, WorkerPlan
from flowinfer.message import Prompt, Sampling
from flowinfer.runtime.local import LocalService
from flowinfer.stage import Stage

PIPELINES = Path(__file__).parents[2] / "pipelines"
NEW = 48  # tokens of each stream
VIEWERS = {
    "top": ["top", "--interval", "2"],
    "tap": ["tap", "verify -> detokenize", "--json"],
    "logs": ["logs", "--follow"],
    "trace": [],  # on from its first question to the end of the service, so it comes last
}
Pair = tuple[float, float]  # without, with


@contextlib.contextmanager
def viewer(name: str, running: Service) -> Iterator[None]:
    """The command runs beside the block, as a person has it open."""
    arguments = VIEWERS[name]
    if name == "trace":
        arguments = ["trace", "-", "--json", "--url", f"127.0.0.1:{running.port}"]
        subprocess.run([sys.executable, "-m", "flowinfer", *arguments], stdout=subprocess.DEVNULL, check=False)
        yield
        return
    where = ["--url", f"127.0.0.1:{running.port}"] if name == "top" else ["--service", str(running.process.pid)]
    command = [sys.executable, "-m", "flowinfer", *arguments, *where]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(3.0)  # it imports, and begins to look
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def cpu_s(running: Service) -> float:
    """Processor time of the service so far, in seconds."""
    parent = psutil.Process(running.process.pid)
    times = [one.cpu_times() for one in (parent, *parent.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def load(running: Service, streams: int, seed: int) -> Pair:
    """Tokens a second, and processor milliseconds a token."""
    prompts = [prompt_ids(64, seed=1000 * seed + i) for i in range(streams)]
    before, began = cpu_s(running), time.perf_counter()
    running.all([(prompt, NEW) for prompt in prompts])
    seconds, tokens = time.perf_counter() - began, streams * NEW
    return tokens / seconds, (cpu_s(running) - before) / tokens * 1e3


def rounds_of(
    name: str, running: Service, rounds: int, streams: int, seeds: Iterator[int]
) -> tuple[list[Pair], list[Pair]]:
    """Pairs of tokens/s and of milliseconds a token, without and with the viewer."""
    speeds: list[Pair] = []
    costs: list[Pair] = []
    for number in range(rounds):
        got: dict[bool, Pair] = {}
        for watched in (False, True) if number % 2 or name == "trace" else (True, False):
            with viewer(name, running) if watched else contextlib.nullcontext():
                got[watched] = load(running, streams, next(seeds))
        speeds.append((got[False][0], got[True][0]))
        costs.append((got[False][1], got[True][1]))
    return speeds, costs


def report(name: str, what: str, pairs: list[Pair], unit: str) -> None:
    ratios = [after / before for before, after in pairs]
    rng = random.Random(0)
    resampled = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2_000))
    low, high = resampled[50], resampled[-51]
    before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
    change = f"{statistics.median(ratios) - 1:+.1%} [{low - 1:+.1%} to {high - 1:+.1%}]"
    print(f"{name:<8} {what:<22} {before:>9.2f} {after:>9.2f} {unit:<8} {change}", flush=True)


def recording(rounds: int, streams: int) -> list[Pair]:
    """Tokens a second of a graph in this process, without and with a recorder."""
    plan = load_plan(PIPELINES / "quickstart.yaml")
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory() as folder:
        recorders: list[Recorder] = []
        out = Path(folder) / "x.flow"
        plain = LocalArm(plan)
        watched = LocalArm(plan, opened=lambda s: recorders.append(Recorder(s, out, header_of(plan, (), ()))))
        for number in range(-1, rounds):  # the first one warms both up
            got = [0.0, 0.0]
            for which in (0, 1) if number % 2 else (1, 0):
                got[which] = _local((plain, watched)[which], streams, 10_000 + 2 * number + which)
            if number >= 0:
                pairs.append((got[0], got[1]))
        plain.close()
        watched.close()
    return pairs


def _local(arm: LocalArm, streams: int, seed: int) -> float:
    fields = {"max_tokens": NEW, "ignore_eos": True}
    asks = [
        Ask(str(i), "/v1/completions", {"prompt": prompt_ids(64, seed=1000 * seed + i), **fields})
        for i in range(streams)
    ]
    began = time.perf_counter()
    answers = arm.answer(asks, str(seed))
    assert not any(answer.error for answer in answers)
    return streams * NEW / (time.perf_counter() - began)


class Source(Stage):
    """A hundred prompts a step."""

    left = 0

    @property
    def busy(self) -> bool:
        return self.left > 0

    def step(self) -> list[Prompt]:
        self.left -= 1
        tokens = np.zeros(16, np.int32)
        return [Prompt(id=str(i), tokens=tokens, sampling=Sampling()) for i in range(100)]


class Sink(Stage):
    def step(self, prompts: list[Prompt]) -> list[Prompt]:
        return []


def edge(rounds: int) -> list[Pair]:
    """Messages a second in thousands of a bare edge, without and with a tap that wants all of them."""
    import socket

    from flowinfer.runtime.events import TapAsk
    from flowinfer.runtime.tap import Taps

    link = EdgePlan(name="source -> sink", source="source", target="sink", message="Prompt", port="prompts")
    stages = {name: StagePlan(name=name, kind=name, config={}, worker="front") for name in ("source", "sink")}
    plan = Plan(
        name="edge",
        digest="",
        file="x.yaml",
        stages=stages,
        edges=(link,),
        workers={"front": WorkerPlan(name="front", stages=("source", "sink"))},
    )
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory() as folder, LocalService(plan, stages={"source": Source, "sink": Sink}) as made:
        viewer = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        viewer.bind(f"{folder}/viewer")
        viewer.setblocking(False)
        taps = Taps(made.group)

        def speed(watched: bool) -> float:
            taps.ask(TapAsk(edge=link.name, to=f"{folder}/viewer", limit=1_000_000_000 if watched else 0))
            made.stage("source").left = 3_000  # type: ignore[attr-defined]
            began = time.perf_counter()
            made.run_until_idle()
            seconds = time.perf_counter() - began
            with contextlib.suppress(BlockingIOError):
                while viewer.recv(1 << 20):
                    pass
            return 300.0 / seconds

        speed(False)
        for number in range(rounds):
            got = {watched: speed(watched) for watched in ((False, True) if number % 2 else (True, False))}
            pairs.append((got[False], got[True]))
        viewer.close()
    return pairs


def main() -> None:
    """Prints two lines a viewer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--only", default="", help="Names of viewers, with commas between.")
    args = parser.parse_args()
    only = set(args.only.split(",")) - {""}
    wanted: Callable[[str], bool] = lambda name: not only or name in only  # noqa: E731
    print(f"{machine()}; load {os.getloadavg()[0]:.1f}")
    print("viewer   figure                   without      with          change [95 %]")
    seeds = iter(range(1, 1_000_000))
    if any(map(wanted, VIEWERS)):
        with service("prod.yaml") as running:
            load(running, args.streams, next(seeds))  # warms up
            for name in filter(wanted, VIEWERS):
                speeds, costs = rounds_of(name, running, args.rounds, args.streams, seeds)
                report(name, "throughput", speeds, "tokens/s")
                report(name, "processor time", costs, "ms/token")
    if wanted("record"):
        report("record", "throughput", recording(args.rounds, args.streams), "tokens/s")
    if wanted("edge"):
        report("tap", "an edge at full speed", edge(10 * args.rounds), "k/s")


if __name__ == "__main__":
    main()
