"""What follows the switch of a change: the old ends its requests, the new proves itself, the counters are compared.

Until `retire` the old side stays as it was, open and idle: a breach of the limits, or a person, can call it back.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from flowinfer.errors import FlowInferError
from flowinfer.runtime.events import Count, Counted, Drained, Hurry, Retire, Stop, Switched, Trouble
from flowinfer.runtime.rewire.balance import imbalances, summary
from flowinfer.runtime.rewire.vitals import Limits, Reading, breach
from flowinfer.spec.drain import Phase, parse_drain

if TYPE_CHECKING:
    from flowinfer.runtime.rewire.controller import Controller

ABORT_S = 10.0  # from the last deadline of a drain until what is left is cut off
BALANCE_S = 5.0  # for counters to agree: what is under way arrives within milliseconds


class Reverted(FlowInferError):
    """A change that was made and taken back."""


class Settling:
    """One change behind its switch. before: how the service did until then, if that is known.

    watches: whether trouble takes the change back; what goes back already doesn't.
    """

    def __init__(
        self, controller: Controller, leaving: Collection[str], before: Reading | None = None, *, watches: bool = True
    ) -> None:
        self.controller, self.supervisor = controller, controller.supervisor
        self.leaving = [name for name in leaving if name in self.supervisor.children]
        self.before, self.start, self.watches = before, controller.vitals.last, watches

    # -- drain ---------------------------------------------------------------------------------------------------------

    def drain(self, asked: Mapping[str, int]) -> None:
        """The old ends its requests, by one mode after the other. asked: those that switched. Raises Reverted."""
        controller, manner = self.controller, self.controller.manner
        for phase in parse_drain(manner.drain or self.supervisor.plan.serve.drain, self._finish_s()):
            if phase.mode in ("handoff", "replay") and not self.leaving:
                continue  # stages replaced inside their worker have nothing to move: what they know is in their memory
            controller.step("drain", self._describe(phase))
            if phase.mode != "finish":
                self.supervisor.tell_all(Hurry(number=controller.number, mode=phase.mode))
            limit = ABORT_S if phase.mode == "abort" else phase.limit_s
            if controller.waited(lambda: self._is_drained(asked), limit):
                break
        aborted = sum(answer.aborted for answer in controller.answers(Drained).values())
        controller.step(
            "drain", f"over, {aborted} requests were aborted" if aborted else "over, every request has ended or moved"
        )

    def _finish_s(self) -> float:
        """Of a finish that names no time. Stages replaced inside their worker may wait: nothing else can help them."""
        serve = self.supervisor.plan.serve
        return serve.drain_timeout_s if self.leaving else serve.request_timeout_s

    def _describe(self, phase: Phase) -> str:
        if phase.mode == "abort":
            return "abort: the deadline is over"
        what = {
            "finish": "what is open has {} s to end",
            "handoff": "running sequences move with their KV, {} s",
            "replay": "running sequences are computed again elsewhere, {} s",
        }
        return f"{phase.mode}: {what[phase.mode].format(f'{phase.limit_s:g}')}"

    def _is_drained(self, asked: Mapping[str, int]) -> bool:
        self.look()
        return all(self.controller.has(Drained, name, generation) for name, generation in asked.items())

    # -- probation -----------------------------------------------------------------------------------------------------

    def probation(self) -> None:
        """Watches errors and latency against before. Raises Reverted when a limit breaks, or somebody asks for it."""
        manner = self.controller.manner
        self.controller.step("probation", f"for {manner.probation_s:g} s")
        self.controller.waited(self.look, manner.probation_s)

    def look(self) -> bool:
        """False, so that it can be waited for. Raises Reverted."""
        controller = self.controller
        if not self.watches:
            return False
        if controller.recalled:
            raise Reverted(controller.recalled)
        for _, event in controller.said(Trouble):
            raise Reverted(f"stage {event.stage!r} broke: {event.error}")
        last, manner = controller.vitals.last, controller.manner
        if self.before is not None and self.start is not None and last is not None:
            limits = Limits(manner.max_errors, manner.max_latency)
            if reason := breach(self.before, last.since(self.start), limits):
                raise Reverted(reason)
        return False

    # -- retire --------------------------------------------------------------------------------------------------------

    def retire(self) -> None:
        """Compares the counters of the old side and closes it."""
        controller, supervisor = self.controller, self.supervisor
        self._balance()
        controller.step("retire", ", ".join(self.leaving) or "the old stages are closed")
        for name in self.leaving:
            supervisor.channel.send_event(name, Stop())
        children = [supervisor.children[name] for name in self.leaving if name in supervisor.children]
        told, limit = time.monotonic(), ABORT_S + supervisor.plan.serve.stop_timeout_s
        controller.waited(lambda: not any(supervisor.may_go_on(child, told) for child in children), limit)
        supervisor.end(children)
        supervisor.tell_all(Retire(number=controller.number))

    def _balance(self) -> None:
        """What was sent to the old, and by it, must have arrived and ended; numbers that differ are told."""
        deadline = time.monotonic() + BALANCE_S
        while True:
            counted = self._count()
            wrong = imbalances(counted, self.leaving)
            if not wrong or time.monotonic() >= deadline:
                break
            self.controller.waited(lambda: False, 0.1)
        for line in wrong:
            self.controller.step("imbalance", line)
            self.supervisor.say(f"Change {self.controller.number}: {line}.")
        if not wrong:
            self.controller.step("balance", summary(counted, self.leaving))

    def _count(self) -> dict[str, Counted]:
        controller, supervisor = self.controller, self.supervisor
        ready = {child.name: child.generation for child in supervisor.children.values() if child.state == "ready"}
        controller.forget(Counted)
        supervisor.tell_all(Count(number=controller.number))
        controller.waited(lambda: all(controller.has(Counted, *who) for who in ready.items()), BALANCE_S)
        return controller.answers(Counted)


def switched(controller: Controller) -> dict[str, int]:
    """The workers that have said Switched, by their generations."""
    return {name: generation for (name, generation), _ in controller.said(Switched)}
