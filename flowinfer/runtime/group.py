"""The stages of one worker in one loop, without sockets: queues, timers, background work, cancellation, containment."""

from __future__ import annotations

import heapq
import itertools
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from flowinfer.engine.layout import KVLayout
from flowinfer.errors import RequestError, StageError
from flowinfer.graph.diff import is_live
from flowinfer.graph.plan import API, FRONT, EdgePlan, Plan, StagePlan
from flowinfer.message import (
    Cancel,
    Ended,
    Event,
    Failure,
    HandOff,
    KVRelease,
    Message,
    Replay,
    TraceAsk,
    TraceTold,
)
from flowinfer.observe.logs import now
from flowinfer.runtime.closed import ClosedRequests
from flowinfer.runtime.context import StageContext
from flowinfer.runtime.inbox import Debt
from flowinfer.runtime.loading import Loader, make_config, stage_error
from flowinfer.runtime.outbox import Outbox
from flowinfer.runtime.rewire.graft import Layer, forked
from flowinfer.runtime.stage_run import FusedEdge, Put, StageRun, request_ids
from flowinfer.runtime.stats import resident_bytes
from flowinfer.runtime.trace import Trace
from flowinfer.stage import Arena, Clock

log = logging.getLogger("flowinfer.worker")

MAX_FAILURES = 3  # steps in a row that may break before the worker gives up and is started again
CLOSING_S = 3.0  # for a stage that is replaced, while the loop waits for it
GRACE_S = 1.0  # after a request's End, stages that still hold something of it are told to cancel it
POOL_THREADS = 4  # `submit`: tokenizing a book, reading a file; more would only take the cores from the model

Work = Callable[[], Iterable[Message] | None]
Hand = Sequence[Sequence[Message]] | Sequence[str]  # messages of a step, by input, or ids of requests


@dataclass
class Host:
    """What the process gives its stages."""

    arena: Callable[[KVLayout], Arena]
    device: str = "cpu"
    threads: int = 1
    listener: socket.socket | None = None


class Group:
    """Stages in topological order and everything between them. `turn` runs each that has work once."""

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[StagePlan],
        host: Host,
        load: Loader,
        *,
        name: str,
        generation: int,
        clock: Clock,
    ) -> None:
        self.plan, self.host, self.name, self.generation, self.clock = plan, host, name, generation, clock
        self.front = f"{plan.stages[API].worker if API in plan.stages else FRONT}.0"
        self.objects: dict[object, Any] = {}
        self.closed = ClosedRequests()
        self.open_requests: dict[str, int] = {}  # with the hops that each took to come here
        self._coming_hops = 0  # of the request that the event at hand brings
        self.arms: dict[str, str] = {}  # of those requests, which go by another arm of an experiment than A
        self.num_late: dict[str, int] = {}
        self.num_reclaimed = 0
        self.closing_since: float | None = None  # by the clock, once all stages are being closed
        self.trace: Trace | None = None
        self._timers: list[tuple[float, int, StageRun | None, Work, Hand]] = []
        self._order = itertools.count()
        self._pool: ThreadPoolExecutor | None = None
        self._done: deque[tuple[StageRun | None, Work, Hand]] = deque()
        self._hand: Hand = ()  # whose work is being done now, as far as is known
        self._events: deque[Event] = deque()
        self._unsent: list[Outbox] = []  # outboxes to flush
        self._listeners: dict[type[Event], list[StageRun]] = {}
        self._load = load
        self.layers: list[Layer] = []  # what changes of the graph left behind, oldest first
        self.runs = [self.make(stage) for stage in stages]
        self.by_name = {run.name: run for run in self.runs}
        for edge in plan.edges:
            self.wire(edge)

    def make(self, plan: StagePlan) -> StageRun:
        """A stage that isn't opened or wired yet. Raises StageError."""
        try:
            cls = self._load(plan)
            config = make_config(cls, plan)
            context = StageContext(self, plan.name)
            context.run = StageRun(plan, cls(config, context), config.contract().held)
            context.run.context = context
        except Exception as error:
            raise stage_error(plan, error) from error
        return context.run

    def wire(self, edge: EdgePlan) -> None:
        """Connects an edge whose ends are both here; others are a subclass's matter."""
        source, target = self.by_name.get(edge.source), self.by_name.get(edge.target)
        if source is not None and target is not None:
            source.add_output(FusedEdge(edge, target.inboxes[edge.port]))

    # -- life ----------------------------------------------------------------------------------------------------------

    def open(self, progress: Callable[[str], None] = lambda stage: None) -> None:
        """Opens the stages in order. Raises StageError with the cause; what was opened is closed again."""
        for index, run in enumerate(self.runs):
            progress(run.name)
            try:
                self._open(run)
            except Exception as error:
                self.close_runs(self.runs[:index])
                raise stage_error(run.plan, error) from error

    def _open(self, run: StageRun) -> None:
        now.stage = run.name
        began, before = time.perf_counter(), resident_bytes()
        try:
            run.stage.open()
        finally:
            now.stage = ""
        run.memory = max(0, resident_bytes() - before)
        log.info("stage %s opened in %.2f s", run.name, time.perf_counter() - began, extra={"stage": run.name})

    def close(self) -> None:
        """Closes the stages, last first, and the thread pool."""
        self.closing_since = self.clock.now()
        self.close_runs(self.runs)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def still_closing(self, doing: str, since: float) -> bool:
        """Whether a stage that is being closed may go on with `doing`, which it began at `since`."""
        if self.closing_since is None:
            return self.clock.now() - since < CLOSING_S
        return self.clock.now() - self.closing_since < self.plan.serve.stop_timeout_s

    def close_runs(self, runs: Sequence[StageRun]) -> None:
        """Closes these stages, last first."""
        for run in reversed(runs):
            try:
                run.stage.close()
            except Exception:
                log.exception("%s: stage %s didn't close cleanly", self.name, run.name)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Events, background results and timers that are due, then each stage that has work, once."""
        while self._events:
            self.handle(self._events.popleft())
        while self._done:
            self._work(*self._done.popleft())
        while self._timers and self._timers[0][0] <= self.clock.now():
            _, _, timed, work, hand = heapq.heappop(self._timers)
            self._work(timed, work, hand)
        for run in self.runs:
            if run.runnable:
                if self._unsent:
                    self.flush()  # the next step may take long
                self._step(run)
        self.end_turn()

    def end_turn(self) -> None:
        """Sends what the last stage gave, as the last act before the loop waits.

        ZeroMQ's own thread often runs on the core of this one: what is done after a send holds the message up.
        """
        if self._unsent:
            self.flush()

    def flush(self) -> None:
        """Sends what outboxes have credit for."""
        unsent, self._unsent = self._unsent, []
        for outbox in unsent:
            outbox.flush()

    def wait_s(self) -> float | None:
        """How long nothing will happen by itself: 0 when there is work, None without any limit."""
        if self._events or self._done:
            return 0.0
        for run in self.runs:
            if not run.waits:
                return 0.0
        return max(0.0, self._timers[0][0] - self.clock.now()) if self._timers else None

    def _step(self, run: StageRun) -> None:
        inputs, debts = run.take()
        started = time.perf_counter()
        self._hand = inputs
        now.stage = run.name
        try:
            messages = run.stage.step(*inputs)  # type: ignore[attr-defined]
            if messages is not None:
                self._route(run, messages)
            run.failures = 0
        except Exception as error:
            self._contain(run, inputs, error)
        self._hand = ()
        now.stage = ""
        ended = time.perf_counter()
        run.busy_s += ended - started
        if self.trace is not None:
            self.trace.add(run.name, inputs, started, ended)
        run.num_steps += 1
        if debts:
            self.settle(debts)
        self._unsent += run.outboxes

    def _route(self, run: StageRun, messages: Iterable[Message]) -> None:
        routes = run.routes
        for message in messages:
            kind = type(message)
            for put in routes[kind] if kind in routes else self._resolve(run, kind):
                put(message)

    def _resolve(self, run: StageRun, kind: type[Message]) -> tuple[Put, ...]:
        puts: tuple[Put, ...]
        if issubclass(kind, Event):
            puts = (self.emit,)  # type: ignore[assignment]
        else:
            puts = self._puts(run.edges_for(kind))
            if not puts and not any(run.edges_for(kind, outputs) for _, outputs in run.layers):
                raise StageError(run.name, f"gave a {kind.__name__}, which no edge takes.")
            if run.layers:
                before = [(layer.ids, _all(self._puts(run.edges_for(kind, outputs)))) for layer, outputs in run.layers]
                puts = (forked(before, _all(puts)),)
            if "id" in kind.__struct_fields__:
                counts_hops = "hops" in kind.__struct_fields__
                puts = (self._guard(puts, opens=run.name == API, counts_hops=counts_hops),)
        run.routes[kind] = puts
        return puts

    def _puts(self, edges: Iterable[FusedEdge | Outbox]) -> tuple[Put, ...]:
        """The ways of a message into these edges; where arms of an experiment part, one that parts it as well."""
        ways = [(edge.edge.arm, edge.put) for edge in edges]
        if len({arm for arm, _ in ways}) < 2:
            return tuple(put for _, put in ways)
        theirs = tuple(put for arm, put in ways if arm != "a")
        return (forked([(self.arms, _all(theirs))], _all(put for arm, put in ways if arm != "b")),)

    def _guard(self, puts: tuple[Put, ...], *, opens: bool, counts_hops: bool) -> Put:
        def guarded(message: Any) -> None:
            if message.id in self.closed:
                self.refuse(message, "closed")
                return
            if opens:
                self.open_requests[message.id] = 0
                self.learn_arm(message)
            if counts_hops:
                message.hops = self.open_requests.get(message.id, 0)
            if self.arms and hasattr(message, "arm"):  # which a stage that makes another message may have lost
                message.arm = self.arms.get(message.id, "")
            for put in puts:
                put(message)

        return guarded

    def learn_arm(self, message: Any) -> None:
        """Notes the arm of a request that comes in."""
        if arm := getattr(message, "arm", ""):
            self.arms[message.id] = arm

    def _contain(self, run: StageRun, inputs: list[list[Message]], error: Exception) -> None:
        run.failures += 1
        log.error("%s: stage %s broke", self.name, run.name, exc_info=error)
        # A decode step speaks of slots, not of requests: then all that this worker holds are in the batch.
        ids = request_ids(message for messages in inputs for message in messages) or list(self.open_requests)
        self._fail_all(run, ids, error)
        if not self.on_trial(run, error) and run.failures >= MAX_FAILURES:
            raise stage_error(run.plan, error) from error

    def _fail_all(self, run: StageRun, requests: Iterable[str], error: Exception) -> None:
        for request in dict.fromkeys(requests):
            run.num_failed += 1
            self.fail(run.name, request, RequestError(500, f"Stage {run.name!r} failed: {error}", code="stage_failed"))

    def on_trial(self, run: StageRun, error: Exception) -> bool:
        """True when somebody will take this stage back, so that the worker needn't give up."""
        return False

    def _work(self, run: StageRun | None, work: Work, hand: Hand = ()) -> None:
        if run is not None and run.closed:
            return
        self._hand = hand
        now.stage = run.name if run is not None else ""
        try:
            messages = work()
            if messages is not None and run is not None:
                self._route(run, messages)
        except Exception as error:
            if run is None:
                raise
            log.exception("%s: stage %s broke in its background work", self.name, run.name)
            self._fail_all(run, [request for request in _ids_of(hand) if request not in self.closed], error)
            self.on_trial(run, error)
        self._hand = ()
        now.stage = ""
        if run is not None:
            self._unsent += run.outboxes

    # -- changes of the graph ------------------------------------------------------------------------------------------

    def outbox_of(self, edge: EdgePlan) -> Outbox:
        """The outbox of an edge to another worker, made where a change brings it; here there are none."""
        raise KeyError(edge.name)

    def replace_runs(self, now: Mapping[str, StageRun], layer: Layer, plan: Plan) -> None:
        """Runs these stages, in this order, and those of the layer until it has drained."""
        gone = [run for layer in (*self.layers, layer) for run in layer.runs]
        self.by_name = dict(now)
        self.runs = [*gone, *now.values()]
        self._listeners.clear()

    def warm_run(self, stage: StagePlan) -> StageRun | None:
        """The newest replaced stage that is what this plan says and hasn't been closed yet."""
        for layer in reversed(self.layers):
            for run in layer.runs:
                if run.name == stage.name and is_live(type(run.stage), run.plan, stage):
                    return run
        return None

    def drain_layers(self) -> list[Layer]:
        """Closes what no request needs any more; returns the layers that have drained now."""
        drained = [layer for layer in self.layers if layer.is_drained(self.open_requests)]
        for layer in drained:
            self.layers.remove(layer)
            for run in self.runs:
                run.join(layer)
            for run in layer.runs:
                run.closed = True
            self.close_runs(layer.runs)
        if drained:
            self.runs = [run for run in self.runs if not run.closed]
            self._listeners.clear()
        return drained

    # -- events --------------------------------------------------------------------------------------------------------

    def emit(self, event: Event, to: str | None = None) -> None:
        """Sends an event; here there is nobody but this group."""
        if to is None or to == self.name:
            self._events.append(event)

    def handle(self, event: Event) -> None:
        """Takes an event: ends requests, then shows it to every stage that listens."""
        if isinstance(event, Cancel):
            self.cancel(event.ids)
        elif isinstance(event, Ended):
            self.end(event.ids)
        elif isinstance(event, TraceAsk):
            self._tell_trace(event.id)
        other = self._take_carried(event)
        for run in self._listening(type(event)):
            if run.plan.arm != other or not other:
                self._work(run, lambda run=run: run.stage.observe(event))  # type: ignore[misc]

    def _take_carried(self, event: Event) -> str:
        """Of an event that brings a request here, the arm whose stages it's no concern of; of others, none."""
        carried = event.sequence if isinstance(event, HandOff) else event.prompt if isinstance(event, Replay) else None
        if carried is None:
            return ""
        self._coming_hops = carried.hops + 1
        if carried.id not in self.closed:
            self.learn_arm(carried)
        return "a" if carried.arm == "b" else "b"

    def _tell_trace(self, request: str) -> None:
        if self.trace is None:
            self.trace = Trace(time.perf_counter())
        steps = self.trace.of(request)
        self.emit(TraceTold(worker=self.name, id=request, since=self.trace.began, steps=steps), self.front)

    def _listening(self, kind: type[Event]) -> list[StageRun]:
        found = self._listeners.get(kind)
        if found is None:
            found = self._listeners[kind] = [run for run in self.runs if issubclass(kind, run.stage.listens or ())]
        return found

    def fail(self, stage: str, request: str, error: RequestError) -> None:
        """Tells the gateway that a request failed, and everybody to free what they hold of it."""
        failure = Failure(
            id=request, status=error.status, message=str(error), code=error.code, param=error.param, stage=stage
        )
        failure.retry_after_s = error.retry_after_s
        log.info("request %s failed in stage %s: %d %s", request, stage, error.status, error, extra={"stage": stage})
        self.emit(failure, self.front)
        self.emit(Cancel(ids=[request]))

    def cancel(self, requests: Collection[str]) -> None:
        """Takes the requests out of all queues and stages; what comes late for them is refused."""
        if new := self._close_requests(requests):
            self._cancel_stages(new)

    def end(self, requests: Collection[str]) -> None:
        """As cancel, but stages that are about to finish by themselves get GRACE_S for it."""
        if new := self._close_requests(requests):
            self.call_at(None, self.clock.now() + GRACE_S, lambda: self._cancel_stages(new))

    def _close_requests(self, requests: Collection[str]) -> list[str]:
        new = self.closed.add(requests, self.clock.now())
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s closes %s", self.name, ", ".join(new))
        for request in new:
            self.open_requests.pop(request, None)
            self.arms.pop(request, None)
        gone = frozenset(new)
        for run in self.runs if gone else ():
            for inbox in run.inboxes.values():
                dropped, debts = inbox.cancel(gone)
                self.settle(debts)
                self._release(dropped)
            for outbox in run.outboxes:
                self._release(outbox.cancel(gone))
        return new

    def _cancel_stages(self, requests: Collection[str]) -> None:
        for run in self.runs:
            self._work(run, lambda run=run: run.stage.cancel(requests))  # type: ignore[misc]
        self.call_at(None, self.clock.now() + GRACE_S, lambda: self._reclaim(requests))

    def _reclaim(self, requests: Collection[str]) -> None:
        """Settles what stages forgot to give back: a leak of credit would stop the service in the end."""
        gone = frozenset(requests)
        for run in self.runs:
            for inbox in run.inboxes.values():
                left = [key for key in inbox.held if key[1] in gone]
                self.num_reclaimed += len(left)
                self.settle([inbox.held.pop(key) for key in left])

    def refuse(self, message: Message, reason: str) -> None:
        """Counts a message that came too late and frees what it carries."""
        self.num_late[reason] = self.num_late.get(reason, 0) + 1
        self._release((message,))

    def _release(self, messages: Iterable[Any]) -> None:
        for message in messages:
            handle = getattr(message, "kv", None)
            if handle is not None:
                self.emit(KVRelease(id=message.id, lessee=self.name), handle.owner)

    # -- what contexts need --------------------------------------------------------------------------------------------

    def submit(
        self,
        run: StageRun | None,
        fn: Callable[[], Any],
        then: Callable[[Any], Iterable[Message] | None],
        request: str = "",
    ) -> None:
        """Runs fn in the pool and then(result or error) in the loop."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix=f"{self.name}-submit")
        hand = (request,) if request else self._hand

        def finished(future: Future[Any]) -> None:
            if not future.cancelled():
                outcome = future.exception() or future.result()
                self._done.append((run, lambda: then(outcome), hand))
                self.wake()

        self._pool.submit(_for_stage, run, fn).add_done_callback(finished)

    def call_at(self, run: StageRun | None, when: float, work: Work, request: str = "") -> None:
        heapq.heappush(self._timers, (when, next(self._order), run, work, (request,) if request else self._hand))

    def wake(self) -> None:
        """Ends the wait of the loop; a subclass with a loop of its own does."""

    def settle(self, debts: Sequence[Debt]) -> None:
        """Credit that goes back to producers in other workers; here there are none."""

    def give_back(self, run: StageRun, port: str, request: str) -> None:
        inbox = run.inboxes.get(port)
        debt = inbox.held.pop((port, request), None) if inbox else None
        if debt is not None:
            self.settle((debt,))

    def instances(self, kind: str, arm: str = "") -> list[str]:
        """Other live workers that run a stage of this kind for this arm and take new requests; here there are none."""
        return []

    def take_over(self, request: str, *, shared: bool) -> bool:
        """This group holds the request from now on, which came by an event; False if it's over."""
        if request in self.closed:
            self.num_late["closed"] = self.num_late.get("closed", 0) + 1
            return False
        self.open_requests[request] = self._coming_hops
        return True

    def hand_on(self, request: str, to: str) -> None:
        """The request goes on in another worker."""
        self.open_requests.pop(request, None)

    def offer(self, run: StageRun, port: str, amount: int) -> None:
        """Raises the credit of an input port; edges inside the worker have none."""


def _ids_of(hand: Hand) -> list[str]:
    """The requests that work in hand belongs to."""
    return [id for one in hand for id in ([one] if isinstance(one, str) else request_ids(one))]


def _for_stage(run: StageRun | None, fn: Callable[[], Any]) -> Any:
    """Runs fn in a thread of the pool; what it logs is the stage's."""
    now.stage = run.name if run is not None else ""
    return fn()


def _all(ways: Iterable[Put]) -> Put:
    """One put that is all of these."""
    puts = tuple(ways)

    def put(message: Message) -> None:
        for one in puts:
            one(message)

    return put
