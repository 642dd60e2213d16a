"""A whole service in virtual time: real workers, each with its loop, credit and codec, over memory instead of sockets.

Deterministic: workers take turns, background work runs at once, time only moves when nothing is left to be done. The
supervisor's part (who is told of a death, when a worker starts again) is played here; nothing else is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from typing import Any

from flowinfer.channel import MAX_MESSAGES_A_POLL, Channel, Endpoints, Received
from flowinfer.codec import Buffer, Codec, CodecError
from flowinfer.engine.layout import KVLayout
from flowinfer.errors import FlowInferError, StageError
from flowinfer.graph.plan import API, FRONT, Plan
from flowinfer.message import Event, LeaseQuery, Message, Serving, WorkerDown, WorkerUp
from flowinfer.runtime.arenas import DEFAULT_KV_BYTES, private_arena
from flowinfer.runtime.child import FIRST_BACKOFF_S, LAST_BACKOFF_S
from flowinfer.runtime.clock import FakeClock
from flowinfer.runtime.events import SUPERVISOR
from flowinfer.runtime.group import Host
from flowinfer.runtime.loading import LoadStage
from flowinfer.runtime.stage_run import StageRun
from flowinfer.runtime.stats import Sample, loop_samples
from flowinfer.runtime.worker import Worker
from flowinfer.stage import Arena

MAX_TURNS = 200_000  # without time moving: a stage that is never done

Net = dict[str, deque[list[bytes]]]  # frames on their way, by endpoint


class Killed(BaseException):
    """The worker at work dies here. No `except Exception` holds it up, as none would hold up a kill -9."""


class _Pipe:
    """Stands for a socket that is connected to an endpoint."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def close(self, linger: int = 0) -> None:
        """What is on its way arrives."""


class MemoryChannel(Channel):
    """A mailbox whose frames go through the real codec and stay in this process."""

    def __init__(self, net: Net, name: str, generation: int = 1, *, epoch: int = 1) -> None:
        self.name, self.generation, self.epoch, self.keys = name, generation, epoch, None
        self.codec = Codec()
        self.num_malformed = self.bytes_sent = 0
        self._peers, self._event_headers, self._heads = {}, {}, {}
        self._net = net
        self.endpoints = Endpoints(f"{name}.{generation}.d", f"{name}.{generation}.c")
        for endpoint in self.endpoints:
            net[endpoint] = deque()

    def close(self, linger_ms: int = 0) -> None:
        self._peers.clear()
        for endpoint in self.endpoints:
            self._net.pop(endpoint, None)

    def wake(self) -> None:
        """Nobody sleeps here."""

    def poll(self, timeout_s: float | None) -> tuple[list[Received], list[Received]]:
        control, data = self._net[self.endpoints.control], self._net[self.endpoints.data]
        return self._decoded(control, inf), self._decoded(data, MAX_MESSAGES_A_POLL)

    @property
    def has_mail(self) -> bool:
        return any(self._net[endpoint] for endpoint in self.endpoints)

    def _decoded(self, queue: deque[list[bytes]], limit: float) -> list[Received]:
        got: list[Received] = []
        count = 0
        while queue and count < limit:
            try:
                got.append(self.codec.decode(queue.popleft()))
            except CodecError:
                self.num_malformed += 1
                continue
            count += len(got[-1][1])
        return got

    def _connect(self, endpoint: str) -> Any:
        return _Pipe(endpoint)

    def _send(self, socket: Any, frames: list[Buffer]) -> int:
        queue, copies = self._net.get(socket.endpoint), [bytes(frame) for frame in frames]
        if queue is not None:
            queue.append(copies)
        size = sum(map(len, copies))
        self.bytes_sent += size
        return size


class SimWorker(Worker):
    """A worker whose background work runs at once."""

    channel: MemoryChannel

    def submit(
        self,
        run: StageRun | None,
        fn: Callable[[], Any],
        then: Callable[[Any], Iterable[Message] | None],
        request: str = "",
    ) -> None:
        try:
            outcome = fn()
        except Exception as error:
            outcome = error
        self._done.append((run, lambda: then(outcome), (request,) if request else self._hand))

    def announce_opening(self, stage: str) -> None:
        """Nobody waits for it."""


class World:
    """The workers of a plan. on_start: what is done to each instance before it joins; on_death: told its name."""

    def __init__(
        self,
        plan: Plan,
        clock: FakeClock,
        *,
        on_start: Callable[[SimWorker], None] = lambda worker: None,
        on_death: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.plan, self.clock = plan, clock
        self.front = f"{plan.stages[API].worker if API in plan.stages else FRONT}.0"
        self.workers: dict[str, SimWorker] = {}
        self.generations: dict[str, int] = {}
        self.lost: list[list[Sample]] = []  # last samples of those that died
        self._on_start, self._on_death = on_start, on_death
        self._load = LoadStage(Path(plan.file).parent, plan.allow_local)
        self._net: Net = {}
        self._supervisor = MemoryChannel(self._net, SUPERVISOR)
        self._restart_at: dict[str, float] = {}
        self._backoff_s: dict[str, float] = {}

    def __enter__(self) -> World:
        for name, worker in self.plan.workers.items():
            for replica in range(worker.replicas):
                self._start(f"{name}.{replica}")
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self.workers.values():
            worker.close()

    # -- births and deaths ---------------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        generation = self.generations[name] = self.generations.get(name, 0) + 1
        channel = MemoryChannel(self._net, name, generation, epoch=self.plan.epoch)
        worker = SimWorker(self.plan, name.rpartition(".")[0], self._host(name), self._load, channel, clock=self.clock)
        worker.open()
        self._on_start(worker)
        channel.connect(SUPERVISOR, 1, self._supervisor.endpoints)
        self._supervisor.connect(name, generation, channel.endpoints)
        for peer in self.workers.values():
            self._tell(name, _up(peer))
            self._tell(peer.name, _up(worker))
        self.workers[name] = worker
        self._tell(name, Serving())

    def _host(self, name: str) -> Host:
        plan = self.plan.workers[name.rpartition(".")[0]]
        arenas: dict[str, Arena] = {}

        def arena(layout: KVLayout) -> Arena:
            if layout.digest not in arenas:
                arenas[layout.digest] = private_arena(layout, plan.kv_bytes or plan.tier_bytes or DEFAULT_KV_BYTES)
            return arenas[layout.digest]

        return Host(arena=arena, threads=plan.threads or 1)

    def kill(self, name: str) -> None:
        """This instance is gone, with all that it held; its successor comes after a while."""
        worker = self.workers.pop(name)
        self.lost.append(loop_samples(worker))
        worker.channel.close()
        self._supervisor.disconnect(name)
        for peer in self.workers:
            self._tell(peer, WorkerDown(worker=name, generation=worker.generation))
            self._tell(peer, LeaseQuery(owner=name))
        backoff = self._backoff_s.get(name, FIRST_BACKOFF_S)
        self._backoff_s[name] = min(LAST_BACKOFF_S, 2 * backoff)
        self._restart_at[name] = self.clock.now() + backoff
        self._on_death(name)

    def _tell(self, name: str, event: Event) -> None:
        self._supervisor.send_event(name, event)

    # -- time ----------------------------------------------------------------------------------------------------------

    def run_until_idle(self) -> None:
        """Lets all workers turn until nothing can be done now. Raises FlowInferError when that never is."""
        for _ in range(MAX_TURNS):
            now = self.clock.now()
            for name in [name for name, at in self._restart_at.items() if at <= now]:
                del self._restart_at[name]
                self._start(name)
            self._supervisor.poll(0)
            ready = [worker for worker in self.workers.values() if worker.channel.has_mail or worker.patience_s() == 0]
            if not ready:
                return
            for worker in ready:
                self._pump(worker)
        busy = ", ".join(run.name for worker in self.workers.values() for run in worker.runs if not run.waits)
        raise FlowInferError(f"The service was still busy after {MAX_TURNS} turns: {busy}.")

    def _pump(self, worker: SimWorker) -> None:
        if self.workers.get(worker.name) is not worker:
            return
        try:
            worker.pump(0.0)
        except (Killed, StageError):
            self.kill(worker.name)

    def next_at(self) -> float:
        """When something happens by itself, by the clock; inf for never."""
        now = self.clock.now()
        waits = [wait for worker in self.workers.values() if (wait := worker.patience_s()) is not None]
        return min([now + wait for wait in waits] + list(self._restart_at.values()), default=inf)

    def advance(self, until: float) -> None:
        """Moves the clock, but by a little at least: sums of times may miss a timer by their last bit."""
        self.clock.advance(max(1e-9, until - self.clock.now()))

    # -- what is left --------------------------------------------------------------------------------------------------

    def samples(self) -> list[Sample]:
        """Of all workers, also of those that died; without what the process counts as a whole."""
        own = [sample for worker in self.workers.values() for sample in loop_samples(worker)]
        return [*own, *(sample for group in self.lost for sample in group)]

    def leftovers(self, *, credit: bool = True) -> list[str]:
        """What is held of requests though all have ended. credit: also what hasn't come back to its producer."""
        found: list[str] = []
        for worker in self.workers.values():
            found += [f"{worker.name} still holds request {request}" for request in worker.open_requests]
            for outbox in worker.outputs.values():
                if outbox.waiting:
                    found.append(f"{outbox.waiting} messages still wait in {outbox.edge.name}")
                for consumer in outbox.consumers.values() if credit else ():
                    if consumer.outstanding:
                        found.append(
                            f"{consumer.name} hasn't given {consumer.outstanding} of credit back on {outbox.edge.name}"
                        )
        return found


def _up(worker: SimWorker) -> WorkerUp:
    data, control = worker.channel.endpoints
    return WorkerUp(worker=worker.name, generation=worker.generation, data=data, control=control)
