"""Answers what the command line asks of a running service. Runs in the supervisor's loop."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from flowinfer.errors import FlowInferError
from flowinfer.graph.diff import Diff
from flowinfer.runtime.events import TapAsk
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
        controller.rollback(tell, drain_s=request.drain_s, probation_s=request.probation_s)
    elif request.plan is not None and request.do == "plan":
        return describe(supervisor, controller.plan(request.plan))
    elif request.plan is not None and request.do == "apply":
        controller.apply(
            request.plan,
            request.source,
            tell,
            renew=request.renew,
            note=request.note,
            drain_s=request.drain_s,
            probation_s=request.probation_s,
        )
    return Reply(last=True, plan=supervisor.plan, source=controller.source)


def describe(supervisor: Supervisor, diff: Diff) -> Reply:
    """A difference with what it would cost: memory of what stands beside what runs, and the pause of new requests."""
    beside = list(diff.workers())
    for change in diff.changes:
        if change.path.endswith(".replicas") and change.after > change.before:
            beside += [change.path.split(".")[1]] * (change.after - change.before)
    memory = sum(_resident(supervisor, worker) for worker in beside)
    gap = f"about {supervisor.start_s:.0f} s (as the last start), after open requests have ended"
    return Reply(
        last=True,
        changes=diff.changes,
        kept=diff.kept,
        memory_bytes=memory,
        gap=gap if diff.kind == "cold" else "none",
        source=supervisor.controller.source,
    )


def _resident(supervisor: Supervisor, worker: str) -> int:
    """Memory of one instance of a worker as it is now, in bytes; 0 where the system doesn't say."""
    for child in supervisor.children.values():
        if child.worker == worker and child.process is not None:
            try:
                pages = Path(f"/proc/{child.process.pid}/statm").read_text().split()[1]
            except (OSError, IndexError):
                return 0
            return int(pages) * resource.getpagesize()
    return 0
