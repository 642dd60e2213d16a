"""What an edge costs: the framework's, between two processes and inside one, against bare ZeroMQ of the same shape.

Run: python tests/bench/bench_edge.py. Prints the best of the medians of several repeats; the bar is 1.3x for edges
between processes and 2 us for edges inside one. Both sides send the same message (Tokens of one sequence) over ipc, and
both encode and decode it. Bare ZeroMQ is measured twice: waiting for one socket, and for two, as whoever wants to hear
a cancel ahead of data must.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from flowinfer.channel import Channel, Endpoints
from flowinfer.graph.plan import EdgePlan, Plan, StagePlan, WorkerPlan
from flowinfer.message import Tokens, WorkerUp
from flowinfer.runtime.clock import SystemClock
from flowinfer.runtime.events import Stop
from flowinfer.runtime.group import Host
from flowinfer.runtime.local import LocalService
from flowinfer.runtime.worker import Worker
from flowinfer.stage import Stage

ROUNDS = 1_500
MESSAGES = 50_000
REPEATS = 6


def tokens(step: int) -> Tokens:
    return Tokens(step=step, ids=["r1"], counts=np.ones(1, np.int32), tokens=np.full(1, step, np.int32))


# ------------------------------------------------------------------------------------------------------- bare ZeroMQ


class BareTokens(msgspec.Struct, array_like=True):
    """The same content as one would send it by hand: arrays as bytes."""

    step: int
    ids: list[str]
    counts: bytes
    tokens: bytes


def pack(encoder: msgspec.msgpack.Encoder, message: Tokens) -> bytes:
    plain = BareTokens(message.step, message.ids, message.counts.tobytes(), message.tokens.tobytes())
    return encoder.encode(plain)


def unpack(decoder: msgspec.msgpack.Decoder[BareTokens], frame: bytes) -> Tokens:
    plain = decoder.decode(frame)
    counts, flat = np.frombuffer(plain.counts, np.int32), np.frombuffer(plain.tokens, np.int32)
    return Tokens(step=plain.step, ids=plain.ids, counts=counts, tokens=flat)


def receiver(take: Any, control: Any, two_lanes: bool) -> Callable[[], bytes]:
    """How a bare program waits: for one socket, or, to hear a cancel ahead of data, for two."""
    if not two_lanes:
        return lambda: bytes(take.recv())
    lanes = [(control, zmq.POLLIN), (take, zmq.POLLIN)]

    def receive() -> bytes:
        zmq.zmq_poll(lanes, -1)
        return bytes(take.recv())

    return receive


def bare_echo(folder: str, rounds: int, messages: int, two_lanes: bool) -> None:
    context = zmq.Context()
    take, give = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (take, give):
        socket.sndhwm = socket.rcvhwm = 0
    control = context.socket(zmq.PULL)
    receive = receiver(take, control, two_lanes)
    take.bind(f"ipc://{folder}/a")
    control.bind(f"ipc://{folder}/ac")
    give.connect(f"ipc://{folder}/b")
    decoder, encoder = msgspec.msgpack.Decoder(BareTokens), msgspec.msgpack.Encoder()
    for _ in range(rounds):
        give.send(pack(encoder, unpack(decoder, receive())))
    for _ in range(messages):
        unpack(decoder, receive())
    give.send(b"done")
    take.recv()


def bare(folder: str, two_lanes: bool) -> tuple[float, float]:
    """Round trip and one-way time of a message, in microseconds."""
    child = multiprocessing.get_context("spawn").Process(target=bare_echo, args=(folder, ROUNDS, MESSAGES, two_lanes))
    child.start()
    context = zmq.Context()
    take, give = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (take, give):
        socket.sndhwm = socket.rcvhwm = 0
    control = context.socket(zmq.PULL)
    receive = receiver(take, control, two_lanes)
    take.bind(f"ipc://{folder}/b")
    control.bind(f"ipc://{folder}/bc")
    give.connect(f"ipc://{folder}/a")
    decoder, encoder = msgspec.msgpack.Decoder(BareTokens), msgspec.msgpack.Encoder()
    trips, message = [], tokens(1)
    for _ in range(ROUNDS):
        started = time.perf_counter()
        give.send(pack(encoder, message))
        unpack(decoder, receive())
        trips.append(time.perf_counter() - started)
    started = time.perf_counter()
    for _ in range(MESSAGES):
        give.send(pack(encoder, message))
    take.recv()
    one_way = (time.perf_counter() - started) / MESSAGES
    give.send(b"")
    child.join()
    context.destroy(0)
    return statistics.median(trips) * 1e6, one_way * 1e6


# ------------------------------------------------------------------------------------------------------ the framework


class Driver(Stage):
    """Sends one message at a time and waits for its echo, then sends many."""

    def open(self) -> None:
        self.message = tokens(1)
        self.trips: list[float] = []
        self.sent = 0
        self.began = self.flood_at = 0.0

    @property
    def busy(self) -> bool:
        return (self.sent == 0 or self.flood_at > 0) and self.sent < ROUNDS + MESSAGES

    def step(self, echoes: list[Tokens]) -> Iterable[Tokens]:
        now = time.perf_counter()
        if self.sent:
            self.trips.extend(now - self.began for _ in echoes)
        if self.sent == ROUNDS + MESSAGES and echoes:
            self.ctx.send(Stop(), to="front.0")
            return ()
        if len(self.trips) < ROUNDS:
            self.sent += 1
            self.began = time.perf_counter()
            return [self.message]
        self.flood_at = self.flood_at or now
        first = self.sent
        self.sent = min(first + 64, ROUNDS + MESSAGES)
        return [self.message] * (self.sent - first)


class Echo(Stage):
    """Answers the first ROUNDS messages, takes the others, and answers once more after the last."""

    def open(self) -> None:
        self.taken = 0

    def step(self, batch: list[Tokens]) -> Iterable[Tokens]:
        self.taken += len(batch)
        if self.taken == ROUNDS + MESSAGES:
            return batch[-1:]
        return batch if self.taken <= ROUNDS else ()


def _edge(name: str, source: str, target: str, port: str) -> EdgePlan:
    return EdgePlan(name=name, source=source, target=target, message="Tokens", port=port)


def _plan(back: str) -> Plan:
    names = {"driver": "front", "echo": back}
    return Plan(
        name="bench",
        digest="",
        file="bench.yaml",
        stages={name: StagePlan(name=name, kind=name, config={}, worker=worker) for name, worker in names.items()},
        edges=(_edge("there", "driver", "echo", "batch"), _edge("back", "echo", "driver", "echoes")),
        workers={
            worker: WorkerPlan(name=worker, stages=tuple(n for n, w in names.items() if w == worker))
            for worker in dict.fromkeys(names.values())
        },
    )


def worker_of(name: str, folder: str, peer: str) -> Worker:
    """A worker with its mailbox in folder that knows its peer's place already."""
    plan = _plan("back")
    channel = Channel(f"{name}.0")
    channel.bind_ipc(Path(folder))
    classes: dict[str, type[Stage]] = {"driver": Driver, "echo": Echo}

    def no_arena(layout: Any) -> Any:
        raise NotImplementedError

    worker = Worker(plan, name, Host(no_arena), lambda stage: classes[stage.kind], channel, clock=SystemClock())
    worker.open()
    ends = Endpoints(f"ipc://{folder}/{peer}.0.1.d", f"ipc://{folder}/{peer}.0.1.c")
    worker.handle(WorkerUp(worker=f"{peer}.0", generation=1, data=ends.data, control=ends.control))
    return worker


def echo_process(folder: str) -> None:
    worker_of("back", folder, "front").run()


def framework(folder: str) -> tuple[float, float]:
    """Round trip and one-way time of a message between two workers, in microseconds."""
    child = multiprocessing.get_context("spawn").Process(target=echo_process, args=(folder,))
    child.start()
    worker = worker_of("front", folder, "back")
    worker.run()
    ended = time.perf_counter()
    child.terminate()
    child.join()
    driver: Any = worker.by_name["driver"].stage
    worker.channel.close()
    return statistics.median(driver.trips) * 1e6, (ended - driver.flood_at) / MESSAGES * 1e6


class Pass(Stage):
    """Passes messages on: its edges are what is measured."""

    def step(self, batch: list[Tokens]) -> Iterable[Tokens]:
        return batch


class Last(Stage):
    """Takes messages."""

    def step(self, batch: list[Tokens]) -> None:
        return None


def inside(depth: int = 8, batch: int = 1) -> float:
    """Microseconds per message and edge of a chain of stages in one worker, when each turn carries `batch` messages."""
    names = [f"s{i}" for i in range(depth)] + ["last"]
    plan = Plan(
        name="chain",
        digest="",
        file="bench.yaml",
        stages={name: StagePlan(name=name, kind=name, config={}, worker="front") for name in names},
        edges=tuple(_edge(f"{a} -> {b}", a, b, "batch") for a, b in itertools.pairwise(names)),
        workers={"front": WorkerPlan(name="front", stages=tuple(names))},
    )
    classes = dict.fromkeys(names[:-1], Pass) | {"last": Last}
    with LocalService(plan, stages=classes) as service:
        group, first = service.group, service.group.by_name["s0"].inboxes["batch"].messages
        message = tokens(1)
        started = time.perf_counter()
        for _ in range(2_000):
            first.extend([message] * batch)
            group.turn()
        return (time.perf_counter() - started) / 2_000 / batch / depth * 1e6


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    runs: list[list[tuple[float, float]]] = []
    for _ in range(REPEATS):
        run = []
        for measure in (lambda f: bare(f, False), lambda f: bare(f, True), framework):
            with tempfile.TemporaryDirectory(prefix="fi") as folder:
                run.append(measure(folder))
        runs.append(run)
    for index, what in enumerate(("round trip", "one way")):
        # The best of the repeats of each: what else runs on the machine only ever adds.
        one, two, ours = (min(run[kind][index] for run in runs) for kind in range(3))
        print(
            f"{what:<12} one socket {one:7.2f} us   two lanes {two:7.2f} us   edge {ours:7.2f} us   "
            f"ratio to one {ours / one:5.2f}, to two {ours / two:5.2f}  (bar 1.30)"
        )
    for batch in (1, 64):
        print(f"in a worker  {batch:>3} messages a turn: {inside(batch=batch):6.2f} us a message and edge  (bar 2.00)")


if __name__ == "__main__":
    main()
