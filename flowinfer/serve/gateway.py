"""The front door as a stage: takes requests in, keeps the ledger of open ones, and sees each to exactly one end.

HTTP lives in a thread of its own (serve/server.py) and reaches the stage by a queue of commands and `ctx.wake`; what
goes back is handed over once a step. Programs in the same process use `submit` and `cancel` and need no HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import Field, PositiveInt

from flowinfer.errors import RequestError
from flowinfer.graph.plan import API, Plan
from flowinfer.message import (
    Call,
    Cancel,
    Drain,
    Ended,
    Event,
    Failure,
    Message,
    Moved,
    Piece,
    Serving,
    SetArms,
    Stats,
    Text,
    TraceAsk,
    TraceTold,
    WorkerDown,
    WorkerUp,
)
from flowinfer.observe import metrics
from flowinfer.observe.fleet import Fleet
from flowinfer.serve.arms import Arms, ExperimentConfig
from flowinfer.serve.defaults import Defaults
from flowinfer.serve.ledger import Entry, Ledger, Sink
from flowinfer.serve.openai.job import draw_seed
from flowinfer.serve.policy import Admission
from flowinfer.serve.record import Record
from flowinfer.stage import Context, Stage, StageConfig, setting
from flowinfer.units import ByteSize, Duration, TokenCount, format_duration

if TYPE_CHECKING:
    from flowinfer.serve.server import HttpServer

Command = Callable[[float], Iterable[Call]]
TRACE_WAIT_S = 0.5  # for the workers' answers: a worker in a long step takes events behind it


class GatewayConfig(StageConfig):
    """What the front door lets in and answers with."""

    apis: tuple[str, ...] = ("openai",)
    models: tuple[str, ...] = ()  # names that requests may ask for; none: any
    max_requests: PositiveInt = setting(256, change="live")
    request_timeout: Duration = setting(600.0, change="live")
    keepalive: Duration = 15.0
    max_body: ByteSize = 16 * 2**20
    reader_buffer: ByteSize = 64 * 2**10
    default_max_tokens: TokenCount = setting(
        2**20, change="live"
    )  # of a chat that names none: as much as the context leaves
    sampling: dict[str, float] = setting({}, change="live")  # what requests leave open; what it lacks, the model says
    tools: bool = False  # a stage can read calls; whether the model's template takes tools, it says itself
    vllm_metrics: bool = True
    chat: dict[str, Any] = Field(default={})  # how recipe-tokenize tells chats, for /tokenize and counts
    keys: dict[str, str] = Field(default={})  # SHA-256 of each client's key
    key_requests: PositiveInt | None = None
    key_rate: PositiveInt | None = None  # requests a minute of each key
    cors: tuple[str, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    state_path: str = ""  # of responses, files and batches; none: they end with the process
    state_responses: Duration = 24 * 3600.0
    state_files: Duration = 30 * 24 * 3600.0
    experiment: ExperimentConfig | None = setting(None, change="live")

    @classmethod
    def of(cls, plan: Plan) -> GatewayConfig:
        """The settings that a plan implies: its `serve` section and the models that its stages name."""
        ours = [stage for stage in plan.stages.values() if stage.arm != "b"]  # arm B answers to the names of arm A
        models = dict.fromkeys(stage.config["model"] for stage in ours if "model" in stage.config)
        serve, own = plan.serve, plan.stages[API].config if API in plan.stages else {}
        values: dict[str, Any] = {
            "apis": serve.apis,
            "models": tuple(str(model) for model in models) or (plan.name,),
            "max_requests": serve.max_requests,
            "request_timeout": format_duration(serve.request_timeout_s),
            "sampling": own.get("sampling", {}),
            "tools": any(stage.config.get("tool_parser", "none") != "none" for stage in plan.stages.values()),
        }
        return cls.model_validate(values)


class Gateway(Stage):
    """Turns requests into Calls and Text into answers."""

    kind = "api"
    Config = GatewayConfig
    listens = (Failure, WorkerDown, WorkerUp, Moved, Stats, Serving, Drain, TraceTold, SetArms)
    config: GatewayConfig

    def __init__(self, config: GatewayConfig, ctx: Context) -> None:
        super().__init__(config, ctx)
        self.ledger = Ledger()
        self.admission = Admission(config.max_requests)
        self.defaults = Defaults(config.sampling)
        self.fleet = Fleet()
        self.after_step: Callable[[], None] = lambda: None
        self._commands: deque[Command] = deque()
        self._ended: list[str] = []
        self._cancelled: list[str] = []
        self._record = Record()
        self._traces: dict[str, list[TraceTold]] = {}
        self._armed = float("inf")
        self._server: HttpServer | None = None
        self.arms: Arms | None = None
        self._take_experiment(config)

    # ------------------------------------------------------------------------------------------- called by any thread

    def submit(self, call: Call, on_piece: Sink) -> None:
        """Asks for one request. on_piece gets its pieces, the last with `finish`, or one RequestError.

        It is called in the worker's loop, and must return quickly.
        """
        self.submit_group([call], on_piece)

    def submit_group(self, calls: Sequence[Call], on_piece: Sink) -> None:
        """As submit, for calls that stand or fall together: on the first error the others are cancelled."""
        self._command(lambda now: self._admit(calls, on_piece, now))

    def cancel_requests(self, ids: Collection[str], cause: str = "disconnect") -> None:
        """Drops requests whose client went away; nobody hears of them again. Unknown ids are normal."""
        self._command(lambda now: self._abandon(ids, cause))

    def probe(self, answer: Callable[[RequestError | None], object]) -> None:
        """Calls `answer`, in the worker's loop, with the refusal that a request would meet now, or None."""
        self._command(lambda now: self._probe(answer))

    def trace(self, id: str, answer: Callable[[list[TraceTold]], object]) -> None:
        """Calls `answer`, in the worker's loop, with what the workers' stages did for a request."""
        self._command(lambda now: self._ask_trace(id, answer, now))

    def reconfigure(self, config: GatewayConfig) -> None:
        """Admits, times out and samples by these settings from now on; open requests keep theirs."""
        self.admission.max_requests = config.max_requests
        self.defaults.set(config.sampling)
        self._take_experiment(config)

    def _take_experiment(self, config: GatewayConfig) -> None:
        """Begins, changes or ends an experiment; the first request goes to arm B once all workers know it."""
        new, old = config.experiment, self.arms
        self.admission.set_aside(new.workers if new else ())
        if (
            old is not None
            and new is not None
            and (old.config.name, old.config.digest, old.config.mode)
            == (
                new.name,
                new.digest,
                new.mode,
            )
        ):
            old.reshare(new)
            return
        if old is not None:
            self._cancelled += old.drop_copies(old.copies.ids(), "ended")
            old.end("changed" if new else "ended")
        self.arms = Arms(new, self.ctx, self.fleet) if new else None

    def drain(self) -> None:
        """Refuses new requests from now on; open ones go on."""
        self.admission.draining = True

    @property
    def num_open(self) -> int:
        return len(self.ledger)

    def _command(self, command: Command) -> None:
        self._commands.append(command)
        self.ctx.wake()

    # ------------------------------------------------------------------------------------------- in the worker's loop

    @property
    def busy(self) -> bool:
        return bool(self._commands)

    def open(self) -> None:
        if self.ctx.listener is not None:
            self.defaults.read_models(self.config.models)
            from flowinfer.serve.server import HttpServer

            self._server = HttpServer(self, self.ctx.listener)
            self._server.start()

    def close(self) -> None:
        self.drain()
        while self._commands:
            list(self._commands.popleft()(self.ctx.clock.now()))  # what waits to come in is told so
        for id in self.ledger.ids():
            self._fail(id, RequestError(503, "The service stopped.", code="service_unavailable"))
        if self.arms is not None:
            self._cancelled += self.arms.drop_copies(self.arms.copies.ids(), "stopped")
            self.arms.end("the service stopped")
        self._flush()
        if self._server is not None:
            self._server.stop()

    def cancel(self, requests: Collection[str]) -> None:
        """Ends requests that someone else cancelled; those that the gateway dropped itself are closed already."""
        for id in requests:
            self._fail(id, RequestError(500, "The request was cancelled by the service.", code="cancelled"))
        self._flush()

    def samples(self) -> dict[str, list[metrics.Sample]]:
        """The metric samples of every worker: this one's as they are now, the others' as they last said. Any thread."""
        now = metrics.snapshot()
        fresh = {name for name, _, _ in now}
        loop = [sample for sample in self.fleet.of(self.ctx.worker) if sample[0] not in fresh]
        return self.fleet.samples() | {self.ctx.worker: now + loop}

    def step(self, texts: list[Text]) -> Iterable[Call]:
        now = self.ctx.clock.now()
        for text in texts:
            for piece in text.pieces:
                self._take(piece, now)
        for _ in range(len(self._commands)):
            yield from self._commands.popleft()(now)
        self._arm()
        self._flush()

    def observe(self, event: Event) -> Iterable[Message] | None:
        match event:
            case Failure():
                self._fail(event.id, _error_of(event))
            case Moved():
                self._move(event)
            case WorkerDown():
                self._worker_down(event)
            case WorkerUp():
                self.admission.worker_up(event.worker, event.generation)
                if self.arms is not None:
                    self.arms.worker_up(event.worker.rpartition(".")[0])
            case Stats():
                self.fleet.update(event.worker, event.samples)
            case TraceTold():
                self._traces.setdefault(event.id, []).append(event)
            case Serving():
                self.admission.serving = True
                if self.arms is not None:
                    self.arms.open()
            case SetArms() if self.arms is not None:
                self._open_or_close(self.arms, event)
            case Drain():
                self.drain()
        self._flush()
        return None

    # ---------------------------------------------------------------------------------------------------------- steps

    def _admit(self, calls: Sequence[Call], sink: Sink, now: float) -> Iterable[Call]:
        refusal = self.admission.refusal(len(self.ledger), len(calls), full=self.ctx.full("call"))
        if refusal is not None:
            self._record.refused(refusal[0])
            sink(refusal[1])
            return ()
        taken = next((call.id for call in calls if call.id in self.ledger), None)
        if taken is not None:
            sink(RequestError(400, f"A request with id {taken!r} is open.", code="duplicate_id"))
            return ()
        return self._open(calls, sink, now)

    def _open(self, calls: Sequence[Call], sink: Sink, now: float) -> Iterable[Call]:
        group = tuple(call.id for call in calls)
        for call in calls:
            limit = now + self.config.request_timeout
            call.deadline = limit if call.deadline is None else min(limit, call.deadline)
            if call.sampling.seed is None:
                call.sampling = msgspec.structs.replace(call.sampling, seed=draw_seed())
            self.ledger.open(Entry(call.id, sink, now, call.deadline, group))
        self._record.received(len(calls))
        copies = self.arms.admit(calls, now, now + self.config.request_timeout) if self.arms is not None else []
        return [*calls, *copies]

    def _take(self, piece: Piece, now: float) -> None:
        entry = self.ledger.find(piece.id)
        aborted = piece.finish is not None and piece.finish.reason == "abort"
        if self.arms is not None and not aborted and self.arms.take(piece, now):
            if piece.finish is not None:
                (self._cancelled if isinstance(piece.finish.stop, str) else self._ended).append(piece.id)
            return
        if entry is None and aborted:
            self._fail(piece.id, RequestError(500, "The service gave this copy up.", code="aborted"))
        elif entry is None:
            self._record.late()
        elif piece.finish is not None and piece.finish.reason == "abort":
            self._fail(piece.id, RequestError(500, "The service gave this request up.", code="aborted"))
        elif not entry.first_at and _says_nothing(piece):
            self._fail(piece.id, RequestError(500, "The pipeline ended this request with no token.", code="no_answer"))
        else:
            self._record.piece(self.ledger, entry, piece, now)
            if piece.finish is not None:
                self.ledger.close(piece.id)
                # A stop string is found in the text, behind the model's back: what still runs has to be told.
                (self._cancelled if isinstance(piece.finish.stop, str) else self._ended).append(piece.id)
                self._record.finished(entry, piece.finish, now)
            entry.sink(piece)

    def _fail(self, id: str, error: RequestError, cause: str = "failure") -> None:
        entry = self.ledger.find(id)
        if self.arms is not None and self.arms.fail(id, error, self.ctx.clock.now()):
            self._cancelled.append(id)
        if entry is not None:
            self._record.failed(error)
            self._abandon(entry.group, cause)
            entry.sink(error)

    def _abandon(self, ids: Collection[str], cause: str) -> Iterable[Call]:
        dropped = [id for id in ids if self.ledger.close(id)]
        self._cancelled += dropped
        self._record.cancelled(cause, len(dropped))
        if self.arms is not None:
            self._cancelled += self.arms.leave(dropped)
        return ()

    def _move(self, moved: Moved) -> None:
        ledgers = (self.ledger, *([self.arms.copies] if self.arms is not None else ()))
        for ledger in ledgers:
            lost = ledger.move(moved.ids, moved.worker, moved.generation, shared=moved.shared, hops=moved.hops)
            self._lose(lost, moved.worker)
        # One that ended while it moved: a worker that began after the end was told hasn't heard of it.
        if over := [id for id in moved.ids if not any(id in ledger for ledger in ledgers)]:
            self.ctx.send(Cancel(ids=over), to=moved.worker)

    def _worker_down(self, event: WorkerDown) -> None:
        self.admission.worker_down(event.worker, event.generation)
        self.fleet.down(event.worker)
        self._lose(self.ledger.lost(event.worker, event.generation), event.worker)
        if self.arms is not None:
            worker = event.worker.rpartition(".")[0]
            if not self.admission.runs(worker):
                self.arms.worker_down(worker)
            self._lose(self.arms.copies.lost(event.worker, event.generation), event.worker)

    def _lose(self, ids: Collection[str], worker: str) -> None:
        message = f"Worker {worker!r} died while it held this request. Please send it again."
        for id in ids:
            self._fail(id, RequestError(503, message, code="worker_died", retry_after_s=1.0))

    def _open_or_close(self, arms: Arms, event: SetArms) -> None:
        if event.open:
            arms.open()
            return
        arms.close()
        self._cancelled += arms.drop_copies(arms.copies.ids(), "closing")
        if event.abort:
            message = "The experiment that this request was part of has ended. Please send it again."
            for id in arms.open_in_b():
                self._fail(id, RequestError(503, message, code="rewired", retry_after_s=1.0))

    def _probe(self, answer: Callable[[RequestError | None], object]) -> Iterable[Call]:
        refusal = self.admission.refusal(len(self.ledger), 1, full=self.ctx.full("call"))
        answer(refusal[1] if refusal else None)
        return ()

    def _ask_trace(self, id: str, answer: Callable[[list[TraceTold]], object], now: float) -> Iterable[Call]:
        self._traces[id] = []
        self.ctx.send(TraceAsk(id=id))
        self.ctx.call_at(now + TRACE_WAIT_S, lambda: self._told_trace(id, answer))
        return ()

    def _told_trace(self, id: str, answer: Callable[[list[TraceTold]], object]) -> None:
        answer(self._traces.pop(id, []))

    # -------------------------------------------------------------------------------------------- deadlines, hand-over

    def _arm(self) -> None:
        when = self.ledger.next_deadline()
        if self.arms is not None and (copy := self.arms.copies.next_deadline()) is not None:
            when = copy if when is None else min(when, copy)
        if when is not None and when < self._armed:
            self._armed = when
            self.ctx.call_at(when, self._expire)

    def _expire(self) -> None:
        self._armed = float("inf")
        for id in self.ledger.expired(self.ctx.clock.now()):
            message = f"The request took longer than {format_duration(self.config.request_timeout)}."
            self._fail(id, RequestError(504, message, code="timeout"), cause="deadline")
        for id in self.arms.copies.expired(self.ctx.clock.now()) if self.arms is not None else ():
            self._fail(id, RequestError(504, "The copy took too long.", code="timeout"))
        self._arm()
        self._flush()

    def _flush(self) -> None:
        if self._ended:
            self.ctx.send(Ended(ids=self._ended))
            self._ended = []
        if self._cancelled:
            self.ctx.send(Cancel(ids=self._cancelled))
            self._cancelled = []
        self._record.levels(len(self.ledger), self.ledger.num_started)
        self.after_step()


def _says_nothing(piece: Piece) -> bool:
    """Whether an only piece is no answer: even one that stops at once has its stop token. A 200 must not hide that."""
    if piece.finish is None or piece.finish.completion_tokens:
        return False
    return not (piece.tokens or piece.text or piece.reasoning or piece.calls)


def _error_of(event: Failure) -> RequestError:
    return RequestError(
        event.status, event.message, code=event.code, param=event.param, retry_after_s=event.retry_after_s
    )
