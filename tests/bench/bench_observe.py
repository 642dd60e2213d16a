"""What looking costs: a service with and without top, logs, tap and trace, in turn, over the same load; and recording.

Run: python tests/bench/bench_observe.py [--pairs 20] [--streams 16]. The graph is prod.yaml in three processes, with a
recording in the place of the model, at the recording's pace: so the load is the same in every window, and what the
service's processes use of the processor is its own work, not the model's. Windows without and with a viewer alternate.
The difference, as a share of one core, is what a viewer takes from the model at most. 95 % intervals are from a paired
bootstrap of the median. The last lines: a recorder in a graph with the real model, by its own time; a tap on an edge
inside a worker at full speed, which no service comes near.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import psutil
from harness import machine, prompt_ids

from flowinfer.compare.arms import LocalArm
from flowinfer.compare.asks import Ask
from flowinfer.flow.record import Recorder, header_of
from flowinfer.graph import load_plan
from flowinfer.graph.plan import EdgePlan, Plan, StagePlan, WorkerPlan
from flowinfer.message import Message, Prompt, Sampling
from flowinfer.runtime.events import TapAsk
from flowinfer.runtime.local import LocalService
from flowinfer.runtime.rewire.control import ask, find
from flowinfer.runtime.rewire.protocol import Request, Tap
from flowinfer.runtime.tap import Taps
from flowinfer.stage import Stage
from flowinfer.testing.file import Mock
from flowinfer.testing.real import await_open
from flowinfer.testing.serve import PLAN
from flowinfer.testing.surgery import mocked

PIPELINES = Path(__file__).parents[2] / "pipelines"
WINDOW_S, GAP_S = 3.0, 0.5  # of one measurement, and for what was switched to take hold
Pair = tuple[float, float]  # without, with


class Load:
    """Streams without end over HTTP; `tokens` counts what has come."""

    def __init__(self, running: Running, streams: int) -> None:
        self.running, self.tokens, self.over = running, 0, False
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(streams)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        chat = {"messages": [{"role": "user", "content": "Name three primary colors."}], "max_tokens": 24}
        body = json.dumps({"model": "smollm2-135m", "temperature": 0, "stream": True, **chat})
        connection = http.client.HTTPConnection("127.0.0.1", self.running.port, timeout=600)
        while not self.over:
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for line in response:
                self.tokens += line.startswith(b"data: {")
        connection.close()

    def measure(self) -> Pair:
        """Events a second, and processor seconds of the service a second, over a window."""
        time.sleep(GAP_S)
        tokens, cpu, began = self.tokens, self.running.cpu_s(), time.perf_counter()
        time.sleep(WINDOW_S)
        seconds = time.perf_counter() - began
        return (self.tokens - tokens) / seconds, (self.running.cpu_s() - cpu) / seconds

    def close(self) -> None:
        self.over = True
        for thread in self._threads:
            thread.join()


@dataclass
class Running:
    """A service of this benchmark. pid: as `--service` takes it."""

    pid: int
    port: int

    def cpu_s(self) -> float:
        """Processor time of its processes so far, in seconds."""
        parent = psutil.Process(self.pid)
        times = [one.cpu_times() for one in (parent, *parent.children(recursive=True))]
        return sum(one.user + one.system for one in times)


@contextlib.contextmanager
def mocked_prod() -> Iterator[Running]:
    """prod.yaml with a recording in the place of the model."""
    mock = Mock.model_validate({"from": "prefill", "to": "verify", "worker": "decode"})
    plan = mocked(load_plan(PIPELINES / "prod.yaml", sets=["vars.model=smollm2-135m"]), mock, PIPELINES / "chats.flow")
    with tempfile.TemporaryDirectory() as folder:
        serve = msgspec.structs.replace(plan.serve, port=0)
        (Path(folder) / PLAN).write_bytes(msgspec.json.encode(msgspec.structs.replace(plan, serve=serve)))
        command = [sys.executable, "-m", "flowinfer.testing.serve", folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if line.startswith(("READY", "ERROR")))
            assert line.startswith("READY"), line
            await_open(line.removeprefix("READY").strip())
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield Running(process.pid, int(line.rpartition(":")[2].strip().rstrip("/")))
        finally:
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            process.wait(30)


class Command:
    """A command as a person has it open, stopped while it isn't wanted: so that it needn't start again each time."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "flowinfer", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(5.0)  # it imports, and looks for the first time
        self.switch(on=False)

    def switch(self, *, on: bool) -> None:
        self._process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)

    def close(self) -> None:
        self.switch(on=True)
        self._process.terminate()
        self._process.wait()


class TapCommand(Command):
    """A tap that is stopped lets go of the edge after its lease; here it is told to."""

    def __init__(self, running: Running, edge: str) -> None:
        self._folder = find(service=str(running.pid))[1]
        self._edge = edge
        super().__init__("tap", edge, "--json", "--service", str(running.pid))

    def switch(self, *, on: bool) -> None:
        super().switch(on=on)
        if not on:
            path = str(self._folder / f"tap-{self._process.pid}")
            list(ask(self._folder, Request(do="tap", tap=Tap(edge=self._edge, to=path, limit=0))))


class Tracing:
    """Tracing is on from its first question to the end of the service, so its windows without come first."""

    def __init__(self, running: Running) -> None:
        self._url = f"127.0.0.1:{running.port}"

    def switch(self, *, on: bool) -> None:
        if on:
            arguments = ["trace", "-", "--json", "--url", self._url]
            subprocess.run([sys.executable, "-m", "flowinfer", *arguments], stdout=subprocess.DEVNULL, check=False)

    def close(self) -> None:
        """It stays on."""


def viewers(running: Running) -> dict[str, Callable[[], Command | TapCommand | Tracing]]:
    """By name. trace comes last."""
    pid = str(running.pid)
    return {
        "top": lambda: Command("top", "--interval", "2", "--url", f"127.0.0.1:{running.port}"),
        "logs": lambda: Command("logs", "--follow", "--service", pid),
        "tap": lambda: TapCommand(running, "verify -> detokenize"),
        "trace": lambda: Tracing(running),
    }


def windows(name: str, load: Load, seen: Command | TapCommand | Tracing, pairs: int) -> list[tuple[Pair, Pair]]:
    """Measurements without and with the viewer, in an order that alternates."""
    if name == "trace":
        without = [load.measure() for _ in range(pairs)]
        seen.switch(on=True)
        return list(zip(without, [load.measure() for _ in range(pairs)], strict=True))
    found: list[tuple[Pair, Pair]] = []
    for number in range(pairs):
        got: dict[bool, Pair] = {}
        for watched in (False, True) if number % 2 else (True, False):
            seen.switch(on=watched)
            got[watched] = load.measure()
        found.append((got[False], got[True]))
    return found


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, and the 95 % interval of it."""
    rng = random.Random(0)
    resampled = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2_000))
    return statistics.median(values), resampled[50], resampled[-51]


def report(name: str, pairs: list[Pair], unit: str) -> None:
    """The relative change of a speed."""
    before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
    change, low, high = spread([after / before - 1 for before, after in pairs])
    print(f"{name:<28} {before:>9.2f} {after:>9.2f} {unit:<9} {change:+.1%} [{low:+.1%} to {high:+.1%}]", flush=True)


def report_cost(name: str, pairs: list[Pair]) -> None:
    """What more of a core the service uses."""
    before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
    more, low, high = spread([after - before for before, after in pairs])
    print(
        f"{name:<28} {before:>9.3f} {after:>9.3f} {'cores':<9} {more:+.2%} of a core [{low:+.2%} to {high:+.2%}]",
        flush=True,
    )


class TimedRecorder(Recorder):
    """Knows how long it took."""

    seconds = 0.0

    def _add(self, edge: str, message: Message) -> None:
        began = time.perf_counter()
        super()._add(edge, message)
        self.seconds += time.perf_counter() - began


def recording(rounds: int, streams: int) -> None:
    """The share of its time that a graph in this process spends in the recorder, and tokens a second with it."""
    plan = load_plan(PIPELINES / "quickstart.yaml")
    with tempfile.TemporaryDirectory() as folder:
        recorders: list[TimedRecorder] = []
        out = Path(folder) / "x.flow"
        arm = LocalArm(plan, opened=lambda s: recorders.append(TimedRecorder(s, out, header_of(plan, (), ()))))
        shares, speeds = list[float](), list[float]()
        for number in range(-1, rounds):  # the first one warms up
            before, began = recorders[0].seconds, time.perf_counter()
            speed = _local(arm, streams, 10_000 + number)
            if number >= 0:
                speeds.append(speed)
                shares.append((recorders[0].seconds - before) / (time.perf_counter() - began))
        arm.close()
    share, low, high = spread(shares)
    print(f"{'record, with the model':<28} {statistics.median(speeds):>19.2f} tokens/s  ", end="")
    print(f"{share:.2%} of the time [{low:.2%} to {high:.2%}]", flush=True)


NEW = 48  # tokens of each stream that is recorded


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
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--only", default="", help="Names of viewers, with commas between.")
    args = parser.parse_args()
    only = set(args.only.split(",")) - {""}
    wanted: Callable[[str], bool] = lambda name: not only or name in only  # noqa: E731
    print(f"{machine()}; load {os.getloadavg()[0]:.1f}")
    print("                               without      with           change [95 %]")
    if any(map(wanted, ("top", "logs", "tap", "trace"))):
        with mocked_prod() as running:
            load = Load(running, args.streams)
            time.sleep(5.0)  # warms up
            for name, begin in viewers(running).items():
                if wanted(name):
                    seen = begin()
                    pairs = windows(name, load, seen, args.pairs)
                    seen.close()
                    report_cost(name, [(a[1], b[1]) for a, b in pairs])
            print(f"({args.streams} streams, {load.measure()[0]:.0f} events/s)")
            load.close()
    if wanted("record"):
        recording(args.pairs // 4, 8)
    if wanted("edge"):
        report("tap, an edge at full speed", edge(3 * args.pairs), "k/s")


if __name__ == "__main__":
    main()
