"""What becomes of a change whose controller died in it: undone while nobody had switched, else brought to its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from flowinfer.errors import FlowInferError
from flowinfer.runtime.events import Abandon, Drained, Prepared, Running, Switch, Switched
from flowinfer.runtime.rewire.experiment import open_arm
from flowinfer.runtime.rewire.restart import restart

if TYPE_CHECKING:
    from flowinfer.runtime.rewire.controller import Controller
    from flowinfer.runtime.state import Underway

Verdict = Literal["abandon", "complete", "restart", "revert"]
BEFORE_SWITCH = ("begin", "prepare", "verify")


def decide(change: Underway, census: Mapping[str, Running]) -> Verdict:
    """How a change goes on, from what its workers really run. Pure.

    abandon: nobody had switched, so the old plan runs whole. complete: somebody had, so requests may be under way by
    the new plan. restart: it stands still between two plans. revert: it was being taken back, and has to be still.
    """
    if is_restart(change):
        return "restart"
    if change.step not in BEFORE_SWITCH and has_switched(change, census):
        return "complete"
    return "revert" if change.kind == "revert" else "abandon"


def is_restart(change: Underway | None) -> bool:
    """True when all workers are being started anew, so that the old ones admit nothing any more."""
    return change is not None and change.kind == "restart" and change.step != "begin"


def has_switched(change: Underway, census: Mapping[str, Running]) -> bool:
    """True when a worker that ran the old plan runs the new one, or none of those is left."""
    old = [running for name, running in census.items() if name not in change.born]
    return not old or any(running.epoch >= change.new.epoch for running in old)


def resume(controller: Controller) -> None:
    """Ends or undoes the change under way, if there is one. The service goes on serving meanwhile."""
    change = controller.underway
    if change is None:
        return
    census = controller.supervisor.census
    verdict = decide(change, census)
    if verdict != "complete":  # then who runs by which plan is clear already
        controller.supervisor.is_taking_over = False
    with controller.resumed(change):
        _report(controller, change, census)
        if verdict == "abandon":
            _abandon(controller, change)
        elif verdict == "restart":
            controller.step("resume", "all workers are started anew, as the change asks")
            _restart(controller, change)
        elif verdict == "revert":
            _abandon_workers(controller, change)
            controller.revert(change)
        else:
            _complete(controller, change, census)


def _report(controller: Controller, change: Underway, census: Mapping[str, Running]) -> None:
    """What the workers said to the predecessor, or would have."""
    for name, running in census.items():
        child = controller.supervisor.children.get(name)
        if child is None or running.number != change.number:
            continue
        said = {"prepared": (Prepared,), "switched": (Switched,), "drained": (Switched, Drained)}
        for kind in said.get(running.step, ()):
            controller.note(child, kind(number=change.number))


def _abandon(controller: Controller, change: Underway) -> None:
    _abandon_workers(controller, change)
    open_arm(controller)  # which may have been emptied already
    controller.step("abandoned", f"before the switch: the service runs by epoch {change.old.epoch} as before")


def _abandon_workers(controller: Controller, change: Underway) -> None:
    supervisor = controller.supervisor
    supervisor.tell_all(Abandon(number=change.number))
    # Those on trial may be more than the change has written down: they are started first.
    born = [child for child in supervisor.children.values() if child.on_trial or child.name in change.born]
    supervisor.end(born)
    for child in supervisor.children.values():
        child.leaving = False
    _end_outdated(controller)


def _end_outdated(controller: Controller) -> None:
    """Those that were only starting, by a plan that the service doesn't run: the next start by the right one."""
    supervisor = controller.supervisor
    for child in supervisor.children.values():
        is_other = child.epoch != supervisor.plan.epoch and child.name not in supervisor.census
        if is_other and child.state != "down" and not child.on_trial:
            supervisor.say(f"Worker {child.name} starts with another plan: starting it again.")
            child.kill()


def _restart(controller: Controller, change: Underway) -> None:
    controller.supervisor.take_plan(change.old)
    try:
        restart(controller, change.new)
    except FlowInferError as error:
        controller.step("failed", error.message)
        return
    controller.finish(change)


def _complete(controller: Controller, change: Underway, census: Mapping[str, Running]) -> None:
    controller.step("resume", f"from {change.step!r}: {_count(change, census)} workers had switched")
    supervisor = controller.supervisor
    supervisor.take_plan(change.new, [name for name in change.leaving if name in supervisor.children])
    supervisor.is_taking_over = False
    supervisor.channel.raise_epoch(change.new.epoch)
    _end_outdated(controller)
    asked: dict[str, int] = {}
    for name, running in census.items():
        child = supervisor.children.get(name)
        if child is None or child.state != "ready" or name in change.born:
            continue
        if running.number == change.number and running.step == "prepared":
            supervisor.channel.send_event(name, Switch(number=change.number, leaving=change.leaving))
        elif running.epoch < change.new.epoch:
            supervisor.say(f"Worker {name} runs the old plan and can't switch: ending it.")
            child.kill()
            continue
        if running.number == change.number:
            asked[name] = child.generation
    controller.complete(change, asked)


def _count(change: Underway, census: Mapping[str, Running]) -> str:
    old = [running for name, running in census.items() if name not in change.born]
    return f"{sum(running.epoch >= change.new.epoch for running in old)} of {len(old)}"
