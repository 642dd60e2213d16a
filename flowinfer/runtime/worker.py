"""A group with a channel: edges to other workers, credit, heartbeats, peers that come and go."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowinfer.channel import Channel, Endpoints, Received
from flowinfer.codec import CodecError, Header, schema_digest
from flowinfer.errors import RequestError
from flowinfer.graph.plan import EdgePlan, Plan
from flowinfer.message import (
    Cancel,
    Credit,
    Drain,
    Event,
    LeaseQuery,
    LeaseReport,
    Message,
    Moved,
    Stats,
    WorkerDown,
    WorkerUp,
)
from flowinfer.runtime.events import (
    SUPERVISOR,
    Census,
    Change,
    Closing,
    Heartbeat,
    Opening,
    Probe,
    Ready,
    Regrant,
    Running,
    Stop,
    TapAsk,
    Trouble,
)
from flowinfer.runtime.group import Group, Host
from flowinfer.runtime.inbox import Account, Debt, Grants, Inbox
from flowinfer.runtime.loading import Loader, LoadStage
from flowinfer.runtime.moves import Moves
from flowinfer.runtime.outbox import Outbox
from flowinfer.runtime.rewire.graft import Layer
from flowinfer.runtime.rewire.member import Member
from flowinfer.runtime.rewire.split import split
from flowinfer.runtime.rewire.vitals import is_vital
from flowinfer.runtime.stage_run import StageRun
from flowinfer.runtime.stats import samples
from flowinfer.runtime.tap import Taps
from flowinfer.stage import Clock

log = logging.getLogger("flowinfer.worker")

HEARTBEAT_S = 0.5
DRAIN_CHECK_S = 0.02


def tune_collector() -> None:
    """Keeps the garbage collector off the hot path: what is loaded stays, and cycles are rare and small.

    With Python's defaults a flood of small messages spends half of its time in collections.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


class Worker(Group):
    """One worker instance: `run` until it is told to stop."""

    def __init__(self, plan: Plan, worker: str, host: Host, load: Loader, channel: Channel, *, clock: Clock) -> None:
        self.channel = channel
        self.worker = worker
        self.grants = Grants()
        self.inputs: dict[str, tuple[EdgePlan, Inbox, str]] = {}  # by edge: where it ends, and the port if it is held
        self.outputs: dict[str, Outbox] = {}
        self.peers: dict[str, int] = {}  # live workers other than this one, with their generations
        self.num_unsent = 0
        self.moves = Moves()
        self._dead: dict[str, int] = {}  # last generation of each worker that died
        self._moved: list[str] = []
        self._epochs: dict[str, int] = {}  # by lane and sender: the newest of its frames
        self._first_epoch = plan.epoch
        self._early: dict[str, list[tuple[Header, Credit]]] = {}  # by edge: from workers that switched before this one
        self._supervisor = 1  # its generation: one more each time that another one takes over
        self._draining = self._stopping = False
        stages = [plan.stages[stage] for stage in plan.workers[worker].stages]
        super().__init__(plan, stages, host, load, name=channel.name, generation=channel.generation, clock=clock)
        self.member = Member(self)
        self.taps = Taps(self)

    def wire(self, edge: EdgePlan) -> None:
        """Fused edges as in a group; of the others, the half that is here."""
        source, target = self.by_name.get(edge.source), self.by_name.get(edge.target)
        if source is not None and target is not None:
            super().wire(edge)
        elif source is not None:
            source.add_output(self.outbox_of(edge))
        elif target is not None:
            self._take_in(edge, target, self.plan)

    def _take_in(self, edge: EdgePlan, target: StageRun, plan: Plan) -> None:
        """Opens an edge from another worker."""
        producers = plan.workers[plan.stages[edge.source].worker].replicas
        self.grants.share(edge.name, edge.capacity // producers)
        held = edge.port if edge.port in target.held else ""
        self.inputs[edge.name] = (edge, target.inboxes[edge.port], held)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Turns until Stop. Raises StageError when a stage keeps breaking."""
        tune_collector()
        self._beat()
        while not self._stopping:
            self.pump(self.patience_s())
        self._tell_counts()  # what has been counted since the last beat outlives this worker

    def pump(self, wait_s: float | None) -> None:
        """Waits once, then works off what has come."""
        events, data = self.channel.poll(wait_s)
        for header, received in events:
            self._take_events(header, received)
        if data:
            self._take_data(data)
        self.turn()

    def end_turn(self) -> None:
        if self.grants.next_at < math.inf:
            self._return_credit()
        super().end_turn()

    def patience_s(self) -> float | None:
        """How long nothing will happen by itself: wait_s, and credit that is due."""
        wait = self.wait_s()
        if wait == 0 or self.grants.next_at == math.inf:
            return wait
        left = max(0.0, self.grants.next_at - self.clock.now())
        return left if wait is None else min(wait, left)

    def announce_opening(self, stage: str) -> None:
        self.channel.send_event(SUPERVISOR, Opening(stage=stage))

    def announce_ready(self) -> None:
        data, control = self.channel.endpoints
        self.channel.send_event(SUPERVISOR, Ready(data=data, control=control, schema=schema_digest()))

    def wake(self) -> None:
        self.channel.wake()

    def still_closing(self, doing: str, since: float) -> bool:
        if self.closing_since is not None:
            self.channel.send_event(SUPERVISOR, Closing(doing=doing))
        return super().still_closing(doing, since)

    def _beat(self) -> None:
        self._tell_open()
        stats = self._tell_counts()
        if self.name == self.front:
            vital = [sample for sample in stats.samples if is_vital(sample)]
            self.channel.send_event(SUPERVISOR, Stats(worker=self.name, samples=vital))
        self.call_at(None, self.clock.now() + HEARTBEAT_S, self._beat)

    def _tell_counts(self) -> Stats:
        stats = Stats(worker=self.name, samples=samples(self))
        self.emit(stats, self.front)
        return stats

    def _tell_open(self) -> None:
        beat = Heartbeat(open_requests=len(self.open_requests), draining=self._draining)
        self.channel.send_event(SUPERVISOR, beat)

    # -- sending -------------------------------------------------------------------------------------------------------

    def _send(self, instance: str, edge: EdgePlan, lane: str, messages: Sequence[Message], cost: int) -> None:
        try:
            self.outputs[edge.name].bytes_sent += self.channel.send(instance, edge.name, lane, messages, cost)
        except CodecError as error:
            log.error("%s: edge %s: %s", self.name, edge.name, error)
            for message in messages:
                if hasattr(message, "id"):
                    self.fail(edge.source, message.id, RequestError(500, str(error), code="not_sendable"))
            self.outputs[edge.name].credit(instance, self.peers.get(instance, 0), lane, cost * len(messages), ())

    def _send_probe(self, instance: str, edge: EdgePlan, began: float) -> None:
        self.channel.send_event(instance, Probe(edge=edge.name, began=began))

    def emit(self, event: Event, to: str | None = None) -> None:
        """Sends an event to one worker, or to all; to this one, after the step."""
        if to is None:
            self._events.append(event)
            for peer in self.peers:
                self.channel.send_event(peer, event)
        elif to == self.name:
            self._events.append(event)
        elif self.channel.send_event(to, event):
            self.moves.note_sent(event, to)
        else:
            self.num_unsent += 1

    # -- receiving -----------------------------------------------------------------------------------------------------

    def _stale(self, header: Header, lane: str) -> str:
        """Why a frame is refused, "" when it isn't.

        A lane keeps its order: once its sender has taken a new epoch, no frame of the old one can still be under way.
        """
        if header.generation <= self._dead.get(header.sender, 0):
            return "generation"
        newest = self._epochs.get(lane + header.sender, self._first_epoch)
        if header.epoch != newest:
            if header.epoch < newest or header.epoch > self.plan.epoch + 1:
                return "epoch"
            self._epochs[lane + header.sender] = header.epoch
        return ""

    def _take_events(self, header: Header, events: Sequence[Message], lane: str = "e") -> None:
        if header.sender == SUPERVISOR and header.generation > self._supervisor:
            self._meet(header)
        if reason := self._stale(header, lane):
            self.num_late[reason] = self.num_late.get(reason, 0) + len(events)
            return
        for event in events:
            if isinstance(event, Credit):
                self._take_credit(header, event)
            elif isinstance(event, Regrant):
                self._take_regrant(header, event)
            elif isinstance(event, Event):
                self.moves.note_received(event, header.sender)
                self.handle(event)

    def _meet(self, header: Header) -> None:
        """Another supervisor: what its predecessor said and comes only now is refused, and its epochs begin anew."""
        self._supervisor = header.generation
        self._dead[SUPERVISOR] = header.generation - 1
        for lane in ("e", "d"):
            self._epochs[lane + SUPERVISOR] = header.epoch

    def _tell_running(self) -> None:
        data, control = self.channel.endpoints
        number, step = self.member.progress
        running = Running(data=data, control=control, schema=schema_digest(), epoch=self.plan.epoch)
        running.number, running.step = number, step
        self.channel.send_event(SUPERVISOR, running)

    def _take_credit(self, header: Header, credit: Credit) -> None:
        outbox = self.outputs.get(credit.edge)
        if outbox is None and header.epoch > self.plan.epoch:  # of an edge that this worker will have in a moment
            self._early.setdefault(credit.edge, []).append((header, credit))
        if outbox is not None:
            outbox.credit(header.sender, header.generation, credit.lane, credit.amount, credit.ids)
            outbox.flush()

    def _take_regrant(self, header: Header, grant: Regrant) -> None:
        if outbox := self.outputs.get(grant.edge):
            outbox.regrant(header.sender, header.generation, grant.lane, grant.amount)
            outbox.flush()

    def _take_data(self, frames: Sequence[Received]) -> None:
        for header, messages in frames:
            if header.edge == "":
                self._take_events(header, messages, "d")
            elif reason := self._stale(header, "d"):
                for message in messages:
                    self.refuse(message, reason)
            elif header.edge in self.inputs:
                self._deliver(header, messages)
            else:
                self.num_late["edge"] = self.num_late.get("edge", 0) + len(messages)
        if self._moved:
            self._announce()

    def _deliver(self, header: Header, messages: list[Message]) -> None:
        edge, inbox, held = self.inputs[header.edge]
        account = self.grants.account(edge.name, header.sender, header.lane)
        account.num_received += len(messages)
        if hasattr(messages[0], "id"):
            messages = self._admit(messages, account, header.cost)
        for layer in self.layers:
            if messages and edge.name in layer.inboxes:
                messages = self._divert(layer, edge, account, messages, header.cost)
        if messages:
            inbox.receive(messages, account, header.cost, held)

    def _divert(
        self, layer: Layer, edge: EdgePlan, account: Account, messages: list[Message], cost: int
    ) -> list[Message]:
        """Gives what belongs to old requests to the stages that know them; returns the rest.

        A message in two parts is settled once, by the part that is new.
        """
        parts = [split(message, layer.ids) for message in messages]
        for mine, rest in parts:
            if mine is not None:
                layer.inboxes[edge.name].receive([mine], account, cost if rest is None else 0)
        return [rest for _, rest in parts if rest is not None]

    def _admit(self, messages: list[Message], account: Account, cost: int) -> list[Message]:
        """Refuses messages of closed requests, returns the others, and notes that they are here now."""
        alive: list[Message] = []
        for message in messages:
            request: str = message.id  # type: ignore[attr-defined]
            if request in self.closed:
                self.refuse(message, "closed")
                account.used += cost
                self.settle((Debt(account, cost, (request,)),))
            else:
                alive.append(message)
                self.open_requests[request] = getattr(message, "hops", 0) + 1
                self.learn_arm(message)
                self._moved.append(request)
        return alive

    def _announce(self) -> None:
        moved, self._moved = self._moved, []
        self._tell_moved(moved, self.name, self.generation)

    # -- changes of the graph ------------------------------------------------------------------------------------------

    def load_from(self, plan: Plan) -> None:
        """Local files are found where this plan's file lies."""
        if isinstance(self._load, LoadStage):
            self._load = LoadStage(Path(plan.file).parent, plan.allow_local)

    def outbox_of(self, edge: EdgePlan) -> Outbox:
        if edge.name not in self.outputs:
            self.outputs[edge.name] = Outbox(edge, self._send, self.clock.now, probe=self._send_probe)
        return self.outputs[edge.name]

    def open_input(self, edge: EdgePlan) -> None:
        """Grants credit on a new edge to the workers that are connected already; others get it when they come."""
        worker = self.plan.stages[edge.source].worker
        for peer in self.peers:
            if self._worker_of(peer) == worker:
                for credit in self.grants.opening(edge.name, peer, edge.lanes):
                    self.channel.send_event(peer, credit)

    def open_output(self, outbox: Outbox) -> None:
        """Connects a new edge to the workers that are there, with the credit that came before this one switched."""
        worker = self.plan.stages[outbox.edge.target].worker
        for peer, generation in self.peers.items():
            if self._worker_of(peer) == worker:
                outbox.connect(peer, generation)
        for header, credit in self._early.pop(outbox.edge.name, ()):
            if header.epoch == self.plan.epoch:  # and not of a change that was taken back
                self._take_credit(header, credit)

    def replace_runs(self, now: Mapping[str, StageRun], layer: Layer, plan: Plan) -> None:
        super().replace_runs(now, layer, plan)
        edges = {edge.name: edge for edge in plan.edges}
        for name in [name for name in (*self.inputs, *self.outputs) if name not in edges]:  # of an arm B that goes
            self.inputs.pop(name, None)
            self.outputs.pop(name, None)
        for edge in plan.edges:
            if edge.target in now and edge.source not in now and edge.name not in self.inputs:
                self._take_in(edge, now[edge.target], plan)
        for name, (edge, inbox, _) in list(self.inputs.items()):
            target = now[edges[name].target]
            after = target.inboxes[edges[name].port]
            if after is not inbox:
                layer.inboxes[name] = inbox
                self.inputs[name] = (edge, after, edge.port if edge.port in target.held else "")

    def on_trial(self, run: StageRun, error: Exception) -> bool:
        if self.member.on_probation:
            self.channel.send_event(SUPERVISOR, Trouble(stage=run.name, error=str(error)))
        return self.member.on_probation

    def producers_of(self, edge: EdgePlan) -> list[str]:
        """Live peers that send on this edge."""
        worker = self.plan.stages[edge.source].worker
        return [peer for peer in self.peers if self._worker_of(peer) == worker]

    def instances(self, kind: str, arm: str = "") -> list[str]:
        other = "a" if arm == "b" else "b"
        workers = {stage.worker for stage in self.plan.stages.values() if stage.kind == kind and stage.arm != other}
        return [x for x in self.peers if self._worker_of(x) in workers and x not in self.member.leaving]

    def take_over(self, request: str, *, shared: bool) -> bool:
        if not super().take_over(request, shared=shared):
            return False
        self._tell_moved([request], self.name, self.generation, shared=shared)
        return True

    def hand_on(self, request: str, to: str) -> None:
        if to:
            self._tell_moved([request], to, self.peers.get(to, 0), further=1)
        super().hand_on(request, to)

    def _tell_moved(
        self, requests: list[str], to: str, generation: int, *, shared: bool = False, further: int = 0
    ) -> None:
        hops = [self.open_requests.get(request, 0) + further for request in requests]
        self.emit(Moved(ids=requests, worker=to, generation=generation, shared=shared, hops=hops), self.front)

    # -- credit --------------------------------------------------------------------------------------------------------

    def settle(self, debts: Sequence[Debt]) -> None:
        now = self.clock.now()
        for debt in debts:
            self.grants.settle(debt, now)

    def _return_credit(self) -> None:
        for producer, credit in self.grants.collect(self.clock.now()):
            self.channel.send_event(producer, credit)

    def give_back(self, run: StageRun, port: str, request: str) -> None:
        super().give_back(run, port, request)
        self.grants.hurry()  # a held port's credit is what a whole request waits for

    def offer(self, run: StageRun, port: str, amount: int) -> None:
        """Grants `amount` more on the edges that end in this port, in equal parts to their producers."""
        for edge, _, _ in self.inputs.values():
            if (edge.target, edge.port) == (run.name, port):
                producers = self.plan.workers[self.plan.stages[edge.source].worker].replicas
                self._raise(edge, max(1, amount // producers))

    def _raise(self, edge: EdgePlan, amount: int) -> None:
        self.grants.share(edge.name, self.grants.share_of(edge.name) + amount)
        for peer in self.peers:
            if self._worker_of(peer) == self.plan.stages[edge.source].worker:
                for lane in edge.lanes:
                    self.channel.send_event(peer, Credit(edge=edge.name, lane=lane, amount=amount))

    # -- peers ---------------------------------------------------------------------------------------------------------

    def _is_known(self, event: Event) -> bool:
        """True for what a supervisor that took over says once more."""
        if isinstance(event, WorkerUp):
            return self.peers.get(event.worker) == event.generation
        return isinstance(event, WorkerDown) and event.generation <= self._dead.get(event.worker, 0)

    def handle(self, event: Event) -> None:
        if self._is_known(event):
            return
        if isinstance(event, WorkerUp):
            self._connect(event)
        elif isinstance(event, WorkerDown):
            self._disconnect(event)
        elif isinstance(event, Stop):
            self._stopping = True
        elif isinstance(event, Change):
            self.member.handle(event)
        elif isinstance(event, Census):
            self._tell_running()
        elif isinstance(event, TapAsk):
            self.taps.ask(event)
        elif isinstance(event, Probe):
            self._take_probe(event)
        super().handle(event)
        if isinstance(event, Drain):
            self.call_at(None, self.clock.now() + DRAIN_CHECK_S, self._check_drained)
        if isinstance(event, LeaseQuery):
            self.channel.send_event(SUPERVISOR, LeaseReport(owner=event.owner, final=True))

    def _take_probe(self, probe: Probe) -> None:
        if probe.edge in self.inputs:
            edge, _, _ = self.inputs[probe.edge]
            if edge.target in self.by_name:
                self.by_name[edge.target].probe(edge.port, probe.began)

    def _connect(self, up: WorkerUp) -> None:
        if up.worker == self.name or up.generation <= self._dead.get(up.worker, 0):
            return
        self.channel.connect(up.worker, up.generation, Endpoints(up.data, up.control))
        self.peers[up.worker] = up.generation
        log.debug("%s is connected to %s, generation %d", self.name, up.worker, up.generation)
        worker = self._worker_of(up.worker)
        for edge, _, _ in self.inputs.values():
            if self.plan.stages[edge.source].worker == worker:
                for credit in self.grants.opening(edge.name, up.worker, edge.lanes):
                    self.channel.send_event(up.worker, credit)
        for outbox in self.outputs.values():
            if self.plan.stages[outbox.edge.target].worker == worker:
                outbox.connect(up.worker, up.generation)
                if up.worker in self.member.leaving:
                    outbox.leave(up.worker)
                outbox.flush()

    def _disconnect(self, down: WorkerDown) -> None:
        self._dead[down.worker] = max(down.generation, self._dead.get(down.worker, 0))
        log.debug("%s knows that %s, generation %d, is gone", self.name, down.worker, down.generation)
        if self.peers.get(down.worker, 0) > down.generation:
            return
        self.peers.pop(down.worker, None)
        self.channel.disconnect(down.worker)
        self.grants.forget(down.worker)
        self.moves.forget(down.worker)
        for outbox in self.outputs.values():
            for request in outbox.drop(down.worker, down.generation):
                if request not in self.closed:
                    message = f"Worker {down.worker} died while it held the request. Send it again."
                    error = RequestError(503, message, code="worker_died", retry_after_s=1.0)
                    self.fail(outbox.edge.target, request, error)
            outbox.flush()
        if down.worker == self.front and self.open_requests:
            # Their clients are gone with it. To all: one may be on its way to a worker that doesn't know it yet.
            gone = Cancel(ids=list(self.open_requests))
            self.handle(gone)
            for peer in self.peers:
                self.channel.send_event(peer, gone)

    def _check_drained(self) -> None:
        """Tells the supervisor at once when the last request has ended, instead of with the next heartbeat."""
        self._draining = True  # only now: the gateway has had a turn to take Drain
        if self.open_requests:
            self.call_at(None, self.clock.now() + DRAIN_CHECK_S, self._check_drained)
        else:
            self._tell_open()

    def _worker_of(self, instance: str) -> str:
        return instance.rpartition(".")[0]
