"""Changes of a running service under load: what its clients notice. The long form of tests/e2e/test_rewire_load.py.

    python tests/bench/bench_rewire.py --streams 32 --swaps 20

Streams are asked for again and again, each greedy and compared with what it gave when nothing changed. Pauses are the
gaps between two pieces of one stream: usual ones from a time without changes, then the longest one under each change.
"""

from __future__ import annotations

import argparse
import http.client
import re
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from harness import Service, machine, percentile, prompt_ids, service

from flowinfer.graph.plan import Plan
from flowinfer.runtime.rewire.control import ask, running
from flowinfer.runtime.rewire.protocol import Manner, Reply, Request

FLOOR_S = 0.2  # a pause that nobody minds
HANDOFF = "handoff:60s,replay:60s,abort"


@dataclass
class Streams:
    """Clients that ask again and again, in a thread each. gaps: seconds, with the time at which each ended."""

    service: Service
    prompts: list[list[int]]
    max_tokens: int
    expected: list[str] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    num_right: int = 0
    wrong: list[str] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    _stop: bool = False

    def __enter__(self) -> Streams:
        self.expected = [stream.text for stream in self.service.all([(p, self.max_tokens) for p in self.prompts])]
        self.rounds = [0] * len(self.prompts)
        self._threads = [threading.Thread(target=self._loop, args=(i,)) for i in range(len(self.prompts))]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop = True
        for thread in self._threads:
            thread.join()

    def _loop(self, i: int) -> None:
        while not self._stop:
            try:
                stream = self.service.complete(self.prompts[i], self.max_tokens)
            except Exception as error:  # whatever goes wrong, it's a client that was let down
                self.wrong.append(f"stream {i}: {error!r}")
                return
            self.gaps += zip(stream.tokens[1:], stream.gaps, strict=True)
            self.rounds[i] += 1
            if stream.text == self.expected[i]:
                self.num_right += 1
            else:
                self.wrong.append(f"stream {i}: {stream.text!r} instead of {self.expected[i]!r}")

    def wait_round(self) -> None:
        """Until every stream that runs now has ended, so that its gaps are known."""
        deadline, wanted = time.perf_counter() + 300, [count + 1 for count in self.rounds]
        while time.perf_counter() < deadline and not self.wrong:
            if all(count >= least for count, least in zip(self.rounds, wanted, strict=True)):
                return
            time.sleep(0.05)

    def between(self, start: float, end: float) -> list[float]:
        """Gaps that ended in this time, in seconds."""
        return [gap for at, gap in self.gaps if start <= at <= end]


@dataclass
class Finding:
    """One kind of change: how often, how long one took, and the longest pause that a stream had meanwhile."""

    name: str
    seconds: list[float] = field(default_factory=list)
    pause: float = 0.0
    refused: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What the clients noticed."""

    usual_p50: float
    usual_p99: float
    findings: list[Finding]
    num_right: int
    wrong: list[str]
    num_moved: int  # sequences that went to another decoding worker while they ran

    @property
    def limit(self) -> float:
        """The longest pause that is allowed, in seconds."""
        return max(FLOOR_S, 2 * self.usual_p99)

    def lines(self) -> Iterator[str]:
        """The report as text."""
        usual = f"usual pause: p50 {self.usual_p50 * 1e3:.0f} ms, p99 {self.usual_p99 * 1e3:.0f} ms"
        yield f"{usual}; {self.num_right} answers right, {len(self.wrong)} not; {self.num_moved} sequences handed off"
        yield f"{'change':<28} {'times':>5} {'each':>8} {'longest pause':>14} {'limit':>8}"
        for found in self.findings:
            each, pause, limit = statistics.median(found.seconds), found.pause * 1e3, self.limit * 1e3
            yield f"{found.name:<28} {len(found.seconds):>5} {each:>6.1f} s {pause:>11.0f} ms {limit:>5.0f} ms"
            yield from (f"    refused: {text}" for text in found.refused)
        yield from self.wrong[:5]


class Control:
    """The running service as `flowinfer apply` and its short forms reach it."""

    def __init__(self, running_service: Service) -> None:
        self.folder = next(path for found, path in running() if found.pid == running_service.process.pid)

    def plan(self) -> Plan:
        (reply,) = ask(self.folder, Request(do="status"))
        assert reply.plan is not None, "a service tells its plan"
        return reply.plan

    def change(self, plan: Plan, *renew: str, drain: str = "") -> Reply:
        manner = Manner(drain=drain, probation_s=0.1)
        *_, last = ask(self.folder, Request(do="apply", plan=plan, renew=renew, manner=manner))
        return last

    def swap(self, stage: str, drain: str = "") -> Reply:
        return self.change(self.plan(), stage, drain=drain)

    def draft(self, draft: str) -> Reply:
        plan = self.plan()
        verify = plan.stages["verify"]
        changed = msgspec.structs.replace(verify, config=verify.config | {"draft": draft})
        return self.change(msgspec.structs.replace(plan, stages=plan.stages | {"verify": changed}))

    def scale(self, worker: str, replicas: int) -> Reply:
        plan = self.plan()
        changed = msgspec.structs.replace(plan.workers[worker], replicas=replicas)
        return self.change(msgspec.structs.replace(plan, workers=plan.workers | {worker: changed}))


def load(under: Service, *, streams: int, swaps: int, max_tokens: int, calm_s: float) -> Report:
    """Runs all kinds of changes under this many streams."""
    control = Control(under)
    prompts = [prompt_of(under, 12 + 7 * (i % 8), i) for i in range(streams)]
    with Streams(under, prompts, max_tokens) as clients:
        start = time.perf_counter()
        time.sleep(calm_s)
        clients.wait_round()
        usual = clients.between(start, time.perf_counter())
        findings = [
            measured(clients, "swap detokenize", [lambda: control.swap("detokenize")] * swaps),
            measured(clients, "swap route", [lambda: control.swap("route")] * swaps),
            measured(
                clients,
                "draft source of verify",
                [lambda i=i: control.draft(("none", "ngram")[i % 2]) for i in range(swaps)],  # type: ignore[misc]
            ),
            measured(
                clients, "prefill 1-2-1", [lambda: control.scale("prefill", 2), lambda: control.scale("prefill", 1)]
            ),
            measured(clients, "decode, with handoff", [lambda: control.swap("decode", drain=HANDOFF)]),
        ]
    usual_p50, usual_p99 = percentile(usual, 0.5), percentile(usual, 0.99)
    return Report(usual_p50, usual_p99, findings, clients.num_right, clients.wrong, num_moved(under))


def num_moved(under: Service) -> int:
    """Sequences that were handed off, as the service counts them."""
    connection = http.client.HTTPConnection("127.0.0.1", under.port)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    found = re.findall(r"^flowinfer:sequences_moved_total\{[^}]*by=\"handoff\"[^}]*\} (\S+)", text, re.M)
    return round(sum(map(float, found)))


def measured(clients: Streams, name: str, changes: list[object]) -> Finding:
    """Makes these changes one after the other; the streams that run go on a little behind each."""
    found, start = Finding(name), time.perf_counter()
    for change in changes:
        began = time.perf_counter()
        reply: Reply = change()  # type: ignore[operator]
        found.seconds.append(time.perf_counter() - began)
        if not reply.ok:
            found.refused.append(reply.text)
    clients.wait_round()
    found.pause = max(clients.between(start, time.perf_counter()), default=0.0)
    return found


def prompt_of(under: Service, count: int, seed: int) -> list[int]:
    """Token ids of a prompt: English, or any ids where the model is a small random one."""
    if "/" not in under.model:
        return prompt_ids(count, seed)
    return [3 + (seed * 31 + 7 * i) % 90 for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    print(machine())
    settings = ("workers.prefill.threads=1", "workers.decode.threads=1", "stages.prefill.with.dtype=float32")
    with service(str(Path("prod.yaml")), "vars.model=smollm2-135m", *settings) as under:
        report = load(under, streams=options.streams, swaps=options.swaps, max_tokens=options.tokens, calm_s=20.0)
    print("\n".join(report.lines()))


if __name__ == "__main__":
    main()
