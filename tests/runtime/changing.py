"""A running service of plain stages and the way to change it, for the tests of changes."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
from services import Service, until

from flowinfer.graph.plan import Plan
from flowinfer.runtime.rewire.control import ask
from flowinfer.runtime.rewire.protocol import SERVICE, Manner, Reply, Request
from flowinfer.runtime.rewire.protocol import Service as About


class Changing:
    """A running service and the way to change it."""

    def __init__(self, service: Service, plan: Plan) -> None:
        self.service, self.plan = service, plan
        service.wait_ready()
        (found,) = (service.tmp / f"flowinfer-{os.getuid()}").glob(f"*/{SERVICE}")
        self.folder = found.parent

    @property
    def controller(self) -> int:
        """Process id of the supervisor."""
        return msgspec.json.decode((self.folder / SERVICE).read_bytes(), type=About).controller

    def ask(self, request: Request) -> list[Reply]:
        return list(ask(self.folder, request))

    def replies(self, plan: Plan, *renew: str, probation_s: float = 0.05) -> Iterator[Reply]:
        return ask(self.folder, Request(do="apply", plan=plan, renew=renew, manner=Manner(probation_s=probation_s)))

    def status(self) -> Plan:
        (reply,) = self.ask(Request(do="status"))
        assert reply.plan is not None
        return reply.plan

    def apply(self, plan: Plan, *renew: str, drain: str = "") -> Reply:
        *_, last = self.ask(Request(do="apply", plan=plan, renew=renew, manner=Manner(drain=drain, probation_s=0.05)))
        return last

    def must_apply(self, plan: Plan, *renew: str) -> None:
        last = self.apply(plan, *renew)
        assert last.ok, (last.text, self.service.log.read_text())
        self.plan = plan

    def go_round(self, count: int = 100) -> None:
        before = len(self.service.lines("answered"))
        until(lambda: len(self.service.lines("answered")) > before + count, "requests go round")

    def kill_controller(self) -> None:
        """Kills the supervisor, and waits until another one serves people."""
        old, resumed = self.controller, self.num_resumed()
        os.kill(old, signal.SIGKILL)
        until(lambda: self.num_resumed() > resumed, "another controller")
        self.service.workers()

    def num_resumed(self) -> int:
        return self.service.log.read_text().count("RESUMED")

    def check_ends(self, *, allowed: frozenset[str] = frozenset()) -> None:
        """Stops the service; every request that was made has had exactly one end, and no failure but of these codes."""
        self.service.process.send_signal(signal.SIGTERM)
        self.service.wait_gone()
        assert self.service.process.returncode == 0, self.service.log.read_text()
        assert {line.split()[3] for line in self.service.lines("failed")} <= allowed
        self.check_each_has_one_end()
        closed = self.service.lines("closed")
        assert set(closed) == {"closed 0"} and (allowed or len(closed) == 1)

    def check_each_has_one_end(self) -> None:
        made = {line.split()[1] for line in self.service.lines("made")}
        ends = Counter(line.split()[1] for line in (*self.service.lines("answered"), *self.service.lines("failed")))
        assert made == set(ends) and set(ends.values()) == {1}


def check_nothing_left(folder: Path) -> None:
    """No process whose command line names this folder."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(folder).encode() not in path.read_bytes(), path
        except OSError:
            continue
