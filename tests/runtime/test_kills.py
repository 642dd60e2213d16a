"""Who is killed in which step of a change: the service ends wholly in one epoch, requests end, nothing is left behind.

The change swaps a stage inside its worker and replaces a worker beside itself, so that it has all steps, a worker that
leaves and one that comes. The line that tells a step is the trigger; it is in the journal by then.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
from pathlib import Path

import pytest
from changing import Changing
from services import Start, loaded, stage, until

from flowinfer.errors import FlowInferError
from flowinfer.graph.plan import Plan
from flowinfer.runtime.rewire.protocol import Request, Step

STEPS = ("begin", "prepare", "verify", "switch", "drain", "probation", "retire")
VICTIMS = ("controller", "front.0", "middle.0", "back.0", "back.1")
OVER = ("done", "abandoned", "failed", "refused")
IN_CI = (("controller", "prepare"), ("controller", "drain"))
# Of a change whose controller dies. In verify and switch it depends on who had heard of the switch.
FATE = {"begin": "abandoned", "prepare": "abandoned", "drain": "done", "probation": "done", "retire": "done"}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def service_of(start: Start, tmp: Path) -> Changing:
    plan = loaded(tmp, open=16)
    plan.stages["answer"] = stage("answer", "HoldingAnswerer", "back", delay=0.1)
    change = Changing(start(plan, kept=True, max_deaths=100), plan)
    change.go_round(40)
    return change


def kill_in(change: Changing, victim: str, step: str, new: Plan) -> None:
    """Makes the change, and kills the victim once the step is told; waits until the service is whole again."""
    resumed, killed, told = change.num_resumed(), False, []
    before = {name: process.pid for name, process in change.service.workers().items()}
    with contextlib.suppress(FlowInferError):  # the controller that told it is gone
        for reply in change.replies(new, "relay", "answer"):
            told.append(reply.text)
            if reply.text.startswith(step) and not killed:
                pid = change.controller if victim == "controller" else pid_of(change, victim)
                if pid:
                    os.kill(pid, signal.SIGKILL)
                killed = True
    assert killed, (told, change.service.log.read_text())
    if victim == "controller":
        until(lambda: change.num_resumed() > resumed, "another controller")
    until(lambda: last_step(change).step in OVER, "the change is over")
    names = {"front.0", "middle.0"}
    until(lambda: names <= change.service.workers().keys(), "all are there")
    if victim in before and victim in names:
        until(lambda: change.service.has_new(victim, before[victim]), "a new process")


def pid_of(change: Changing, name: str) -> int:
    """Of a worker; 0 for one that hasn't come yet, or is gone."""
    found = change.service.workers().get(name)
    return found.pid if found else 0


def last_step(change: Changing) -> Step:
    return change.ask(Request(do="history"))[-1].steps[-1]


def check_whole(change: Changing) -> None:
    """One instance of each worker, which the epoch says; requests go round, and the next change is made."""
    over, epoch = last_step(change), change.status().epoch
    backs = {name for name in change.service.workers() if name.startswith("back.")}
    until(lambda: len({n for n in change.service.workers() if n.startswith("back.")}) == 1, f"one of {backs}")
    assert (over.step == "done") == (epoch == 2), (over, epoch)
    change.go_round(40)
    change.must_apply(change.status(), "relay")
    change.go_round(40)


@pytest.mark.parametrize(
    ("victim", "step"),
    [
        pytest.param(victim, step, marks=() if (victim, step) in IN_CI else pytest.mark.slow)
        for victim, step in itertools.product(VICTIMS, STEPS)
    ],
)
def test_a_kill_in_a_change_leaves_one_whole_epoch(start: Start, tmp_path: Path, victim: str, step: str) -> None:
    change = service_of(start, tmp_path)
    kill_in(change, victim, step, change.plan)
    if victim == "controller" and step in FATE:
        assert last_step(change).step == FATE[step]
    check_whole(change)
    if victim == "front.0":  # its clients are gone with it, and what they had asked for
        change.service.process.send_signal(signal.SIGTERM)
        change.service.wait_gone()
    else:
        change.check_ends(allowed=frozenset() if victim == "controller" else frozenset({"worker_died"}))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_kills_at_any_time_of_many_changes(start: Start, tmp_path: Path, seed: int) -> None:
    """The controller, and half of the time a worker with it, at a random moment of each of ten changes."""
    rng = random.Random(seed)
    change = service_of(start, tmp_path)
    for number in range(10):
        resumed, epoch = change.num_resumed(), change.status().epoch
        also = rng.choice(["", "middle.0", "back."]) if number % 2 else ""
        victims = [
            change.controller,
            *(p.pid for n, p in change.service.workers().items() if also and n.startswith(also)),
        ]
        timer = threading.Timer(
            rng.random() * 1.5, lambda victims=victims: [os.kill(v, signal.SIGKILL) for v in victims]
        )
        timer.start()
        with contextlib.suppress(FlowInferError):
            [*change.replies(change.status(), "relay", "answer")]
        timer.join()
        until(lambda resumed=resumed: change.num_resumed() > resumed, "another controller")
        until(lambda: {"front.0", "middle.0"} <= change.service.workers().keys(), "all are there")
        until(lambda: len({n for n in change.service.workers() if n.startswith("back.")}) == 1, "one of these")
        assert change.status().epoch - epoch in (0, 1, 2), "made, not made, or taken back"
        change.go_round(40)
    change.check_ends(allowed=frozenset({"worker_died"}))


@pytest.mark.slow
@pytest.mark.parametrize("step", ["pause", "replace"])
def test_a_restart_goes_on_when_its_controller_is_killed(start: Start, tmp_path: Path, step: str) -> None:
    import msgspec

    change = service_of(start, tmp_path)
    threads = msgspec.structs.replace(change.plan.workers["back"], threads=2)
    new = msgspec.structs.replace(change.plan, workers=change.plan.workers | {"back": threads})
    resumed, killed = change.num_resumed(), False
    with contextlib.suppress(FlowInferError):
        for reply in change.replies(new):
            if reply.text.startswith(step) and change.num_resumed() == resumed and not killed:
                os.kill(change.controller, signal.SIGKILL)
                killed = True
    until(lambda: change.num_resumed() > resumed, "another controller")
    assert change.status().workers["back"].threads == 2
    change.go_round(40)
    change.check_ends()


@pytest.mark.slow
@pytest.mark.parametrize("step", ["rollback", "prepare", "switch", "drain", "retire"])
def test_a_return_goes_on_when_its_controller_is_killed(start: Start, tmp_path: Path, step: str) -> None:
    plan = loaded(tmp_path, open=16)
    plan.stages["answer"] = stage("answer", "LateAnswerer", "back", delay=0.05)
    change = Changing(start(plan, kept=True), plan)
    change.go_round(40)
    broken = loaded(tmp_path, open=16)
    broken.stages["answer"] = stage("answer", "LateAnswerer", "back", delay=0.05, broken=True)
    resumed, told, killed = change.num_resumed(), [], False
    for reply in change.replies(broken, probation_s=5.0):
        told.append(reply.text)
        if any(text.startswith("rollback") for text in told) and reply.text.startswith(step) and not killed:
            os.kill(change.controller, signal.SIGKILL)
            killed = True
    assert killed, told
    assert not reply.ok and reply.last, told
    until(lambda: change.num_resumed() > resumed, "another controller")
    assert change.status().stages["answer"].config == plan.stages["answer"].config
    failed = len(change.service.lines("failed"))
    change.go_round(100)
    assert len(change.service.lines("failed")) - failed <= 16, "what the broken stage got is told so late at most"
    change.must_apply(change.status(), "relay")
    change.go_round(40)
    change.check_ends(allowed=frozenset({"stage_failed"}))
