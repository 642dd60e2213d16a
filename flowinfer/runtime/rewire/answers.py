"""Answers what the command line asks of a running service. Runs in the supervisor's loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from flowinfer.errors import FlowInferError
from flowinfer.graph.diff import Diff
from flowinfer.graph.plan import Plan
from flowinfer.runtime.events import TapAsk
from flowinfer.runtime.footprint import beside, estimate, refusal, resident
from flowinfer.runtime.loading import LoadStage
from flowinfer.runtime.rewire.protocol import Reply, Request

if TYPE_CHECKING:
    from flowinfer.runtime.supervisor import Supervisor


def answer(supervisor: Supervisor, request: Request, say: Callable[[Reply], None]) -> None:
    """Does what is asked and says how it went; the last reply tells whether it was done."""
    try:
        say(_answer(supervisor, request, lambda line: say(Reply(text=line))))
    except FlowInferError as error:
        say(Reply(last=True, ok=False, text=error.message, help=error.help))


def _answer(supervisor: Supervisor, request: Request, tell: Callable[[str], None]) -> Reply:
    controller = supervisor.controller
    if request.do == "history":
        return Reply(last=True, steps=tuple(controller.journal.read()))
    if request.do == "tap" and request.tap is not None:
        supervisor.tell_all(TapAsk(**msgspec.structs.asdict(request.tap)))
        return Reply(last=True)
    if request.do == "rollback":
        if controller.busy:
            return controller.recall()
        controller.rollback(tell, manner=request.manner)
    elif request.plan is not None and request.do == "plan":
        return describe(supervisor, request.plan, controller.plan(request.plan))
    elif request.plan is not None and request.do == "apply":
        controller.apply(
            request.plan,
            request.source,
            tell,
            renew=request.renew,
            note=request.note,
            manner=request.manner,
        )
    return Reply(last=True, plan=supervisor.plan, source=controller.source)


def describe(supervisor: Supervisor, new: Plan, diff: Diff) -> Reply:
    """A difference with what it would cost: memory of what stands beside what runs, and the pause of new requests."""
    changes = diff.changes
    try:
        supervisor.check(new)
    except FlowInferError as error:
        changes = (*changes, refusal(new, error))
    cold = diff.kind == "cold"
    gap = f"about {supervisor.start_s:.0f} s (as the last start), after open requests have ended"
    return Reply(
        last=True,
        changes=changes,
        kept=diff.kept,
        memory_bytes=0 if cold else sum(_memory(supervisor, new, worker) for worker in beside(diff)),
        resident_bytes=sum(resident(child.process.pid) for child in supervisor.children.values() if child.process),
        gap=gap if cold else "none",
        source=supervisor.controller.source,
    )


def _memory(supervisor: Supervisor, new: Plan, worker: str) -> int:
    """Bytes that one more instance of a worker takes: as those that run, else as its settings let expect."""
    load = LoadStage(Path(new.file).parent, new.allow_local)
    return _resident(supervisor, worker) or estimate(new, worker, load)


def _resident(supervisor: Supervisor, worker: str) -> int:
    """Memory of one instance of a worker as it is now, in bytes; 0 where the system doesn't say."""
    pids = (child.process.pid for child in supervisor.children.values() if child.worker == worker and child.process)
    return next(map(resident, pids), 0)
