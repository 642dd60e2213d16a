"""Workers of a decoding graph in one process, over real channels and a small random model; steps are taken by hand."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from decode_loop import prompt
from delivery import Post, SureChannel

from flowinfer.channel import Channel, Endpoints
from flowinfer.engine.layout import KVLayout
from flowinfer.graph.plan import EdgePlan, Plan, StagePlan, WorkerPlan
from flowinfer.message import (
    Cancel,
    Ended,
    Event,
    Failure,
    Finish,
    Leave,
    Moved,
    Prompt,
    Serving,
    Tokens,
    WorkerDown,
    WorkerUp,
)
from flowinfer.runtime.clock import SystemClock
from flowinfer.runtime.group import Host
from flowinfer.runtime.loading import load_class
from flowinfer.runtime.rewire.balance import imbalances
from flowinfer.runtime.worker import Worker
from flowinfer.serve.ledger import Entry, Ledger
from flowinfer.stage import Arena, Clock, Stage

EDGES = (
    ("api", "lookup", "Prompt", "prompts", "messages"),
    ("lookup", "prefill", "Prompt", "prompts", "messages"),
    ("prefill", "transfer", "Sequence", "sequences", "blocks"),
    ("transfer", "decode", "Sequence", "sequences", "messages"),
    ("decode", "verify", "Logits", "logits", "messages"),
    ("verify", "decode", "Proposal", "proposals", "messages"),
    ("verify", "api", "Tokens", "tokens", "messages"),
)
PLACES = {"api": "front", "lookup": "front", "prefill": "prefill"}
__all__ = ["Cluster", "prompt"]


class Door(Stage):
    """Sends prompts, keeps the gateway's ledger, and puts the tokens that come back at their places."""

    kind = "api"
    listens = (Failure, Moved, WorkerDown)

    def __init__(self, config: Any, ctx: Any) -> None:
        super().__init__(config, ctx)
        self.outbox: list[Prompt] = []
        self.tokens: dict[str, dict[int, int]] = {}
        self.before: dict[str, list[int]] = {}
        self.ended: dict[str, Finish | Failure | str] = {}
        self.finishes: dict[str, Finish] = {}
        self.ledger = Ledger()
        self.num_repeated = 0

    @property
    def busy(self) -> bool:
        return bool(self.outbox)

    def step(self, tokens: list[Tokens]) -> Iterable[Prompt]:
        for batch in tokens:
            self._take(batch)
        prompts, self.outbox = self.outbox, []
        for one in prompts:
            self.ledger.open(Entry(one.id, lambda piece: None, 0.0, 1e9, (one.id,)))
        return prompts

    def _take(self, batch: Tokens) -> None:
        assert batch.positions is not None
        ends = np.cumsum(batch.counts)
        for opening in batch.opened:
            if opening.before is not None:
                self.before[opening.id] = opening.before.tolist()
        for i, id in enumerate(batch.ids):
            new = batch.tokens[ends[i] - batch.counts[i] : ends[i]].tolist()
            if id in self.ended:
                continue
            places = self.tokens.setdefault(id, {})
            for place, token in enumerate(new, int(batch.positions[i])):
                assert places.get(place, token) == token, f"{id} got two tokens at {place}"
                self.num_repeated += place in places
                places[place] = token
            if i in batch.finished:
                self.finishes[id] = batch.finished[i]
            finish = self.finishes.get(id)
            if finish is not None and len(self.answer(id)) == finish.completion_tokens:
                self._close(id, finish)

    def answer(self, id: str) -> list[int]:
        """The tokens of a request, in order; what a worker died with came with who went on."""
        places = dict(enumerate(self.before.get(id, []))) | self.tokens.get(id, {})
        assert sorted(places) == list(range(len(places))) or id not in self.ended
        return [token for _, token in sorted(places.items())]

    def _close(self, id: str, end: Finish | Failure | str) -> None:
        self.ended[id] = end
        self.ledger.close(id)
        self.ctx.send(Ended(ids=[id]) if isinstance(end, Finish) else Cancel(ids=[id]))

    def observe(self, event: Event) -> None:
        if isinstance(event, Failure) and event.id not in self.ended:
            self._close(event.id, event)
        elif isinstance(event, Moved):
            lost = self.ledger.move(event.ids, event.worker, event.generation, shared=event.shared, hops=event.hops)
            for id in lost:
                self._close(id, "worker died")
            self.ctx.send(Cancel(ids=[id for id in event.ids if id not in self.ledger]), to=event.worker)
        elif isinstance(event, WorkerDown):
            for id in self.ledger.lost(event.worker, event.generation):
                self._close(id, "worker died")


class Cluster:
    """front.0, prefill.0 and decode instances that come and go. shared: one arena, else KV travels in frames.

    What a worker has sent is there at the next turn of who gets it; with delays, that or some turns later.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        blocks: int = 64,
        shared: bool = True,
        draft: str = "none",
        lookup: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        clock: Clock | None = None,
        delays: random.Random | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self.post = Post(delays)
        named = {"model": str(model), "dtype": "float32"}
        kinds: dict[str, tuple[str, dict[str, Any]]] = {
            "api": ("api", {}),
            "lookup": ("cache-lookup", {**named, **(lookup or {})}),
            "prefill": ("prefill", {**named, "token_budget": 96}),
            "transfer": ("kv-transfer", {**named, **(transfer or {})}),
            "decode": ("moe-decode", {**named, "max_batch": 8}),
            "verify": ("spec-verify", {"draft": draft}),
        }
        stages = {n: StagePlan(name=n, kind=k, config=c, worker=PLACES.get(n, "decode")) for n, (k, c) in kinds.items()}
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
                capacity=blocks if unit == "blocks" else 64,
            )
            for a, b, m, p, unit in EDGES
        )
        workers = {
            w: WorkerPlan(name=w, stages=tuple(n for n in stages if stages[n].worker == w))
            for w in ("front", "prefill", "decode")
        }
        self.plan = Plan(name="t", digest="", file="", stages=stages, edges=edges, workers=workers)
        self.folder, self.blocks, self.shared = folder, blocks, shared
        self.workers: dict[str, Worker] = {}
        self.channels: dict[str, tuple[Channel, Endpoints]] = {}
        self._memory: dict[str, memoryview] = {}
        for name in ("front.0", "prefill.0", "decode.0"):
            self.add(name)
        self.door: Door = self.workers["front.0"].by_name["api"].stage  # type: ignore[assignment]

    def add(self, name: str) -> Any:
        """Starts an instance and connects it with the others."""
        place = len(self.channels)
        channel = SureChannel(name, self.post)
        endpoints = channel.bind_ipc(self.folder)
        host = Host(arena=lambda layout: self._arena(layout, name, place))
        worker = Worker(
            self.plan,
            name.rpartition(".")[0],
            host,
            lambda stage: Door if stage.kind == "api" else load_class(stage.kind),
            channel,
            clock=self.clock,
        )
        worker.open()
        worker.member.leaving = {x for other in self.workers.values() for x in other.member.leaving}
        self.channels[name] = channel, endpoints
        for peer, other in self.workers.items():
            worker.handle(
                WorkerUp(
                    worker=peer, generation=1, data=self.channels[peer][1].data, control=self.channels[peer][1].control
                )
            )
            other.handle(WorkerUp(worker=name, generation=1, data=endpoints.data, control=endpoints.control))
        self.workers[name] = worker
        worker.handle(Serving())
        return worker

    def _arena(self, layout: KVLayout, name: str, place: int) -> Arena:
        if not self.shared:
            memory = memoryview(bytearray(self.blocks * layout.block_bytes))
            return Arena(memory, self.blocks, 0, self.blocks)
        whole = 16 * self.blocks  # for as many instances
        memory = self._memory.setdefault(layout.digest, memoryview(bytearray(whole * layout.block_bytes)))
        return Arena(memory, whole, place * self.blocks, (place + 1) * self.blocks, shared=True)

    def decode(self, name: str) -> Any:
        return self.workers[name].by_name["decode"].stage

    def engine(self, name: str) -> Any:
        """Of a worker that has one."""
        return self.workers[name].by_name["prefill" if name.startswith("prefill") else "decode"].stage.engine

    def leave(self, name: str, mode: str) -> None:
        """As a change does: nobody sends this instance anything new, and it's told to send away what it has."""
        for worker in self.workers.values():
            worker.member.leaving |= {name}
            for outbox in worker.outputs.values():
                outbox.leave(name)
        self.workers[name].emit(Leave(mode=mode), name)  # type: ignore[arg-type]

    def is_empty(self, name: str) -> bool:
        """Nobody counts on this instance any more, which is when a change ends it."""
        holders = {holder for entry in self.door.ledger._open.values() for holder, _ in entry.holders}
        if name in holders or not all(worker.member.is_drained() for worker in self.workers.values()):
            return False
        return not imbalances({other: worker.member.count(0) for other, worker in self.workers.items()}, [name])

    def retire(self, name: str) -> None:
        """Ends an instance that is empty, as a change does: what it sent last arrives."""
        self.kill(name, linger_ms=10_000)

    def kill(self, name: str, linger_ms: int = 0) -> set[str]:
        """Ends an instance between two of its steps; what it sent last may be lost or not.

        Returns the requests that another decoder knows, and the door knows that it does, when they hear of it.
        """
        self.workers.pop(name)
        self.channels[name][0].close(linger_ms)
        self.turn()  # the supervisor notices a little later
        decoders = [worker for worker in self.workers.values() if worker.worker == "decode"]
        held = {e.id for e in self.door.ledger._open.values() if any(holder != name for holder, _ in e.holders)}
        known = {request for worker in decoders for request in worker.open_requests if request in held}
        for worker in self.workers.values():
            worker.handle(WorkerDown(worker=name, generation=1))
        return known

    def send(self, *prompts: Prompt) -> None:
        self.door.outbox.extend(prompts)

    def cancel(self, id: str) -> None:
        self.door.ended.setdefault(id, "cancelled")
        self.door.ledger.close(id)
        self.workers["front.0"].emit(Cancel(ids=[id]))

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            for worker in list(self.workers.values()):
                worker.pump(0)

    def until(self, claim: Any, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not claim():
            assert time.monotonic() < deadline, f"not in {seconds:g} s; open: {self.open_ids()}"
            self.turn()

    def open_ids(self) -> list[str]:
        return [id for id in self.door.tokens if id not in self.door.ended]

    def finish(self, ids: Iterable[str]) -> dict[str, list[int]]:
        """Tokens of these requests, in order, once all have ended."""
        ids = list(ids)
        self.until(lambda: all(id in self.door.ended for id in ids))
        return {id: self.door.answer(id) for id in ids}

    def close(self) -> None:
        for name, worker in self.workers.items():
            worker.close()
            self.channels[name][0].close()
