"""One worker's share of a change: builds new stages beside the old ones, switches between two turns, drains the old.

Requests that are open at the switch stay with the stages that know them; later ones go to the new stages. Which ones
are old is a `Layer`; several may drain at once, so that a change can be taken back before the one before it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowinfer.graph.diff import is_live
from flowinfer.graph.plan import EdgePlan, Plan, StagePlan
from flowinfer.message import Message
from flowinfer.runtime.inbox import Inbox
from flowinfer.runtime.loading import make_config, stage_error
from flowinfer.runtime.outbox import Outbox
from flowinfer.runtime.rewire.split import split
from flowinfer.runtime.stage_run import FusedEdge, StageRun

if TYPE_CHECKING:
    from flowinfer.runtime.group import Group
    from flowinfer.stage import StageConfig


@dataclass(eq=False)
class Layer:
    """What a switch left behind: the requests that were open, stages that only they still use, and their inboxes."""

    ids: set[str]
    runs: list[StageRun] = field(default_factory=list)
    inboxes: dict[str, Inbox] = field(default_factory=dict)  # by edge from another worker
    is_forked: bool = False

    def is_drained(self, open_requests: Collection[str]) -> bool:
        """True when no request is left that these stages know."""
        if any(run.stage.busy or any(inbox.messages for inbox in run.inboxes.values()) for run in self.runs):
            return False
        return not any(request in open_requests for request in self.ids)


class Graft:
    """Prepared stages and settings for one group. `build`, `open`, then `switch` or `discard`.

    back: a change is taken back, so stages that it replaced and that are still open are used again, warm as they are.
    """

    def __init__(
        self, group: Group, plan: Plan, stages: Iterable[str], renew: Collection[str] = (), *, back: bool = False
    ) -> None:
        self.group, self.plan = group, plan
        self.stages = [plan.stages[name] for name in stages]
        self.renew, self.back = renew, back
        self.reused: dict[str, StageRun] = {}
        self.made: dict[str, StageRun] = {}
        self.live: list[tuple[StageRun, StagePlan, StageConfig]] = []

    # -- prepare -------------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Makes new stages and validates live settings. Raises StageError; nothing that runs is touched."""
        for stage in self.stages:
            run = self.group.by_name.get(stage.name)
            if self.back and (warm := self.group.warm_run(stage)) is not None:
                self.reused[stage.name] = run = warm
            if run is None or stage.name in self.renew or not is_live(type(run.stage), run.plan, stage):
                self.made[stage.name] = self.group.make(stage)
            elif run.plan.config != stage.config:
                self.live.append((run, stage, make_config(type(run.stage), stage)))

    def open(self) -> None:
        """Opens the new stages; for another thread than the loop's. Raises StageError, with all closed again."""
        opened: list[StageRun] = []
        for run in self.made.values():
            run.context.hold_back()
            try:
                run.stage.open()
            except Exception as error:
                self.group.close_runs(opened)
                raise stage_error(run.plan, error) from error
            opened.append(run)

    def discard(self) -> None:
        """Closes what was opened."""
        self.group.close_runs(list(self.made.values()))

    # -- switch --------------------------------------------------------------------------------------------------------

    def switch(self) -> Layer | None:
        """Takes the new plan; returns what has to drain. Called between two turns.

        Raises StageError when a stage doesn't take its live settings, with those of all others back as they were.
        """
        self._reconfigure()
        layer = self._rewire()
        for run in self.made.values():
            run.context.let_go()
        self.group.plan = self.plan
        return layer

    def _reconfigure(self) -> None:
        done: list[tuple[StageRun, StageConfig]] = []
        for run, stage, config in self.live:
            before = run.stage.config
            try:
                run.stage.reconfigure(config)
            except Exception as error:
                for other, old in reversed(done):
                    other.stage.reconfigure(old)
                    other.stage.config = old
                raise stage_error(stage, error) from error
            run.stage.config = config
            done.append((run, before))
        for run, stage, _ in self.live:
            run.plan = stage

    def _rewire(self) -> Layer | None:
        group, names = self.group, [stage.name for stage in self.stages]
        kept = {name: run for name, run in group.by_name.items() if name in names and name not in self.made}
        kept |= self.reused
        for older in group.layers:
            older.runs = [run for run in older.runs if run not in self.reused.values()]
        now = {name: self.made[name] if name in self.made else kept[name] for name in names}
        taken = {request for layer in group.layers for request in layer.ids}
        layer = Layer(set(group.open_requests) - taken)
        layer.runs = [run for name, run in group.by_name.items() if now.get(name) is not run]
        for run in now.values():
            outputs = [self._output(run, edge, now) for edge in self.plan.edges if edge.source == run.name]
            if run.name in self.made:
                for output in outputs:
                    run.add_output(output)
            elif differing := set(outputs) ^ {edge for edges in run.outputs.values() for edge in edges}:
                if all(output.edge.arm == "b" for output in differing):
                    run.replace(outputs)  # nothing of arm B is open before it comes and when it goes
                    continue
                run.fork(layer, outputs)
                layer.is_forked = True
        for run in layer.runs:
            before = now.get(run.name)
            if before is not None and type(before.stage) is type(run.stage):
                before.stage.inherit(run.stage)
        group.replace_runs(now, layer, self.plan)
        if not layer.runs and not layer.is_forked:
            return None
        group.layers.append(layer)
        return layer

    def _output(self, run: StageRun, edge: EdgePlan, now: dict[str, StageRun]) -> FusedEdge | Outbox:
        """The way of an edge out of this run: the one that it has, if that ends where the plan says."""
        target = now.get(edge.target)
        if target is None:
            outbox = self.group.outbox_of(edge)
            outbox.reshape(edge)
            return outbox
        inbox = target.inboxes[edge.port]
        for have in (have for edges in run.outputs.values() for have in edges):
            if isinstance(have, FusedEdge) and have.edge.name == edge.name and have.ends_in(inbox):
                have.edge = edge
                return have
        return FusedEdge(edge, inbox)


def forked(
    parts: Iterable[tuple[Collection[str], Callable[[Message], None]]], rest: Callable[[Message], None]
) -> Callable[[Message], None]:
    """A put that sends each request's part of a message the way of those that it belongs to; what is left to `rest`."""
    ways = tuple(parts)

    def put(message: Message) -> None:
        for ids, old in ways:
            mine, left = split(message, ids)
            if mine is not None:
                old(mine)
            if left is None:
                return
            message = left
        rest(message)

    return put
