"""A worker's part in a change of the running service: prepares, switches, drains and reports to the supervisor."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

import msgspec

from flowinfer.errors import FlowInferError, RequestError
from flowinfer.graph.plan import EdgePlan, Plan
from flowinfer.message import Event, Leave
from flowinfer.observe import logs
from flowinfer.runtime.events import (
    SUPERVISOR,
    Abandon,
    Count,
    Counted,
    Drained,
    Hurry,
    Leavers,
    Prepare,
    Prepared,
    Regrant,
    Retire,
    Switch,
    Switched,
)
from flowinfer.runtime.rewire.graft import Graft, Layer

if TYPE_CHECKING:
    from flowinfer.runtime.worker import Worker

log = logging.getLogger("flowinfer.worker")

CHECK_S = 0.02  # between two looks at what still drains


class Member:
    """Answers the supervisor's change events for one worker. One change at a time."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.on_probation = False
        self._graft: Graft | None = None
        self._number = 0
        self._step = ""  # how far the change has come here: prepared, switched, drained
        self.leaving: set[str] = set()  # instances that get nothing new
        self._layer: Layer | None = None
        self._waits = False
        self._aborted = 0

    @property
    def progress(self) -> tuple[int, str]:
        """The change under way here and how far it has come: prepared, switched, drained; "" while it isn't ready."""
        return self._number, self._step

    def handle(self, event: Event) -> None:
        match event:
            case Prepare():
                self._prepare(event)
            case Switch():
                self._switch(event)
            case Leavers():
                self.leaving |= set(event.names)
            case Abandon(number=number) if number == self._number:
                self._abandon()
            case Hurry(number=number, mode=mode) if number == self._number:
                self._hurry(mode)
            case Count(number=number):
                self._say(self.count(number))
            case Retire(number=number) if number == self._number:
                self._retire()

    # -- prepare -------------------------------------------------------------------------------------------------------

    def _prepare(self, event: Prepare) -> None:
        self._abandon()
        self._number = event.number
        worker = self.worker
        if not event.back:
            worker.drain_layers()
        try:
            plan = msgspec.json.decode(event.plan, type=Plan)
            own = plan.workers[worker.worker].stages
            worker.load_from(plan)
            graft = Graft(worker, plan, own, event.renew, back=event.back)
            graft.build()
        except Exception as error:  # whatever is wrong with it, what runs goes on
            self._say(Prepared(number=event.number, error=_describe(error)))
            return
        if not graft.made:
            self._opened(graft, event.number, None)
        else:
            worker.submit(None, graft.open, lambda result: self._opened(graft, event.number, result))

    def _opened(self, graft: Graft, number: int, result: BaseException | None) -> None:
        if isinstance(result, BaseException):
            self._say(Prepared(number=number, error=_describe(result)))
        elif number != self._number:
            graft.discard()  # it was abandoned meanwhile
        else:
            self._graft, self._step = graft, "prepared"
            self._say(Prepared(number=number))

    def _abandon(self) -> None:
        if self._graft is not None:
            self._graft.discard()
        self._graft, self._number, self._step = None, 0, ""

    # -- switch and drain ----------------------------------------------------------------------------------------------

    def _switch(self, event: Switch) -> None:
        graft, self._graft = self._graft, None
        if graft is None or event.number != self._number:
            self._say(Switched(number=event.number, error=f"worker {self.worker.name} has nothing prepared"))
            return
        before, plan = self.worker.plan, graft.plan
        try:
            self._layer = graft.switch()
        except Exception as error:
            graft.discard()
            self._say(Switched(number=event.number, error=_describe(error)))
            return
        self.on_probation = True
        self.worker.channel.raise_epoch(plan.epoch)
        logs.set_level(plan.log_level(self.worker.worker))
        log.info("%s runs epoch %d", self.worker.name, plan.epoch)
        self._resize(before, plan)
        self._part_from(set(event.leaving))
        self._aborted = 0
        self._step = "switched"
        self._say(Switched(number=event.number))
        self._watch()

    def _part_from(self, leaving: set[str]) -> None:
        """These instances get nothing new; who was to leave and isn't among them stays after all."""
        for outbox in self.worker.outputs.values():
            for name in self.leaving - leaving:
                outbox.stay(name)
            for name in leaving:
                outbox.leave(name)
        if self.worker.name in self.leaving - leaving:
            self.worker.emit(Leave(mode="stay"), self.worker.name)
        self.leaving = leaving

    def _watch(self) -> None:
        """Reports once nothing old is left, and looks again until then. The old stages stay open until `Retire`."""
        if self.is_drained():
            self._step = "drained"
            self._say(Drained(number=self._number, aborted=self._aborted))
        elif not self._waits:
            self._waits = True
            self.worker.call_at(None, self.worker.clock.now() + CHECK_S, self._look_again)

    def _look_again(self) -> None:
        self._waits = False
        self._watch()

    def is_drained(self) -> bool:
        """True when no request needs what this worker has of the old side."""
        if not all(layer.is_drained(self.worker.open_requests) for layer in self.worker.layers):
            return False
        if self.worker.name in self.leaving:
            return not self.worker.open_requests and not any(box.waiting for box in self.worker.outputs.values())
        return not any(box.owes(name) for box in self.worker.outputs.values() for name in self.leaving)

    def _hurry(self, mode: Literal["handoff", "replay", "abort"]) -> None:
        """Moves what is left of the old requests here, or fails it."""
        worker = self.worker
        if mode != "abort":
            if worker.name in self.leaving:
                worker.emit(Leave(mode=mode), worker.name)
            return
        left = {request for layer in worker.layers for request in layer.ids if request in worker.open_requests}
        if worker.name in self.leaving:
            left |= set(worker.open_requests)
        self._aborted += len(left)
        for request in left:
            message = "The service was changed, and this request took longer than the change could wait."
            worker.fail("", request, RequestError(503, message, code="rewired", retry_after_s=1.0))

    def _retire(self) -> None:
        self.on_probation = False
        self.leaving = set()
        self._close_old()

    def _close_old(self) -> None:
        self.worker.drain_layers()
        if self.worker.layers and not self.on_probation:  # what was aborted ends within a moment
            self.worker.call_at(None, self.worker.clock.now() + CHECK_S, self._close_old)

    def count(self, number: int) -> Counted:
        """What this worker has sent and received, and what of it is still open."""
        worker = self.worker
        sent = [
            (edge, consumer.name, consumer.num_sent)
            for edge, outbox in worker.outputs.items()
            for consumer in outbox.consumers.values()
        ]
        if worker.name in self.leaving:  # what it moved must have arrived; others move more all the time
            sent += worker.moves.sent()
        layered = [request for layer in worker.layers for request in layer.ids if layer.runs]
        return Counted(
            number=number,
            sent=tuple(sent),
            received=tuple(
                found for found in (*worker.grants.counts(), *worker.moves.received()) if found[1] in worker.peers
            ),
            open=len(worker.open_requests),
            layered=len(layered),
            left=sum(request in worker.open_requests for request in layered),
        )

    # -- credit --------------------------------------------------------------------------------------------------------

    def _resize(self, before: Plan, plan: Plan) -> None:
        """Credit and queues as the new plan's edges and replicas say."""
        edges, known = {edge.name: edge for edge in plan.edges}, {edge.name for edge in before.edges}
        for name, (edge, inbox, held) in list(self.worker.inputs.items()):
            now = edges[name]
            self.worker.inputs[name] = (now, inbox, held)
            if name in known:
                self._regrant(name, edge, now, before, plan)
                self._grant_lanes(edge, now)
            else:
                self.worker.open_input(now)
        for name in self.worker.outputs.keys() - known:
            self.worker.open_output(self.worker.outputs[name])

    def _regrant(self, name: str, edge: EdgePlan, now: EdgePlan, before: Plan, plan: Plan) -> None:
        worker = self.worker
        producers_before = before.workers[before.stages[edge.source].worker].replicas
        producers = plan.workers[plan.stages[now.source].worker].replicas
        share = worker.grants.share_of(name)
        if now.unit == "blocks":  # of which the stage offered as many as it has
            wanted = max(1, share * producers_before // producers)
        elif (now.capacity, producers) != (edge.capacity, producers_before):
            wanted = max(1, now.capacity // producers)
        else:
            return
        worker.grants.share(name, wanted)
        for peer in worker.producers_of(now) if wanted != share else ():
            for lane in now.lanes if now.lanes == edge.lanes else ():
                worker.channel.send_event(peer, Regrant(edge=name, lane=lane, amount=wanted - share))

    def _grant_lanes(self, edge: EdgePlan, now: EdgePlan) -> None:
        """Lanes that are new get their producers' whole share; those that stay, nothing more."""
        share = self.worker.grants.share_of(edge.name)
        for peer in self.worker.producers_of(now) if now.lanes != edge.lanes else ():
            for lane in now.lanes:
                if lane not in edge.lanes:
                    self.worker.channel.send_event(peer, Regrant(edge=edge.name, lane=lane, amount=share))

    def _say(self, event: Event) -> None:
        self.worker.channel.send_event(SUPERVISOR, event)


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, FlowInferError) else f"{type(error).__name__}: {error}"
