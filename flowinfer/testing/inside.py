"""A test's part inside true worker processes: faults at work there, notes of what passes edges, cases of a cut.

`flowinfer test --real` names a folder in FLOWINFER_TEST; a worker that finds it joins. All processes of the host share
one monotonic clock, so that a time that the runner writes means the same everywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from flowinfer.graph.plan import API, Plan
from flowinfer.message import Call
from flowinfer.testing.checks import Passed
from flowinfer.testing.doors import CutDoor
from flowinfer.testing.faults import Injector
from flowinfer.testing.file import Case, Fault
from flowinfer.testing.inline import look_at
from flowinfer.testing.mocks import Outside

if TYPE_CHECKING:
    from flowinfer.runtime.worker import Worker

ENV = "FLOWINFER_TEST"
ORDERS, GO, ARMED, EDGES = "orders.json", "go", "armed.jsonl", "edges.jsonl"
NAMES, RESULTS = "names.jsonl", "results.jsonl"
LOOK_S = 0.01  # between two looks whether the test has begun


class Orders(msgspec.Struct):
    """What workers are told. test: the test file; edges: `where` by edge that is looked at; faults: as in the file."""

    test: str
    edges: dict[str, str]
    faults: list[dict[str, Any]]


def join(worker: Worker, folder: Path) -> None:
    """Puts the faults and looks of a test into this worker; they wait for the test to begin."""
    orders = msgspec.json.decode((folder / ORDERS).read_bytes(), type=Orders)
    injector = Injector(worker, [Fault.model_validate(fault) for fault in orders.faults])
    for name, where in orders.edges.items():
        look_at(worker, name, where, lambda passed, name=name: _note(folder, name, passed), worker.clock.now)  # type: ignore[misc]
    api = worker.by_name[API].stage if API in worker.by_name else None
    if api is not None and hasattr(api, "submit_group"):
        _name_requests(api, folder)

    def look() -> None:
        began = _began(folder)
        if began is None:
            worker.call_at(None, worker.clock.now() + LOOK_S, look)
            return
        injector.begin(began)
        worker.call_at(
            None, worker.clock.now(), lambda: _write(folder / ARMED, worker.name)
        )  # behind the faults' start
        if isinstance(api, Outside) and worker.generation == 1:
            _Cases(worker, api, folder, orders, began).turn()

    look()


def _began(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        return float((folder / GO).read_text())
    return None


def all_armed(folder: Path, plan: Plan) -> bool:
    """True once every worker of the plan has its faults in place: a request that is sent earlier might slip by."""
    with contextlib.suppress(OSError):
        armed = {json.loads(line) for line in (folder / ARMED).read_text().splitlines()}
        return armed >= {f"{name}.{i}" for name, worker in plan.workers.items() for i in range(worker.replicas)}
    return False


def _write(path: Path, line: object) -> None:
    """Appends a line at once, whole: several processes write."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(fd, json.dumps(line).encode() + b"\n")
    finally:
        os.close(fd)


def _note(folder: Path, edge: str, passed: Passed) -> None:
    line = {"edge": edge, "at": passed.at, "requests": passed.requests, "holds": passed.holds, "told": passed.told}
    _write(folder / EDGES, line)


def _name_requests(gateway: Any, folder: Path) -> None:
    """Notes which request is which case: the runner names it as the request's `user`."""
    submit = gateway.submit_group

    def named(calls: Sequence[Call], on_piece: Any) -> None:
        for call in calls:
            _write(folder / NAMES, {"id": call.id, "name": call.session})
        submit(calls, on_piece)

    gateway.submit_group = named


class _Cases:
    """The cases of a cut, sent from within the front worker."""

    def __init__(self, worker: Worker, outside: Outside, folder: Path, orders: Orders, began: float) -> None:
        from flowinfer.testing.file import PipelineTest
        from flowinfer.testing.prepared import prepare

        path = Path(orders.test)
        ready = prepare(*PipelineTest.read(path), path)
        self._worker, self._folder, self._began = worker, folder, began
        self._plan = ready.plan
        self._door = CutDoor(outside, ready.plan, ready.given)
        self._waiting = list(ready.cases)
        self._open: set[str] = set()

    def turn(self) -> None:
        """Sends what is due; comes back until all is sent."""
        now = self._worker.clock.now()
        for case in list(self._waiting) if all_armed(self._folder, self._plan) else ():
            due = case.at <= now - self._began if case.at is not None else case is self._waiting[0] and not self._open
            if due:
                self._waiting.remove(case)
                self._send(case)
        if self._waiting:
            self._worker.call_at(None, now + LOOK_S, self.turn)

    def _send(self, case: Case) -> None:
        sent, first = self._worker.clock.now(), [0.0]
        self._open.add(case.name)

        def begun() -> None:
            first[0] = first[0] or self._worker.clock.now()

        def ended(status: int | str, body: dict[str, Any]) -> None:
            self._open.discard(case.name)
            line = {"name": case.name, "status": status, "body": body, "sent": sent, "first": first[0]}
            _write(self._folder / RESULTS, line | {"ended": self._worker.clock.now()})

        self._door.ask(case, begun, ended)
