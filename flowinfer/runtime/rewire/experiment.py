"""The controller's part in an experiment: lets arm B begin once all workers know it, and empties it before it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from flowinfer.errors import FlowInferError
from flowinfer.graph.join import without_experiment
from flowinfer.graph.plan import API, Plan
from flowinfer.message import ArmsClosed, Breach, SetArms
from flowinfer.runtime.rewire.protocol import Source

if TYPE_CHECKING:
    from flowinfer.runtime.rewire.controller import Controller

OFF = "experiment=null"  # what `--set` takes to leave an experiment out
ABORT_S = 10.0  # for the door to fail what is left


def open_arm(controller: Controller) -> None:
    """Lets the door send requests to arm B: every worker runs the plan that has it."""
    if controller.supervisor.plan.experiment is not None:
        controller.supervisor.channel.send_event(controller.supervisor.front, SetArms(open=True))


def close_arm(controller: Controller, new: Plan, limit_s: float) -> None:
    """Empties arm B if `new` has another or none: nothing more comes, what is open ends or fails at the deadline."""
    supervisor = controller.supervisor
    running = supervisor.plan.experiment
    if running is None or (new.experiment is not None and new.experiment.digest == running.digest):
        return
    controller.step("arm b", f"gets nothing new; what is open has {limit_s:g} s to end")
    for abort, limit in ((False, limit_s), (True, ABORT_S)):
        door = supervisor.children.get(supervisor.front)
        if door is None or door.state != "ready":
            return  # a new one begins with nothing in arm B
        generation = door.generation
        supervisor.channel.send_event(door.name, SetArms(open=False, abort=abort))
        if controller.waited_for(ArmsClosed, door.name, generation, limit):
            return
        controller.step("arm b", "abort: the deadline is over")


def attend(controller: Controller) -> None:
    """Takes arm B down where the door has found that it breaks a limit."""
    while controller.breaches and not controller.busy:
        breach = controller.breaches.pop(0)
        running = controller.supervisor.plan.experiment
        if running is not None and running.name == breach.experiment:
            _stop(controller, breach)


def _stop(controller: Controller, breach: Breach) -> None:
    supervisor, plan = controller.supervisor, controller.supervisor.plan
    supervisor.say(f"Experiment {breach.experiment} stops itself: {breach.reason}.")
    new, source = without_experiment(plan), stopped(controller.source)
    if controller.plan(new).kind == "cold":  # it isn't worth a pause: arm B stays loaded, without requests
        new, source = idle(plan), controller.source
    try:
        controller.apply(new, source, supervisor.say, note=f"experiment {breach.experiment} stopped: {breach.reason}")
    except FlowInferError as error:
        supervisor.say(f"Arm B couldn't be taken down ({error.message}): it stays loaded, without requests.")


def stopped(source: Source) -> Source:
    """Where the service comes from, less its experiment."""
    sets = tuple(text for text in source.sets if text != OFF)
    return msgspec.structs.replace(source, sets=(*sets, OFF))


def idle(plan: Plan) -> Plan:
    """The plan with no requests for arm B."""
    api = plan.stages[API]
    config = api.config | {"experiment": api.config["experiment"] | {"share": 0.0}}
    stages = plan.stages | {API: msgspec.structs.replace(api, config=config)}
    assert plan.experiment is not None, "there is an arm B"
    experiment = msgspec.structs.replace(plan.experiment, share=0.0)
    return msgspec.structs.replace(plan, stages=stages, experiment=experiment)
