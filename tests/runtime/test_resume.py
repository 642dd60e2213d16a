"""What becomes of a change whose controller died, from what its workers run: by the table, without processes."""

from __future__ import annotations

import itertools

import pytest

from flowinfer.graph.plan import Plan
from flowinfer.runtime.events import Running
from flowinfer.runtime.rewire.protocol import Source
from flowinfer.runtime.rewire.resume import BEFORE_SWITCH, decide
from flowinfer.runtime.state import Underway

OLD = Plan(name="x", digest="", file="", stages={}, edges=(), workers={}, epoch=4)
NEW = Plan(name="x", digest="", file="", stages={}, edges=(), workers={}, epoch=5)
AFTER = ("switch", "drain", "probation", "retire")


def change(kind: str, step: str) -> Underway:
    return Underway(number=7, kind=kind, old=OLD, new=NEW, source=Source(), step=step, born=("b.1",))  # type: ignore[arg-type]


def runs(epoch: int, step: str = "") -> Running:
    return Running(data="", control="", schema="", epoch=epoch, number=7 if step else 0, step=step)


BORN = {"b.1": runs(5)}  # starts with the new plan, and says nothing of the others
NONE = {"a.0": runs(4, "prepared"), "b.0": runs(4, "prepared")} | BORN
SOME = {"a.0": runs(5, "switched"), "b.0": runs(4, "prepared")} | BORN
ALL = {"a.0": runs(5, "drained"), "b.0": runs(5, "drained")} | BORN


@pytest.mark.parametrize(("step", "census"), [*itertools.product(BEFORE_SWITCH, (NONE, SOME))])
def test_before_the_switch_a_change_is_undone_and_a_return_goes_on(step: str, census: dict[str, Running]) -> None:
    assert decide(change("beside", step), census) == "abandon"
    assert decide(change("revert", step), census) == "revert"


@pytest.mark.parametrize("step", AFTER)
def test_behind_it_what_the_workers_run_decides(step: str) -> None:
    for kind, undone in (("beside", "abandon"), ("revert", "revert")):
        assert decide(change(kind, step), NONE) == undone
        assert decide(change(kind, step), SOME) == "complete"
        assert decide(change(kind, step), ALL) == "complete"
        assert decide(change(kind, step), BORN) == "complete", "none of the old is left"


def test_a_restart_is_made_unless_it_has_not_begun() -> None:
    assert decide(change("restart", "begin"), NONE) == "abandon"
    for step, census in itertools.product(("pause", "replace"), (NONE, ALL, {})):
        assert decide(change("restart", step), census) == "restart"
