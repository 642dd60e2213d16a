"""Runs a service: listening socket, memory, workers, their deaths and restarts, draining. Never imports torch."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from flowinfer.channel import Channel, Endpoints
from flowinfer.codec import Header, schema_digest
from flowinfer.errors import FlowInferError
from flowinfer.graph.plan import API, FRONT, Plan
from flowinfer.message import Drain, Event, LeaseQuery, LeaseReport, Message, Serving, WorkerDown, WorkerUp
from flowinfer.runtime.arenas import make_arenas, model_layouts
from flowinfer.runtime.boot import ArenaRange, Boot, Report
from flowinfer.runtime.child import Child
from flowinfer.runtime.events import SUPERVISOR, Heartbeat, Opening, Ready, Stop
from flowinfer.runtime.listening import address, listen
from flowinfer.runtime.loading import LoadStage
from flowinfer.runtime.mailbox import bind, load_keys
from flowinfer.runtime.run_dir import RunDir

HUNG_S = 60.0  # without a heartbeat; a prefill step of a long prompt may take seconds on few cores
LOADING_S = 1_800.0  # for `open`, which may convert a model
LEASES_S = 1.0  # for peers to say which blocks of a dead worker they read
STOP_S = 5.0  # from Stop to SIGKILL
TICK_S = 0.5

Say = Callable[[str], None]


class StartError(FlowInferError):
    """A worker couldn't start; the message is its own."""

    def __init__(self, worker: str, report: Report) -> None:
        super().__init__(report.error, help=report.help)
        self.worker = worker
        self.trace = report.trace


class Supervisor:
    """One running service. `run` returns when it has stopped; everything it made is gone by then."""

    def __init__(
        self, plan: Plan, *, say: Say = print, ready: Callable[[str], None] | None = None, hung_s: float = HUNG_S
    ) -> None:
        self.plan = plan
        self.hung_s = hung_s
        self._say = say
        self._ready = ready
        self._signals = 0
        self._serving = False
        self._front = f"{plan.stages[API].worker if API in plan.stages else FRONT}.0"
        self._load = LoadStage(Path(plan.file).parent, plan.allow_local)
        self.children = {
            f"{name}.{replica}": Child(f"{name}.{replica}", name, replica)
            for name, worker in plan.workers.items()
            for replica in range(worker.replicas)
        }

    def run(self) -> None:
        """Starts the workers, serves until a signal, drains and stops. Raises FlowInferError when it can't start."""
        self._layouts = model_layouts(self.plan, self._load)
        self._engines = [child.name for child in self.children.values() if child.worker in self._layouts]
        with contextlib.ExitStack() as stack:
            self.listener = stack.enter_context(listen(self.plan.serve)) if API in self.plan.stages else None
            self._arenas = make_arenas(self.plan, self._layouts)
            for fd in {arena.fd for ranges in self._arenas.values() for arena in ranges}:
                stack.callback(os.close, fd)
            self.run_dir = RunDir()
            stack.callback(self.run_dir.remove)
            self._life_fd, life = os.pipe()  # its writing end closes when this process dies, however it dies
            stack.callback(os.close, life)
            stack.callback(os.close, self._life_fd)
            self.channel = Channel(SUPERVISOR, epoch=self.plan.epoch, keys=load_keys(self.plan.network))
            stack.callback(self.channel.close)
            self._endpoints = bind(self.channel, self.plan.network, self.run_dir.path)
            stack.callback(self._end_all)
            with self._watched_signals():
                self._start()
                self._serve()

    # -- phases --------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        for child in self.children.values():
            self._spawn(child)
        while not self._signals and any(child.state != "ready" for child in self.children.values()):
            self._pump()
        if self._signals:
            return
        self._introduce(list(self.children.values()))
        self._serving = True
        if self._ready is not None:
            self._ready(address(self.listener) if self.listener else "")

    def _serve(self) -> None:
        while not self._signals:
            self._pump()
        if self._serving:
            self._drain()
        if self._signals < 2:
            self._stop()

    def _drain(self) -> None:
        """Lets open requests finish, for drain_timeout_s at most; a second signal ends it."""
        self._say("Draining; press Ctrl-C again to stop now.")
        deadline = time.monotonic() + self.plan.serve.drain_timeout_s
        front = self.children.get(self._front)
        self._tell_all(Drain())
        while self._signals < 2 and time.monotonic() < deadline and front is not None and front.state == "ready":
            self._pump(min(TICK_S, deadline - time.monotonic()))
            if front.drained:
                return

    def _stop(self) -> None:
        self._tell_all(Stop())
        deadline = time.monotonic() + STOP_S
        while self._signals < 2 and time.monotonic() < deadline and any(c.alive for c in self.children.values()):
            self.channel.poll(min(TICK_S, max(0.0, deadline - time.monotonic())))

    def _end_all(self) -> None:
        for child in self.children.values():
            child.kill()
        for child in self.children.values():
            if child.process is not None:
                child.process.wait()

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _pump(self, wait_s: float = TICK_S) -> None:
        """Waits for news once and acts on it."""
        now = time.monotonic()
        due = [max(0.0, child.restart_at - now) for child in self.children.values() if child.state == "down"]
        events, _ = self.channel.poll(max(0.0, min([wait_s, *due])))
        for header, received in events:
            for event in received:
                self._take(header, event)
        for child in self.children.values():
            self._check(child, time.monotonic())

    def _check(self, child: Child, now: float) -> None:
        if child.state == "down":
            if (
                child.process is None
                and now >= child.restart_at
                and self._leases_known(child, now)
                and not self._signals
            ):
                self._spawn(child)
        elif not child.alive:
            self._bury(child, now)
        elif child.state == "ready" and now - child.beat_at > self.hung_s:
            self._say(f"Worker {child.name} hasn't answered for {self.hung_s:.0f} s: ending it.")
            child.kill()
        elif child.state == "starting" and now - child.started_at > LOADING_S:
            self._say(f"Worker {child.name} hasn't opened stage {child.opening!r} in {LOADING_S:.0f} s: ending it.")
            child.kill()

    def _take(self, header: Header, event: Message) -> None:
        child = self.children.get(header.sender)
        if child is None or header.generation != child.generation or child.state == "down":
            return
        if isinstance(event, Heartbeat):
            child.beat_at, child.drained = time.monotonic(), event.draining and not event.open_requests
        elif isinstance(event, Opening):
            child.opening = event.stage
            self._say(f"{child.name}: opening {event.stage}")
        elif isinstance(event, Ready):
            self._welcome(child, event)
        elif isinstance(event, LeaseReport):
            self._note_leases(child, event)

    # -- births --------------------------------------------------------------------------------------------------------

    def _spawn(self, child: Child) -> None:
        child.generation += 1
        listener = self.listener if child.name == self._front else None
        arenas = tuple(self._quarantine(child, arena) for arena in self._arenas.get(child.name, ()))
        boot = Boot(
            plan=self.plan,
            worker=child.worker,
            replica=child.replica,
            generation=child.generation,
            run_dir=str(self.run_dir.path),
            supervisor_data=self._endpoints.data,
            supervisor_control=self._endpoints.control,
            life_fd=self._life_fd,
            report_fd=child.open_report(),
            threads=self._threads(child.worker),
            device=self.plan.workers[child.worker].device,
            engine_index=self._engines.index(child.name) if child.name in self._engines else 0,
            num_engines=max(1, len(self._engines)),
            listener_fd=listener.fileno() if listener else None,
            arenas=arenas,
        )
        fds = [self._life_fd, *(arena.fd for arena in arenas), *([listener.fileno()] if listener else [])]
        child.start(boot, fds, time.monotonic())
        if child.process is not None:
            self.run_dir.record(child.process.pid)

    def _quarantine(self, child: Child, arena: ArenaRange) -> ArenaRange:
        """The range, with the blocks in it that others still read from the dead generation."""
        mine = range(arena.first_block, arena.end_block)
        leases = {
            request: (lessee, tuple(b for b in blocks if b in mine))
            for request, (lessee, blocks) in child.leases.items()
        }
        return ArenaRange(
            layout=arena.layout,
            fd=arena.fd,
            num_blocks=arena.num_blocks,
            first_block=arena.first_block,
            end_block=arena.end_block,
            shared=arena.shared,
            quarantined={request: lease for request, lease in leases.items() if lease[1]},
        )

    def _threads(self, worker: str) -> int:
        """Threads as the file says; 0 shares the cores among the workers that run models."""
        asked = self.plan.workers[worker].threads
        engines = sum(self.plan.workers[name].replicas for name in self._layouts)
        if asked or worker not in self._layouts:
            return asked or 1
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // engines)

    def _welcome(self, child: Child, ready: Ready) -> None:
        if ready.schema != schema_digest():
            raise FlowInferError(f"worker {child.name} runs another version of FlowInfer.", help="Install one version.")
        child.ready(Endpoints(ready.data, ready.control), time.monotonic())
        self.channel.connect(child.name, child.generation, Endpoints(ready.data, ready.control))
        if self._serving:
            self._say(f"Worker {child.name} is back.")
            self._introduce([child])

    def _introduce(self, new: list[Child]) -> None:
        """Tells the new workers of all that are ready, and those of the new."""
        ready = [child for child in self.children.values() if child.state == "ready"]
        for child in ready:
            for peer in ready:
                if peer is not child and (child in new or peer in new) and peer.endpoints is not None:
                    data, control = peer.endpoints
                    up = WorkerUp(worker=peer.name, generation=peer.generation, data=data, control=control)
                    self.channel.send_event(child.name, up)
        for child in new:
            self.channel.send_event(child.name, Serving())

    # -- deaths --------------------------------------------------------------------------------------------------------

    def _bury(self, child: Child, now: float) -> None:
        was_ready = child.state == "ready"
        self.channel.disconnect(child.name)
        report = child.buried(now)
        self.run_dir.remove_sockets(child.name, child.generation)
        for other in self.children.values():
            other.leases = {request: lease for request, lease in other.leases.items() if lease[0] != child.name}
        if not self._serving and not self._signals:
            raise StartError(child.name, report)
        self._tell_all(WorkerDown(worker=child.name, generation=child.generation))
        if child.name in self._arenas:
            self._tell_all(LeaseQuery(owner=child.name))
        if not self._signals:
            what = "died" if was_ready else "didn't start"
            self._say(
                f"Worker {child.name} {what}: {report.error} Starting it again in {child.restart_at - now:.1f} s."
            )

    def _note_leases(self, peer: Child, report: LeaseReport) -> None:
        owner = self.children.get(report.owner)
        if owner is None or owner.state != "down":
            return
        owner.leases.update((request, (peer.name, blocks)) for request, blocks in report.leases.items())
        if report.final:
            owner.lease_answers.add(peer.name)

    def _leases_known(self, child: Child, now: float) -> bool:
        if child.name not in self._arenas or now - child.restart_at >= LEASES_S:
            return True
        others = {peer.name for peer in self.children.values() if peer.state == "ready"}
        return others <= child.lease_answers

    def _tell_all(self, event: Event) -> None:
        for child in self.children.values():
            if child.state == "ready":
                self.channel.send_event(child.name, event)

    # -- signals -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _watched_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM are counted; they and SIGCHLD end the wait of the loop."""

        def count(number: int, frame: FrameType | None) -> None:
            self._signals += 1

        def wake(number: int, frame: FrameType | None) -> None:
            return

        handlers = {signal.SIGINT: count, signal.SIGTERM: count, signal.SIGCHLD: wake}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        fd = signal.set_wakeup_fd(self.channel.wake_fd, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in before.items():
                signal.signal(number, handler)
