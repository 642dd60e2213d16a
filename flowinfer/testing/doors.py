"""Where the cases of a test go in: the gateway of a whole pipeline, or the stage that stands around a cut."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

from flowinfer.errors import RequestError
from flowinfer.flow.replay import by_request
from flowinfer.graph.plan import API, Plan
from flowinfer.message import Message, Piece
from flowinfer.observe.summary import summarize
from flowinfer.observe.where import compile_where
from flowinfer.serve.gateway import GatewayConfig
from flowinfer.serve.mailbox import joined
from flowinfer.serve.openai.job import Job, Limits
from flowinfer.testing.answers import copied
from flowinfer.testing.file import Case
from flowinfer.testing.messages import made_message
from flowinfer.testing.mocks import Outside
from flowinfer.testing.plain import error_answer, job_of
from flowinfer.testing.prepared import Given
from flowinfer.testing.world import SimWorker

Ended = Callable[[int | str, dict[str, Any]], None]


class Door:
    """Where cases go in: the gateway of a whole pipeline, as HTTP would use it."""

    def __init__(self, gateway: Any, plan: Plan) -> None:
        config = GatewayConfig.of(plan)
        self._gateway, self._model = gateway, config.models[0]
        self._limits = Limits.of(config)

    def ask(self, case: Case, first: Callable[[], None], end: Ended) -> None:
        """Sends a request; `end` gets status and body."""
        try:
            job = job_of(case, body_of(case, self._model), self._limits, case.name)
        except RequestError as error:
            end(*error_answer(error))
            return
        _Answer(job, first, end).ask(self._gateway)


def body_of(case: Case, model: str) -> bytes:
    """Of a request; with a seed of its own name, so that each run draws the same."""
    return json.dumps({"seed": zlib.crc32(case.name.encode()) >> 1, **case.body(model)}).encode()


class _Answer:
    """Gathers the pieces of one answer."""

    def __init__(self, job: Job, first: Callable[[], None], end: Ended) -> None:
        self.job, self._first, self._end = job, first, end
        self._pieces: dict[str, list[Piece]] = {call.id: [] for call in job.calls}
        self._is_over = False

    def ask(self, gateway: Any) -> None:
        gateway.submit_group(self.job.calls, self._take)

    def _take(self, got: Piece | RequestError) -> None:
        if isinstance(got, RequestError):
            self._over(*error_answer(got))
            return
        self._first()
        self._pieces[got.id].append(got)
        if all(pieces and pieces[-1].finish is not None for pieces in self._pieces.values()):
            whole = self.job.writer.whole([joined(self._pieces[call.id]) for call in self.job.calls])
            self._over(200, json.loads(whole))

    def _over(self, status: int, body: dict[str, Any]) -> None:
        if status == 200 or not self._is_over:  # a group of calls fails once
            self._is_over = True
            self._end(status, body)


class CutDoor:
    """Where cases go into a cut: messages, to the stage that stands around it."""

    def __init__(self, outside: Outside, plan: Plan, given: Given) -> None:
        self._outside, self._plan, self._given = outside, plan, given
        config = GatewayConfig.of(plan)
        self._model = config.models[0]
        self._limits = Limits.of(config)

    def ask(self, case: Case, first: Callable[[], None], end: Ended) -> None:
        """Puts a message in; `end` gets what came out, told as an answer of the API."""
        where = compile_where(case.expect.where if case.expect and case.expect.where else "")
        out: list[Message] = []

        def take(request: str, got: Message | RequestError | None) -> None:
            if isinstance(got, RequestError):
                end(*error_answer(got))
            elif got is not None:
                first()
                out.append(got)
            else:
                wrong = [str(summarize(message)) for message in out if not where(message)]
                end(200, {"choices": [{"text": by_request(out).get(request, "")}], "wrong": wrong})

        context = self._outside.ctx
        for after, message in self._given.get(case.name) or [(0.0, self._message(case))]:
            self._outside.expect(message, take)
            at = context.clock.now() + after
            context.call_at(at, lambda message=message: self._outside.give(copied(message)))  # type: ignore[misc]

    def _message(self, case: Case) -> Message:
        (edge, *_) = [edge for edge in self._plan.edges if edge.source == API]
        if case.message is not None:
            return made_message(edge.message, case.name, case.message)
        return job_of(case, body_of(case, self._model), self._limits, case.name).calls[0]


def make_door(worker: SimWorker, plan: Plan, given: Given) -> Door | CutDoor:
    """The way in of a running world."""
    stage = worker.by_name[API].stage
    return CutDoor(stage, plan, given) if isinstance(stage, Outside) else Door(stage, plan)
