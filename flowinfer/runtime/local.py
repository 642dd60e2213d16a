"""A whole service in this process, without sockets or HTTP: for `flowinfer test`, `flowinfer batch` and unit tests."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ConfigDict

from flowinfer.engine.layout import KVLayout
from flowinfer.errors import FlowInferError, RequestError
from flowinfer.experiment.policy import place, session_of
from flowinfer.graph.plan import API, Plan, StagePlan
from flowinfer.message import Call, Cancel, Ended, Event, Failure, Message, Piece, Serving, Text
from flowinfer.runtime.arenas import DEFAULT_KV_BYTES, private_arena
from flowinfer.runtime.clock import SystemClock
from flowinfer.runtime.device import gpu_arena, resolve_device
from flowinfer.runtime.group import Group, Host
from flowinfer.runtime.loading import LoadStage
from flowinfer.runtime.rewire.graft import Graft
from flowinfer.runtime.stage_run import StageRun
from flowinfer.stage import Arena, Clock, Stage, StageConfig

Sink = Callable[[Piece | RequestError], None]
Answer = list[Piece] | RequestError


class LocalApi(Stage):
    """Stands in for the HTTP gateway: calls come from this process, answers go to their sinks."""

    class Config(StageConfig):
        """Takes the gateway's settings, of which only an experiment that splits its sessions means anything here."""

        model_config = ConfigDict(extra="ignore", frozen=True)
        experiment: dict[str, Any] | None = None

    kind = API
    listens = (Failure,)

    def open(self) -> None:
        self._calls: deque[tuple[Call, Sink]] = deque()
        self._sinks: dict[str, Sink] = {}

    def add(self, call: Call, sink: Sink) -> None:
        """Queues a call; for any thread."""
        self._calls.append((call, sink))

    @property
    def busy(self) -> bool:
        return bool(self._calls) and not self.ctx.full("call")

    @property
    def idle(self) -> bool:
        """True when nothing waits and nothing is open."""
        return not self._calls and not self._sinks

    def step(self, texts: list[Text]) -> Iterable[Call]:
        for text in texts:
            for piece in text.pieces:
                self._answer(piece)
        while self._calls and not self.ctx.full("call"):
            call, sink = self._calls.popleft()
            self._sinks[call.id] = sink
            if self.config.experiment is not None:
                call.arm = self._arm_of(call, self.config.experiment)
            yield call

    def _arm_of(self, call: Call, experiment: dict[str, Any]) -> str:
        if experiment["mode"] != "split":
            return ""  # nobody asks for copies here
        return "b" if place(session_of(call), experiment["name"]) < experiment["share"] else ""

    def _answer(self, piece: Piece) -> None:
        sink = self._sinks.get(piece.id)
        if sink is None:
            return
        if piece.finish is not None:
            del self._sinks[piece.id]
            stopped_by_text = isinstance(piece.finish.stop, str)
            self.ctx.send(Cancel(ids=[piece.id]) if stopped_by_text else Ended(ids=[piece.id]))
        sink(piece)

    def observe(self, event: Event) -> None:
        if isinstance(event, Failure) and event.id in self._sinks:
            error = RequestError(event.status, event.message, code=event.code, param=event.param)
            self._sinks.pop(event.id)(error)

    def cancel(self, requests: Iterable[str]) -> None:
        for request in requests:
            sink = self._sinks.pop(request, None)
            if sink is not None:
                sink(RequestError(499, "The request was cancelled.", code="cancelled"))


class LocalService:
    """The graph of a plan, fused into one worker of this process; placement is ignored.

    `stages` replaces classes by stage name. Step it by `turn` or `generate`, or let `start` do so in a thread. With
    another api than LocalApi, `submit`, `cancel` and `generate` aren't there. inline: background work runs at once, so
    that a run can be repeated exactly.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        stages: Mapping[str, type[Stage]] | None = None,
        clock: Clock | None = None,
        inline: bool = False,
    ) -> None:
        own = dict(stages or {})
        load = LoadStage(Path(plan.file).parent, plan.allow_local)
        self._arenas: dict[str, Arena] = {}
        sizes = [worker.kv_bytes or worker.tier_bytes for worker in plan.workers.values()]
        self._kv_bytes = max(sizes, default=0) or DEFAULT_KV_BYTES
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._error: Exception | None = None

        def find(stage: StagePlan) -> type[Stage]:
            return own[stage.name] if stage.name in own else LocalApi if stage.name == API else load(stage)

        asked = {worker.device for worker in plan.workers.values()} - {"cpu"}
        self._device = resolve_device(asked.pop() if len(asked) == 1 else "cpu")
        host = Host(arena=self._arena, device=self._device, threads=_threads(plan))
        self.group = _LocalGroup(plan, host, find, clock or SystemClock(), self._woken, inline)

    def open(self) -> None:
        """Opens all stages. Raises StageError."""
        self.group.open()
        self.group.emit(Serving())

    def close(self) -> None:
        """Stops the thread, if there is one, and closes all stages."""
        self._stopping = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join()
        self.group.close()

    def __enter__(self) -> LocalService:
        self.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def stage(self, name: str) -> Stage:
        """The stage object of this name."""
        return self.group.by_name[name].stage

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, call: Call, sink: Sink) -> None:
        """Queues a call; sink gets its pieces, or an error, in the loop's thread. For any thread."""
        if call.sampling.seed is None:
            call.sampling = msgspec.structs.replace(call.sampling, seed=secrets.randbits(31))
        self._api.add(call, sink)
        self._woken.set()

    def cancel(self, ids: Sequence[str]) -> None:
        """Stops requests; for any thread."""
        self.group.emit(Cancel(ids=list(ids)))
        self._woken.set()

    def generate(self, calls: Iterable[Call]) -> dict[str, Answer]:
        """Answers calls, stepping in this thread; all pieces of each, or its error, by id in the order of `calls`."""
        answers: dict[str, Answer] = {}
        for call in calls:
            answers[call.id] = []
            self.submit(call, lambda got, id=call.id: _collect(answers, id, got))  # type: ignore[misc]
        while not self._api.idle:
            self.turn()
        return answers

    @property
    def _api(self) -> LocalApi:
        api = self.group.by_name[API].stage if API in self.group.by_name else None
        if not isinstance(api, LocalApi):
            raise FlowInferError("this local service has no LocalApi.", help="Leave `api` out of `stages`.")
        return api

    # -- changes -------------------------------------------------------------------------------------------------------

    def change(self, plan: Plan) -> None:
        """Runs another plan from now on, whose differences fit inside of this worker (graph.diff). For an idle service.

        Raises StageError with nothing changed.
        """
        if self._thread is None:
            self._change(plan)
            return
        done: Future[None] = Future()

        def act() -> None:
            try:
                self._change(plan)
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        self.group.submit(None, lambda: None, lambda _: act())
        done.result()

    def _change(self, plan: Plan) -> None:
        """Between two turns, in the loop's thread."""
        own = self.group.plan.stages[API]
        plan = msgspec.structs.replace(plan, stages=plan.stages | {API: own})  # which has no settings here
        graft = Graft(self.group, plan, [stage.name for stage in _upstream_first(plan)])
        graft.build()
        graft.open()
        try:
            graft.switch()
        except Exception:
            graft.discard()
            raise
        self.group.drain_layers()

    # -- the loop ------------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """One turn of the loop; waits before it when there's nothing to do but something is under way."""
        wait = self.group.wait_s()
        if wait != 0:
            self._woken.wait(min(wait, 1.0) if wait is not None else 1.0)
        self._woken.clear()
        self.group.turn()

    def run_until_idle(self, max_turns: int = 1_000_000) -> int:
        """Turns without waiting until nothing is to be done now (timers ahead don't count); returns the turns."""
        for turns in range(max_turns):
            self.group.turn()
            if self.group.wait_s() != 0:
                return turns + 1
        raise FlowInferError(f"the service was still busy after {max_turns} turns.")

    def start(self) -> None:
        """Runs the loop in a thread of its own until `close`; `error` tells why it ended before."""
        self._thread = threading.Thread(target=self._loop, name=f"flowinfer-{self.group.plan.name}", daemon=True)
        self._thread.start()

    @property
    def error(self) -> Exception | None:
        return self._error

    def _loop(self) -> None:
        try:
            while not self._stopping:
                self.turn()
        except Exception as error:
            self._error = error

    def _arena(self, layout: KVLayout) -> Arena:
        if layout.digest not in self._arenas:
            on_gpu = self._device != "cpu"
            self._arenas[layout.digest] = gpu_arena(layout, 0, 1) if on_gpu else private_arena(layout, self._kv_bytes)
        return self._arenas[layout.digest]


def _threads(plan: Plan) -> int:
    return max((worker.threads for worker in plan.workers.values()), default=1) or 1


class _LocalGroup(Group):
    """A group of all stages, upstream first, that wakes the thread of its service."""

    def __init__(
        self,
        plan: Plan,
        host: Host,
        load: Callable[[StagePlan], type[Stage]],
        clock: Clock,
        woken: threading.Event,
        inline: bool,
    ) -> None:
        self._woken = woken
        self._inline = inline
        self.watch: Callable[[Event], None] = lambda event: None
        super().__init__(plan, _upstream_first(plan), host, load, name="front.0", generation=1, clock=clock)
        self.front = self.name

    def wake(self) -> None:
        self._woken.set()

    def handle(self, event: Event) -> None:
        self.watch(event)
        super().handle(event)

    def submit(
        self,
        run: StageRun | None,
        fn: Callable[[], Any],
        then: Callable[[Any], Iterable[Message] | None],
        request: str = "",
    ) -> None:
        if not self._inline:
            super().submit(run, fn, then, request)
            return
        hand = (request,) if request else self._hand
        try:
            outcome = fn()
        except Exception as error:
            outcome = error
        self._done.append((run, lambda: then(outcome), hand))


def _upstream_first(plan: Plan) -> list[StagePlan]:
    """Stages in topological order, back edges and those into the api aside."""
    ahead = [edge for edge in plan.edges if not edge.back and edge.target != API]
    left, order = dict(plan.stages), list[StagePlan]()
    while left:
        waiting = {edge.target for edge in ahead if edge.source in left}
        free = [name for name in left if name not in waiting] or list(left)
        order += [left.pop(name) for name in free]
    return order


def _collect(answers: dict[str, Answer], request: str, got: Piece | RequestError) -> None:
    pieces = answers[request]
    if isinstance(got, RequestError):
        answers[request] = got
    elif isinstance(pieces, list):
        pieces.append(got)
