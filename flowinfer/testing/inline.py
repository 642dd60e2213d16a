"""Runs a test file over simulated workers in virtual time: seconds of waiting, timeouts and restarts take no time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

from flowinfer.graph.plan import Plan
from flowinfer.message import Message, type_registry
from flowinfer.observe import metrics
from flowinfer.observe.summary import summarize
from flowinfer.observe.where import compile_where, requests_of
from flowinfer.runtime.clock import FakeClock
from flowinfer.runtime.group import GRACE_S
from flowinfer.runtime.watch import watch
from flowinfer.testing.checks import Passed, Result, Run
from flowinfer.testing.doors import CutDoor, Door, make_door
from flowinfer.testing.expect import RunExpect
from flowinfer.testing.faults import Injector
from flowinfer.testing.file import Case, Fault
from flowinfer.testing.prepared import Given
from flowinfer.testing.world import Killed, SimWorker, World

SETTLE_S = 3 * GRACE_S + 0.5  # after the last end: what is held then is a leak
MAX_VIRTUAL_S = 86_400.0


def _die() -> None:
    raise Killed


class InlineRun:
    """One run of a plan. Results of cases are there as soon as they end."""

    def __init__(
        self,
        plan: Plan,
        cases: Sequence[Case],
        faults: Sequence[Fault] = (),
        expect: RunExpect | None = None,
        given: Given | None = None,
    ) -> None:
        self.plan, self.cases, self.faults, self._given = plan, cases, faults, given or {}
        self.clock = FakeClock(0.0)
        self.results = {case.name: Result(case.name) for case in cases}
        self._edges = {name: edge.where or "" for name, edge in expect.edges.items()} if expect else {}
        self._passed: dict[str, list[Passed]] = {name: [] for name in self._edges}
        self._injectors: list[Injector] = []
        self._began: float | None = None
        self._open: dict[str, Case] = {}
        self._door: Door | CutDoor | None = None

    def run(self) -> Run:
        """Sends the cases, lets time pass until all have ended, and looks at what is left."""
        before = _registry()
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_injectors)
            self.world = stack.enter_context(World(self.plan, self.clock, on_start=self._joined, on_death=self._died))
            self._door = make_door(self.world.workers[self.world.front], self.plan, self._given)
            self.world.run_until_idle()
            self._began = self.clock.now()
            for injector in self._injectors:
                injector.begin(self._began)
            self._drive()
            self._settle()
            lossy = any(fault.kind in ("drop_credit", "corrupt") for fault in self.faults)
            left = self.world.leftovers(credit=not lossy)
            totals = _totals(self.world.samples(), before)
        counts = {name: generation - 1 for name, generation in self.world.generations.items()}
        return Run(list(self.results.values()), self._passed, restarts(self.plan, counts), totals, left)

    # -- the course of it ----------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        waiting = list(self.cases)
        while waiting or self._open:
            self.world.run_until_idle()
            if self._send_due(waiting):
                continue
            at = min(self.world.next_at(), self._next_case_at(waiting))
            if at == inf or at > MAX_VIRTUAL_S:
                self._stuck()
                return
            self.world.advance(at)

    def _send_due(self, waiting: list[Case]) -> bool:
        """Sends all whose time has come; those of one time arrive together."""
        was_due = False
        while self._can_ask() and (due := self._due(waiting)) is not None:
            waiting.remove(due)
            self._send(due)
            was_due = True
        return was_due

    def _due(self, waiting: Sequence[Case]) -> Case | None:
        """The next case whose time has come: cases without a time wait for all before them."""
        now = self._elapsed()
        for case in waiting:
            if case.at is not None:
                if case.at <= now:
                    return case
            elif case is waiting[0] and not self._open:
                return case
        return None

    def _next_case_at(self, waiting: Sequence[Case]) -> float:
        ahead = [case.at for case in waiting if case.at is not None and case.at > self._elapsed()]
        return (self._began or 0.0) + min(ahead, default=inf)

    def _elapsed(self) -> float:
        return self.clock.now() - (self._began or 0.0)

    def _can_ask(self) -> bool:
        return self.world.front in self.world.workers

    def _send(self, case: Case) -> None:
        result = self.results[case.name]
        result.sent = self.clock.now()
        self._open[case.name] = case
        assert self._door is not None
        self._door.ask(case, partial(self._first, case.name), partial(self._end, case.name))

    def _first(self, name: str) -> None:
        result = self.results[name]
        result.first = result.first or self.clock.now()

    def _end(self, name: str, status: int | str, body: dict[str, Any]) -> None:
        result = self.results[name]
        if self._open.pop(name, None) is None:
            self._twice(name)
            return
        result.status, result.body, result.ended = status, body, self.clock.now()

    def _twice(self, name: str) -> None:
        result = self.results[name]
        result.status, result.body = "ended twice", {"error": {"message": "the request had more than one end"}}

    def _stuck(self) -> None:
        """Nothing will happen any more, and yet requests are open."""
        held = "; ".join(self.world.leftovers()) or "nobody holds them"
        for name in list(self._open):
            self._end(name, "stuck", {"error": {"message": f"nothing happens any more, and it never ends: {held}"}})

    def _settle(self) -> None:
        until = self.clock.now() + SETTLE_S
        while (at := self.world.next_at()) <= until:
            self.world.advance(at)
            self.world.run_until_idle()

    # -- workers -------------------------------------------------------------------------------------------------------

    def _joined(self, worker: SimWorker) -> None:
        injector = Injector(worker, self.faults, _die)
        self._injectors.append(injector)
        if self._began is not None:
            injector.begin(self._began)
        for name, where in self._edges.items():
            look_at(worker, name, where, self._passed[name].append, lambda: self._elapsed())
        if self._began is not None and worker.name == self.world.front:
            self._door = make_door(worker, self.plan, self._given)

    def _close_injectors(self) -> None:
        for injector in self._injectors:
            injector.close()

    def _died(self, name: str) -> None:
        if name == self.world.front:
            for case in list(self._open):
                self._end(case, "lost", {"error": {"message": "the connection broke"}})


def restarts(plan: Plan, counts: Mapping[str, int]) -> dict[str, int]:
    """How often instances were started again, by instance, by worker and by stage."""
    found = dict(counts)
    for worker in plan.workers.values():
        total = sum(count for name, count in counts.items() if name.rpartition(".")[0] == worker.name)
        found |= dict.fromkeys((worker.name, *worker.stages), total)
    return found


def look_at(worker: Any, edge: str, where: str, note: Callable[[Passed], None], elapsed: Callable[[], float]) -> None:
    """Notes what passes an edge that begins in this worker."""
    plan = next((one for one in worker.plan.edges if one.name == edge), None)
    if plan is None or plan.source not in worker.by_name:
        return
    holds = compile_where(where, type_registry.get(plan.message))

    def look(message: Message) -> None:
        good = holds(message)
        note(Passed(elapsed(), tuple(requests_of(message)), good, "" if good else str(summarize(message))))

    watch(worker, edge, look)


def _registry() -> dict[str, float]:
    return _summed(metrics.snapshot())


def _totals(samples: Sequence[metrics.Sample], before: dict[str, float]) -> dict[str, float]:
    """Metrics by name, summed; those of the process by how much they grew."""
    grown = {name: value - before.get(name, 0.0) for name, value in _registry().items()}
    own = _summed(samples)
    return {name: grown.get(name, 0.0) + own.get(name, 0.0) for name in {**grown, **own}}


def _summed(samples: Sequence[metrics.Sample]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, _, value in samples:
        short = name.removeprefix("flowinfer:")
        found[short] = found.get(short, 0.0) + value
    return found
