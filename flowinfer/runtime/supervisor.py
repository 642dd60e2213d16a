"""Runs a service: listening socket, memory, workers, their deaths and restarts, draining. Never imports torch."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import msgspec

from flowinfer.channel import Channel, Endpoints
from flowinfer.codec import Header, schema_digest
from flowinfer.errors import FlowInferError
from flowinfer.graph.plan import API, FRONT, Plan
from flowinfer.message import Drain, Event, LeaseQuery, LeaseReport, Message, Serving, Stats, WorkerDown, WorkerUp
from flowinfer.runtime.arenas import Ranges, arena_fds, give_spare_back, make_arenas, model_layouts, take_spare
from flowinfer.runtime.boot import Report
from flowinfer.runtime.boots import boot_of
from flowinfer.runtime.child import Child
from flowinfer.runtime.events import SUPERVISOR, Closing, Heartbeat, Opening, Ready, Running, Stop
from flowinfer.runtime.handover import Handover
from flowinfer.runtime.kept import Kept
from flowinfer.runtime.listening import address, listen
from flowinfer.runtime.loading import LoadStage
from flowinfer.runtime.mailbox import bind, load_keys
from flowinfer.runtime.rewire.answers import answer
from flowinfer.runtime.rewire.control import ControlServer
from flowinfer.runtime.rewire.controller import Controller
from flowinfer.runtime.rewire.experiment import attend
from flowinfer.runtime.rewire.journal import Journal
from flowinfer.runtime.rewire.protocol import Service, Source
from flowinfer.runtime.run_dir import RunDir
from flowinfer.runtime.signals import watched_signals
from flowinfer.runtime.state import State
from flowinfer.runtime.takeover import acquire, take_over

HUNG_S = 60.0  # without a heartbeat; a prefill step of a long prompt may take seconds on few cores
LOADING_S = 1_800.0  # for `open`, which may convert a model
LEASES_S = 1.0  # for peers to say which blocks of a dead worker they read
STOP_S = 5.0  # from Stop, or the last word of a worker that needs time to close, to SIGKILL
TICK_S = 0.5
CRASHED = 70  # exit code of a supervisor that met a bug: EX_SOFTWARE of sysexits.h

Say = Callable[[str], None]


class StartError(FlowInferError):
    """A worker couldn't start; the message is its own."""

    def __init__(self, worker: str, report: Report) -> None:
        super().__init__(report.error, help=report.help)
        self.worker = worker
        self.trace = report.trace


class Supervisor:
    """One running service. `run` returns when it has stopped; everything it made is gone by then.

    keeper: what started this process and starts another one should it die; without one, the service dies with it.
    left: what the predecessor of this supervisor knew, if it takes over from one.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        say: Say = print,
        ready: Callable[[str], None] | None = None,
        hung_s: float = HUNG_S,
        source: Source | None = None,
        journal: Journal | None = None,
        keeper: Kept | None = None,
        left: State | None = None,
    ) -> None:
        self.plan = plan
        self.keeper, self.left = keeper, left
        self.handover = Handover(self)
        self.census: dict[str, Running] = {}  # what workers answered who runs what
        self.controller = Controller(self, source or Source(file=plan.file), journal or Journal(plan.name))
        self.start_s = 0.0  # what the last start took
        self.num_late = 0  # events of instances that are gone
        self.hung_s = hung_s
        self.say = say
        self._ready = ready
        self._own_signals = 0
        self._serving = False
        self.is_taking_over = left is not None
        self._control: ControlServer | None = None
        self._front = f"{plan.stages[API].worker if API in plan.stages else FRONT}.0"
        self.load = LoadStage(Path(plan.file).parent, plan.allow_local)
        self.last_generation = 0
        self.engines: list[str] = []
        self.arenas = Ranges()
        self.children = _children(plan)

    def run(self) -> None:
        """Starts the workers, serves until a signal, drains and stops. Raises FlowInferError when it can't start."""
        with contextlib.ExitStack() as stack:
            if self.left is None:
                self._acquire(stack)
            else:
                acquire(self, stack, self.left)
            with watched_signals(self._count_signal, self.channel.wake_fd), self._bugs_end_this_process():
                self.handover.listen()
                if self.left is None:
                    self.open_control(stack)
                    self._start()
                else:
                    take_over(self, stack, self.left)
                self._serve()

    def _acquire(self, stack: contextlib.ExitStack) -> None:
        """Makes what the service needs; what has to outlive this process goes to the keeper as well."""
        self.layouts = model_layouts(self.plan, self.load)
        self.engines = [child.name for child in self.children.values() if child.worker in self.layouts]
        self.listener = stack.enter_context(listen(self.plan.serve)) if API in self.plan.stages else None
        self.arenas = make_arenas(self.plan, self.layouts)
        stack.callback(self.close_arenas)
        self.run_dir = RunDir()
        stack.callback(self.run_dir.remove)
        if self.keeper is None:
            self.life_fd, life = os.pipe()  # its writing end closes when this process dies, however it dies
            stack.callback(os.close, life)
            stack.callback(os.close, self.life_fd)
        else:
            self.life_fd = self.keeper.life_fd
        self.handover.hold()
        self.channel = Channel(SUPERVISOR, epoch=self.plan.epoch, keys=load_keys(self.plan.network))
        stack.callback(self.channel.close)
        self.endpoints = bind(self.channel, self.plan.network, self.run_dir.path)
        stack.callback(self.end_all)

    def open_control(self, stack: contextlib.ExitStack) -> None:
        """From now on people may ask."""
        self._control = ControlServer(self.run_dir.path, self._service(), self.channel.wake)
        stack.callback(self._control.close)

    @contextlib.contextmanager
    def _bugs_end_this_process(self) -> Iterator[None]:
        """An error that nobody meant to raise ends this process and not the service: another supervisor takes over."""
        try:
            yield
        except FlowInferError:
            raise
        except Exception:
            if self.keeper is None or not self.keeper.serves:
                raise
            traceback.print_exc()
            os._exit(CRASHED)

    # -- phases --------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if left := self.controller.journal.unfinished():
            self.say(f"The last run ended in the step {left[-1].step!r} of a change ({left[0].text}): it isn't made.")
        if trouble := self.controller.journal.try_write(0, self.plan.epoch, "start", f"process {os.getpid()}"):
            self.say(trouble)
        self.start_all()

    def start_all(self) -> None:
        """Starts every worker and connects them. Raises StartError when one can't."""
        started = time.monotonic()
        for child in self.children.values():
            self.spawn(child)
        while not self._signals and any(child.state != "ready" for child in self.children.values()):
            self.pump()
        if self._signals:
            return
        self.introduce(list(self.children.values()))
        self.serve_from_now_on()
        self.start_s = time.monotonic() - started
        self.tell_ready()

    def tell_ready(self) -> None:
        if self._ready is not None:
            self._ready(address(self.listener, tls=self.plan.serve.tls) if self.listener else "")
            self._ready = None

    def serve_from_now_on(self) -> None:
        """A worker that dies is started again; should this process die, another one takes over."""
        self._serving = True
        self.save()
        if self.keeper is not None:
            self.keeper.serving()

    @property
    def front(self) -> str:
        """The instance that holds the door."""
        return self._front

    @property
    def is_stopping(self) -> bool:
        return self._signals > 0

    def _service(self) -> Service:
        where = address(self.listener, tls=self.plan.serve.tls) if self.listener else ""
        pid = self.keeper.keeper if self.keeper is not None else os.getpid()
        return Service(name=self.plan.name, pid=pid, controller=os.getpid(), address=where, file=self.plan.file)

    def close_arenas(self) -> None:
        """Lets go of the KV memory; it goes with its last user."""
        self.handover.release_arenas()
        for fd in arena_fds(self.arenas):
            os.close(fd)
        self.arenas = Ranges()

    def save(self) -> None:
        """Writes down what another supervisor has to know should this one die now."""
        self.handover.save()

    def _serve(self) -> None:
        while not self._signals:
            self.pump()
        if self._serving:
            self.say("Draining; press Ctrl-C again to stop now.")
            self.drain()
        if self._signals < 2:
            self._stop()

    def drain(self) -> None:
        """Lets open requests finish, for drain_timeout_s at most; a second signal ends it."""
        deadline = time.monotonic() + self.plan.serve.drain_timeout_s
        front = self.children.get(self._front)
        self.tell_all(Drain())
        while self._signals < 2 and time.monotonic() < deadline and front is not None and front.state == "ready":
            self.pump(min(TICK_S, deadline - time.monotonic()))
            if front.drained:
                return

    def _stop(self) -> None:
        self.tell_all(Stop())
        self._await_end(self.children.values())

    def _await_end(self, children: Collection[Child]) -> None:
        """Waits for workers that were told to stop, as long as `may_go_on` or until somebody doesn't want to wait."""
        began = time.monotonic()
        while self._signals < 2 and any(self.may_go_on(child, began) for child in children):
            events, _ = self.channel.poll(TICK_S)
            for header, received in events:
                for event in received:
                    if isinstance(event, Closing):
                        self._take(header, event)
        for child in children:
            if child.alive and child.closing_at > began and self._signals < 2:
                self.say(f"Worker {child.name} hasn't ended in time (serve.stop_timeout): ending it.")

    def may_go_on(self, child: Child, told: float) -> bool:
        """Whether a worker that was told to stop at `told` still runs and isn't to be killed yet."""
        now, limit = time.monotonic(), self.plan.serve.stop_timeout_s + STOP_S
        return child.alive and now - told < limit and now - max(told, child.closing_at) < STOP_S

    def _note_closing(self, child: Child, closing: Closing) -> None:
        if not child.closing_at:
            limit = f"{self.plan.serve.stop_timeout_s:g} s at most (serve.stop_timeout)"
            self.say(f"Worker {child.name} still {closing.doing}: waiting for it, {limit}.")
        child.closing_at = time.monotonic()

    def end_all(self) -> None:
        for child in self.children.values():
            child.kill()
        for child in self.children.values():
            if child.process is not None:
                child.process.wait()

    # -- the loop ------------------------------------------------------------------------------------------------------

    def pump(self, wait_s: float = TICK_S) -> None:
        """Waits for news once and acts on it."""
        now = time.monotonic()
        due = [
            max(0.0, child.restart_at - now)
            for child in self.children.values()
            if child.state == "down" and not (child.on_trial or child.leaving or self.is_taking_over)
        ]
        events, _ = self.channel.poll(max(0.0, min([wait_s, *due])))
        for header, received in events:
            for event in received:
                self._take(header, event)
        for child in list(self.children.values()):
            self._check(child, time.monotonic())
        for request, say in self._control.take() if self._control is not None else ():
            answer(self, request, say)
        attend(self.controller)

    def _check(self, child: Child, now: float) -> None:
        if child.state == "down":
            if (
                child.process is None
                and not (child.on_trial or child.leaving)
                and now >= child.restart_at
                and self._leases_known(child, now)
                and not (self._signals or self.is_taking_over)
            ):
                self.spawn(child)
        elif not child.alive:
            self._bury(child, now)
        elif child.state == "ready" and now - child.beat_at > self.hung_s:
            self.say(f"Worker {child.name} hasn't answered for {self.hung_s:.0f} s: ending it.")
            child.kill()
        elif child.state == "starting" and now - child.started_at > LOADING_S:
            self.say(f"Worker {child.name} hasn't opened stage {child.opening!r} in {LOADING_S:.0f} s: ending it.")
            child.kill()

    def _take(self, header: Header, event: Message) -> None:
        child = self.children.get(header.sender)
        if child is None or header.generation != child.generation or child.state == "down":
            self._refuse()
            return
        if isinstance(event, Heartbeat):
            child.beat_at, child.drained = time.monotonic(), event.draining and not event.open_requests
        elif isinstance(event, Closing):
            self._note_closing(child, event)
        elif isinstance(event, Opening):
            child.opening = event.stage
            self.say(f"{child.name}: opening {event.stage}")
        elif isinstance(event, Ready):
            self._welcome(child, event)
        elif isinstance(event, Running):
            self._count(child, event)
        elif isinstance(event, LeaseReport):
            self._note_leases(child, event)
        elif isinstance(event, Event):
            self.controller.note(child, event)

    def _refuse(self) -> None:
        """Counts what an instance said that is gone; the front shows it with the late frames of the workers."""
        self.num_late += 1
        late = ("flowinfer:refused_late_frames_total", {"reason": "generation"}, float(self.num_late))
        self.channel.send_event(self.front, Stats(worker=SUPERVISOR, samples=[late]))

    # -- changes: who comes and who goes ------------------------------------------------------------------------------

    def take_plan(self, plan: Plan, leaving: Collection[str] = ()) -> None:
        """Workers that start from now on run this plan; those that leave aren't started again."""
        self.plan = plan
        self.load = LoadStage(Path(plan.file).parent, plan.allow_local)
        for name in leaving:
            self.children[name].leaving = True

    def leavers(self, new: Plan, replaced: Collection[str]) -> list[str]:
        """Instances that go with this plan: all of replaced workers, the last ones of those that shrink."""
        found: list[str] = []
        for worker, plan in new.workers.items():
            own = [child.name for child in self.children.values() if child.worker == worker and not child.leaving]
            found += own if worker in replaced else own[plan.replicas :]
        gone = (child for child in self.children.values() if child.worker not in new.workers and not child.leaving)
        return [*found, *(child.name for child in gone)]

    def give_birth(self, new: Plan, leaving: Collection[str]) -> list[Child]:
        """Starts the instances that this plan has and that aren't there, on trial. Raises FlowInferError."""
        born: list[Child] = []
        for worker, plan in new.workers.items():
            own = [child for child in self.children.values() if child.worker == worker]
            missing = plan.replicas - sum(child.name not in leaving for child in own)
            free = (number for number in itertools.count() if f"{worker}.{number}" not in self.children)
            for number in itertools.islice(free, max(0, missing)):
                born.append(Child(f"{worker}.{number}", worker, number, generation=self.last_generation, on_trial=True))
        for worker in {child.worker for child in born} - self.plan.workers.keys():
            alone = msgspec.structs.replace(new, workers={worker: new.workers[worker]})
            self.layouts |= model_layouts(alone, LoadStage(Path(new.file).parent, new.allow_local))
        for child in born:
            take_spare(self.arenas, child.name, self.layouts.get(child.worker, ()))
        for child in born:
            self.children[child.name] = child
            if child.worker in self.layouts and child.name not in self.engines:
                self.engines.append(child.name)
            self.spawn(child, new)
        return born

    def end(self, children: Collection[Child], *, stop: bool = False) -> None:
        """Ends these instances for good; `stop` asks them first."""
        for child in children if stop else ():
            self.channel.send_event(child.name, Stop())
        if stop:
            self._await_end(children)
        for child in children:
            child.kill()
            if child.process is not None:
                known, generation = child.state == "ready" and not child.on_trial, child.generation
                self.channel.disconnect(child.name)
                child.process.wait()
                child.buried(time.monotonic())
                self.run_dir.remove_sockets(child.name, generation)
                if known:
                    self.tell_all(WorkerDown(worker=child.name, generation=generation))
            self.children.pop(child.name, None)
            self.last_generation = max(self.last_generation, child.generation)  # peers refuse what is older
            give_spare_back(self.arenas, child.name)
        self.save()

    def check(self, plan: Plan) -> None:
        """Raises FlowInferError when this plan can't run here, as far as can be told before it starts."""
        model_layouts(plan, LoadStage(Path(plan.file).parent, plan.allow_local))

    def start_anew(self, plan: Plan) -> None:
        """Starts all workers of a plan, with none left from before. Raises StartError."""
        self._serving = False
        self.close_arenas()
        self.take_plan(plan)
        self.channel.raise_epoch(plan.epoch)
        self.layouts = model_layouts(plan, self.load)
        self.arenas = make_arenas(plan, self.layouts)
        self.handover.hold()
        self.children = _children(plan, self.last_generation)
        self.engines = [child.name for child in self.children.values() if child.worker in self.layouts]
        self.start_all()

    # -- births --------------------------------------------------------------------------------------------------------

    def spawn(self, child: Child, plan: Plan | None = None) -> None:
        child.generation += 1
        boot, fds = boot_of(self, child, plan or self.plan)
        try:
            pid = child.start(boot, fds, time.monotonic())
        except OSError as error:  # as of a machine that has no process to spare
            self._not_started(child, Report(error=f"worker {child.name} can't be started: {error.strerror}"))
            return
        self.run_dir.record(pid)
        self.save()

    def _not_started(self, child: Child, report: Report) -> None:
        if child.on_trial:
            child.failed = report
            return
        if not self._serving:
            raise StartError(child.name, report)
        child.postpone(time.monotonic())
        self.say(f"{report.error}. Trying again in {child.restart_at - time.monotonic():.1f} s.")

    def _welcome(self, child: Child, ready: Ready) -> None:
        if child.state != "starting":
            return  # said twice, around a takeover
        if ready.schema != schema_digest():
            self._turn_away(child)
            return
        child.ready(Endpoints(ready.data, ready.control), time.monotonic())
        self.channel.connect(child.name, child.generation, Endpoints(ready.data, ready.control))
        self.save()
        if self._serving and not child.on_trial and not self.is_taking_over:
            self.say(f"Worker {child.name} is back.")
            self.introduce([child])

    def _turn_away(self, child: Child) -> None:
        """Ends a worker whose code isn't that of the others; it is tried again, for the old code may come back."""
        message = f"worker {child.name} runs another FlowInfer than the service, whose code was changed meanwhile."
        help = "Put the old code back, or start the service anew; the other workers serve on until then."
        child.refusal = Report(error=message, help=help)
        child.kill()

    def _count(self, child: Child, running: Running) -> None:
        self.census[child.name] = running
        if child.state == "starting" and running.data:
            self._welcome(child, Ready(data=running.data, control=running.control, schema=running.schema))

    def introduce(self, new: list[Child]) -> None:
        """Tells the new workers of all that are ready, and those of the new."""
        for child in new:
            child.on_trial = False
        ready = [child for child in self.children.values() if child.state == "ready" and not child.on_trial]
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
        self.save()
        for other in self.children.values():
            other.leases = {request: lease for request, lease in other.leases.items() if lease[0] != child.name}
        if child.on_trial:
            child.failed = report
            return
        if not self._serving and not self._signals:
            raise StartError(child.name, report)
        self.tell_all(WorkerDown(worker=child.name, generation=child.generation))
        if child.name in self.arenas:
            self.tell_all(LeaseQuery(owner=child.name))
        if not self._signals and not child.leaving:
            what = "died" if was_ready else "didn't start"
            help = f" {report.help}" if report.help else ""
            again = f"Starting it again in {child.restart_at - now:.1f} s."
            self.say(f"Worker {child.name} {what}: {report.error}{help} {again}")

    def _note_leases(self, peer: Child, report: LeaseReport) -> None:
        owner = self.children.get(report.owner)
        if owner is None or owner.state != "down":
            return
        owner.leases.update((request, (peer.name, blocks)) for request, blocks in report.leases.items())
        if report.final:
            owner.lease_answers.add(peer.name)

    def _leases_known(self, child: Child, now: float) -> bool:
        if child.name not in self.arenas or now - child.restart_at >= LEASES_S:
            return True
        others = {peer.name for peer in self.children.values() if peer.state == "ready"}
        return others <= child.lease_answers

    def tell_all(self, event: Event) -> None:
        for child in self.children.values():
            if child.state == "ready" and not child.on_trial:
                self.channel.send_event(child.name, event)

    # -- signals -------------------------------------------------------------------------------------------------------

    @property
    def _signals(self) -> int:
        """How often people asked for the end; Ctrl-C reaches the keeper and this process, and counts once."""
        return max(self._own_signals, self.keeper.signals if self.keeper is not None else 0)

    def _count_signal(self) -> None:
        self._own_signals += 1


def _children(plan: Plan, last_generation: int = 0) -> dict[str, Child]:
    """The instances of a plan, not started."""
    return {
        f"{name}.{replica}": Child(f"{name}.{replica}", name, replica, generation=last_generation)
        for name, worker in plan.workers.items()
        for replica in range(worker.replicas)
    }
