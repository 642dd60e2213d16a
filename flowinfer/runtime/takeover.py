"""A supervisor takes over from one that died: adopts the workers, asks them what they run, ends or undoes a change."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from flowinfer.channel import Channel, Endpoints
from flowinfer.codec import schema_digest
from flowinfer.message import LeaseQuery, WorkerDown
from flowinfer.runtime.adopted import Adopted
from flowinfer.runtime.arenas import Ranges
from flowinfer.runtime.boot import ArenaRange
from flowinfer.runtime.child import Child
from flowinfer.runtime.events import SUPERVISOR, Census
from flowinfer.runtime.keeper import orphans
from flowinfer.runtime.mailbox import load_keys
from flowinfer.runtime.rewire.resume import is_restart, resume
from flowinfer.runtime.run_dir import RunDir, start_time
from flowinfer.runtime.state import Known, State

if TYPE_CHECKING:
    from flowinfer.runtime.supervisor import Supervisor

WORKER = b"flowinfer.runtime.worker_main"


def acquire(supervisor: Supervisor, stack: contextlib.ExitStack, left: State) -> None:
    """Takes what the keeper holds, and listens where the predecessor did. Raises FlowInferError when it can't."""
    keeper = supervisor.keeper
    assert keeper is not None, "only a keeper starts a second supervisor"
    fds = keeper.fds
    supervisor.listener = stack.enter_context(socket.socket(fileno=fds["listener"])) if "listener" in fds else None
    supervisor.layouts, supervisor.engines = left.layouts, list(left.engines)
    supervisor.arenas = _ranges(left, {old: fds[name] for old, name in left.fds.items() if name in fds})
    stack.callback(supervisor.close_arenas)
    supervisor.run_dir = RunDir.held(Path(keeper.folder), fds["lock"])
    stack.callback(supervisor.run_dir.remove)
    supervisor.life_fd = keeper.life_fd
    plan = left.plan
    channel = Channel(SUPERVISOR, keeper.number, epoch=plan.epoch, keys=load_keys(plan.network))
    supervisor.channel = channel
    stack.callback(channel.close)
    supervisor.endpoints = channel.bind_at(left.endpoints)
    stack.callback(supervisor.end_all)
    supervisor.controller.restore(left)
    supervisor.last_generation, supervisor.start_s = left.last_generation, left.start_s


def _ranges(left: State, fds: dict[int, int]) -> Ranges:
    def moved(arena: ArenaRange) -> ArenaRange:
        return msgspec.structs.replace(arena, fd=fds[arena.fd])

    ranges = Ranges()
    for name, own in left.arenas.items():
        ranges[name] = tuple(moved(arena) for arena in own)
    ranges.spares = [moved(arena) for arena in left.spares]
    return ranges


def take_over(supervisor: Supervisor, stack: contextlib.ExitStack, left: State) -> None:
    """Supervises what runs, once every worker has said what that is and the change under way is over."""
    journal, change = supervisor.controller.journal, left.change
    what = f"in the step {change.step!r}" if change else "between changes"
    words = f"process {os.getpid()}: the controller died {what}"
    if trouble := journal.try_write(left.number, left.plan.epoch, "takeover", words):
        supervisor.say(trouble)
    supervisor.say(f"Process {os.getpid()} takes over {len(left.children)} workers; the controller had died {what}.")
    _adopt(supervisor, left)
    if left.schema != schema_digest():
        _start_with_new_code(supervisor, stack)
        return
    supervisor.serve_from_now_on()
    _take_census(supervisor)
    supervisor.open_control(stack)
    for child in [child for child in supervisor.children.values() if child.state == "down"]:
        supervisor.tell_all(WorkerDown(worker=child.name, generation=child.generation))
        if child.name in supervisor.arenas:
            supervisor.tell_all(LeaseQuery(owner=child.name))
    if not supervisor.is_stopping:
        if not is_restart(change):  # else admission is paused, and all of these go
            supervisor.introduce([child for child in _ready(supervisor) if not child.on_trial])
        resume(supervisor.controller)
    supervisor.is_taking_over = False
    supervisor.save()
    supervisor.tell_ready()


def _adopt(supervisor: Supervisor, left: State) -> None:
    """Makes the predecessor's workers this one's; ends those that it had no time to write down."""
    keeper = supervisor.keeper
    assert keeper is not None
    supervisor.children.clear()
    for known in left.children:
        child = supervisor.children[known.name] = _child(known)
        if known.pid:
            process = Adopted(known.pid, keeper.exits)
            if start_time(known.pid) not in ("", known.started):
                process = Adopted(-1, {})  # the id is another process's by now
            child.adopt(process, supervisor.run_dir.path)
    mine = {known.pid for known in left.children} | {os.getpid()}
    for pid in orphans(keeper.keeper):
        if pid not in mine and _is_worker(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _child(known: Known) -> Child:
    now = time.monotonic()
    fields = msgspec.structs.asdict(known)
    for field in ("pid", "started"):
        del fields[field]
    return Child(**fields, beat_at=now)


def _is_worker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return WORKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _ready(supervisor: Supervisor) -> list[Child]:
    return [child for child in supervisor.children.values() if child.state == "ready"]


def _take_census(supervisor: Supervisor) -> None:
    """Asks every worker what it runs, and waits until those that had been ready have answered or died.

    One that is in a long step answers behind it; one that doesn't turn any more is ended for that, as always. What one
    runs that is only starting is known: the plan that it was started with.
    """
    asked = [child for child in supervisor.children.values() if child.state == "ready"]
    for child in supervisor.children.values():
        endpoints = child.endpoints or _guessed(supervisor, child)
        if child.state != "down" and endpoints is not None:
            supervisor.channel.connect(child.name, child.generation, endpoints)
            supervisor.channel.send_event(child.name, Census())

    def is_missing(child: Child) -> bool:
        return child.state == "ready" and child.name not in supervisor.census

    while not supervisor.is_stopping and any(map(is_missing, asked)):
        supervisor.pump(0.1)


def _guessed(supervisor: Supervisor, child: Child) -> Endpoints | None:
    """Where a worker listens that was still opening its stages, or just through with it, when its supervisor died."""
    if supervisor.plan.network.transport != "ipc":
        return None  # its Ready comes to the address that this supervisor took over
    folder = supervisor.run_dir.path
    data, control = (f"ipc://{folder / f'{child.name}.{child.generation}.{lane}'}" for lane in ("d", "c"))
    return Endpoints(data, control)


def _start_with_new_code(supervisor: Supervisor, stack: contextlib.ExitStack) -> None:
    """FlowInfer's own code was changed while the service ran: workers of the old code can't be spoken to."""
    supervisor.say("FlowInfer was changed since the service started: all workers are started anew.")
    change, supervisor.controller.underway = supervisor.controller.underway, None
    plan = supervisor.plan
    supervisor.end(list(supervisor.children.values()))
    supervisor.is_taking_over = False
    supervisor.open_control(stack)
    supervisor.start_anew(msgspec.structs.replace(plan, epoch=plan.epoch + 1 + (change is not None)))
