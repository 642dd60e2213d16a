"""Changes a running service by the supervisor's hand: prepare, verify, switch, drain, probation, retire.

Until the switch nothing that runs is touched, so whatever fails before leaves the service as it was. From the switch on
a failure leads back to the plan before, as a change of its own. A change that doesn't fit beside what runs pauses the
service (rewire/restart.py). Every step is in the journal before the next one begins.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec

from flowinfer.errors import FlowInferError
from flowinfer.graph.diff import Diff, compare, settled
from flowinfer.graph.plan import API, Plan
from flowinfer.message import Breach, Event, Stats
from flowinfer.runtime.child import Child
from flowinfer.runtime.events import (
    Abandon,
    Leavers,
    Prepare,
    Prepared,
    Switch,
    Switched,
    Trouble,
)
from flowinfer.runtime.loading import LoadStage
from flowinfer.runtime.rewire.experiment import close_arm, open_arm
from flowinfer.runtime.rewire.journal import Journal
from flowinfer.runtime.rewire.protocol import Manner, Reply, Source
from flowinfer.runtime.rewire.restart import restart
from flowinfer.runtime.rewire.settle import Reverted, Settling, switched
from flowinfer.runtime.rewire.vitals import Reading, Vitals, read
from flowinfer.runtime.state import State, Underway
from flowinfer.spec.drain import parse_drain, total_s

if TYPE_CHECKING:
    from flowinfer.runtime.supervisor import Supervisor

DEFAULT = Manner()
PREPARE_S = 1_800.0  # for new stages to open, which may load a model
SWITCH_S = 60.0  # a worker may be in a long step
PHASES = ("begin", "prepare", "verify", "switch", "drain", "probation", "retire", "pause", "replace")
Tell = Callable[[str], None]
T = TypeVar("T", bound=Event)


class Refused(FlowInferError):
    """A change that isn't made; the service goes on as it was."""


class Controller:
    """Changes of one service, one at a time. `past`: the plans before, newest last, for `rollback`.

    underway: the change that is being made, as a controller that takes over has to know it.
    """

    def __init__(self, supervisor: Supervisor, source: Source, journal: Journal) -> None:
        self.supervisor, self.source, self.journal = supervisor, source, journal
        self.past: list[tuple[Plan, Source]] = []
        self.underway: Underway | None = None
        self.manner = Manner()
        self.vitals = Vitals()
        self.recalled = ""  # why the change under way shall be taken back
        self._settling: Settling | None = None
        self._number = 0
        self._news: list[tuple[str, int, Event]] = []  # instance, generation, what it said
        self.breaches: list[Breach] = []  # of experiments that have to stop
        self._busy = False
        self._tell: Tell = lambda line: None

    # -- what the supervisor hands on ----------------------------------------------------------------------------------

    def note(self, child: Child, event: Event) -> None:
        """A worker's answer to a step of a change."""
        if isinstance(event, Breach):
            self.breaches.append(event)
            return
        if isinstance(event, Stats):
            self.vitals.add(read(event.samples, time.monotonic()))
            return
        self._news.append((child.name, child.generation, event))

    @property
    def busy(self) -> bool:
        return self._busy

    @property
    def number(self) -> int:
        """Of the last change."""
        return self._number

    def restore(self, left: State) -> None:
        """Knows what a predecessor knew."""
        self.past, self._number, self.underway = list(left.past), left.number, left.change
        self._busy = left.change is not None

    # -- what people ask -----------------------------------------------------------------------------------------------

    def plan(self, new: Plan) -> Diff:
        """What this plan would change. Raises FlowInferError when a stage can't be found."""
        return compare(self.supervisor.plan, new, LoadStage(Path(new.file).parent, new.allow_local))

    def recall(self) -> Reply:
        """Takes back the change under way, to the old side that is still warm. Raises Refused before its switch."""
        if self._settling is None:
            raise Refused("The change under way hasn't switched yet.", help="Wait for it: flowinfer history.")
        self.recalled = "somebody asked for it"
        return Reply(last=True, text="The change under way is taken back: flowinfer history.")

    def rollback(self, tell: Tell, *, manner: Manner = DEFAULT) -> None:
        """Back to the plan before the last change. Raises Refused when there is none."""
        if not self.past:
            raise Refused("There is no change to take back.")
        plan, source = self.past[-1]
        self.apply(plan, source, tell, note="rollback", manner=manner)

    def apply(
        self,
        new: Plan,
        source: Source,
        tell: Tell,
        *,
        renew: Collection[str] = (),
        note: str = "",
        manner: Manner = DEFAULT,
    ) -> None:
        """Makes the service run `new`. Raises Refused with nothing changed, or Reverted once it's back."""
        if self._busy:
            raise Refused("Another change is under way.", help="Wait for it: flowinfer history.")
        serve = self.supervisor.plan.serve
        parse_drain(manner.drain or serve.drain, serve.drain_timeout_s)  # refused before anything is done
        self._busy, self._tell, self.manner = True, tell, manner
        try:
            self._apply(new, source, renew, note)
        except FlowInferError:
            self._over()
            raise
        self._over()

    def _over(self) -> None:
        """No change is under way. Not said when a bug ended it: then the next controller has to bring it to an end."""
        self._busy, self.underway = False, None
        self.supervisor.save()

    def _apply(self, new: Plan, source: Source, renew: Collection[str], note: str) -> None:
        old, diff = self.supervisor.plan, self.plan(new)
        self._number += 1
        self._news.clear()
        target = msgspec.structs.replace(settled(old, new), epoch=old.epoch + 1)
        self.underway = change = Underway(
            number=self._number,
            kind="restart" if diff.kind == "cold" else "beside",
            old=old,
            new=target,
            source=source,
            note=note,
            manner=self.manner,
            counts=bool(diff.changes),
        )
        self._step("begin", note or f"{len(diff.changes)} changes, {diff.kind}")
        try:
            self._refuse(diff, renew)
            if diff.kind == "cold":
                restart(self, target)
            else:
                self._beside(old, target, diff, renew)
        except Reverted as error:
            self._step("failed", error.message)
            raise
        except FlowInferError as error:
            self._step("refused", error.message)
            raise
        self.finish(change)

    def finish(self, change: Underway) -> None:
        """The change is made."""
        if change.counts:
            if change.note == "rollback":
                del self.past[-1:]  # the plan that is back
            else:
                self.past.append((change.old, self.source))
            self.source = change.source
        self._step("done", f"epoch {self.supervisor.plan.epoch}")
        open_arm(self)

    def _refuse(self, diff: Diff, renew: Collection[str]) -> None:
        for change in diff.changes:
            if change.kind == "refused":
                raise Refused(f"{change.path}: {change.how}.")
        if not diff.changes and not renew:
            raise Refused("Nothing differs from what runs.")
        for name in renew:
            if name not in self.supervisor.plan.stages or name == API:
                raise Refused(f"There is no stage {name!r} to build anew.")

    # -- beside what runs ----------------------------------------------------------------------------------------------

    def _beside(self, old: Plan, new: Plan, diff: Diff, renew: Collection[str]) -> None:
        supervisor, replaced = self.supervisor, diff.workers() | self._workers_of(renew, diff)
        leaving = supervisor.leavers(new, replaced)
        staying = [child for child in supervisor.children.values() if child.name not in leaving]
        self._note_who(leaving)
        born = supervisor.give_birth(new, leaving)
        self._note_who(leaving, born)
        before = self.vitals.before()
        try:
            self._prepare(old, new, leaving, born, [name for name in renew if new.stages[name].worker not in replaced])
            self._step("verify", f"{len(staying)} workers and {len(born)} new ones are ready for epoch {new.epoch}")
        except FlowInferError:
            supervisor.tell_all(Abandon(number=self._number))
            supervisor.end(born)
            raise
        try:
            self._switch(new, leaving, born)
            settling = self._settle(leaving, before)
        except Reverted as error:
            self._revert(old, error, leaving, born)
        settling.retire()

    def _settle(self, leaving: Collection[str], before: Reading | None, *, watches: bool = True) -> Settling:
        """Drain and probation, which what goes back has none of. Raises Reverted."""
        self.recalled, self._settling = "", Settling(self, leaving, before, watches=watches)
        try:
            self._settling.drain(switched(self))
            if watches:
                self._settling.probation()
            return self._settling
        finally:
            self._settling = None

    def _note_who(self, leaving: Collection[str], born: Iterable[Child] = ()) -> None:
        if self.underway is not None:
            self.underway.leaving, self.underway.born = tuple(leaving), tuple(child.name for child in born)

    def _workers_of(self, renew: Iterable[str], diff: Diff) -> frozenset[str]:
        """Workers that are replaced for the sake of stages that can't be built beside themselves."""
        plan, found = self.supervisor.plan, set()
        for name in renew:
            how = compare_renewed(plan, name, self.supervisor)
            if how:
                found.add(plan.stages[name].worker)
        return frozenset(found)

    def _prepare(
        self,
        old: Plan,
        new: Plan,
        leaving: Collection[str],
        born: list[Child],
        renew: Iterable[str],
        *,
        back: bool = False,
    ) -> None:
        supervisor = self.supervisor
        self._step("prepare", ", ".join(child.name for child in born) or "inside the workers")
        asked = {child.name: child.generation for child in supervisor.children.values() if child.state == "ready"}
        missing = [c.name for c in supervisor.children.values() if c.name not in asked and c not in born]
        if missing:
            raise Refused(f"Worker {missing[0]} isn't ready.", help="Try again when it's back.")
        for name in asked:
            plan = _unchanged(old, new, supervisor.children[name].worker) if name in leaving else new
            event = Prepare(number=self._number, plan=msgspec.json.encode(plan), renew=tuple(renew), back=back)
            supervisor.channel.send_event(name, event)
        if not self.waited(lambda: self._prepared(asked, born), PREPARE_S):
            raise Refused(f"The workers weren't ready within {PREPARE_S:g} s.")

    def _prepared(self, asked: dict[str, int], born: list[Child]) -> bool:
        for name, generation in asked.items():
            child = self.supervisor.children.get(name)
            if child is None or child.generation != generation or child.state != "ready":
                raise Refused(f"Worker {name} died meanwhile.")
        for child in born:
            if child.failed is not None:
                raise Refused(child.failed.error, help=child.failed.help)
        for error in (answer.error for answer in self.answers(Prepared).values() if answer.error):
            raise Refused(error)
        return self.answers(Prepared).keys() >= asked.keys() and all(child.state == "ready" for child in born)

    def _switch(self, new: Plan, leaving: Collection[str], born: list[Child], *, watches: bool = True) -> None:
        """watches: whether a stage that breaks takes the change back; what goes back leaves such a stage."""
        supervisor = self.supervisor
        serve = supervisor.plan.serve
        close_arm(self, new, total_s(parse_drain(self.manner.drain or serve.drain, serve.drain_timeout_s)))
        self._step("switch", f"new requests go by epoch {new.epoch}")
        asked = {c.name: c.generation for c in supervisor.children.values() if c.state == "ready" and c not in born}
        supervisor.take_plan(new, leaving)
        for name in asked:
            supervisor.channel.send_event(name, Switch(number=self._number, leaving=tuple(leaving)))
        supervisor.channel.raise_epoch(new.epoch)
        for child in born:
            supervisor.channel.send_event(child.name, Leavers(number=self._number, names=tuple(leaving)))
        supervisor.introduce(born)
        if not self.waited(lambda: self._switched(asked, watches), SWITCH_S):
            raise Reverted(f"not every worker switched within {SWITCH_S:g} s")
        open_arm(self)

    def _switched(self, asked: dict[str, int], watches: bool) -> bool:
        for _, event in self.said(Trouble) if watches else ():
            raise Reverted(f"stage {event.stage!r} broke: {event.error}")
        for error in (answer.error for answer in self.answers(Switched).values() if answer.error):
            raise Reverted(error)
        return all(self.has(Switched, name, generation) for name, generation in asked.items())

    def _revert(self, old: Plan, error: Reverted, gone: Collection[str] = (), come: Iterable[Child] = ()) -> NoReturn:
        """Back to the old plan by the same steps, as an epoch of its own; what it left is still there, warm.

        gone, come: the instances that left and came by the change that is taken back. Raises Reverted in the end.
        """
        self._step("rollback", error.message)
        supervisor = self.supervisor
        bad, back = supervisor.plan, msgspec.structs.replace(old, epoch=supervisor.plan.epoch + 1)
        self._number += 1
        self._news.clear()
        for name in gone:
            if name in supervisor.children:
                supervisor.children[name].leaving = False
        leaving = [child.name for child in come if child.name in supervisor.children]
        if not gone and not leaving:
            leaving = supervisor.leavers(back, compare(bad, back, supervisor.load).workers())
        if self.underway is not None:
            self.underway = msgspec.structs.replace(
                self.underway, number=self._number, kind="revert", old=bad, new=back, step="begin"
            )
        self._note_who(leaving)
        born = supervisor.give_birth(back, leaving)
        self._note_who(leaving, born)
        try:
            self._prepare(bad, back, leaving, born, (), back=True)
            self._switch(back, leaving, born, watches=False)
            settling = Settling(self, leaving, watches=False)
            settling.drain(switched(self))
            settling.retire()
        except FlowInferError as again:
            if self.underway is not None:
                self.underway.kind = "restart"
            self._step("rollback", f"not in place ({again.message}): all workers are started anew")
            restart(self, back)
        raise Reverted(f"Taken back: {error.message}", help="The service runs as before.")

    # -- after a controller's death ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def resumed(self, change: Underway) -> Iterator[None]:
        """Within it, the change that a predecessor died in is this one's."""
        self._busy, self._tell, self._number = True, self.supervisor.say, change.number
        self.manner = change.manner
        self._news.clear()
        try:
            yield
        except FlowInferError as error:
            self._step("failed", error.message)
        self._over()

    def complete(self, change: Underway, asked: Mapping[str, int]) -> None:
        """Goes on with a change that workers have switched to: `asked` are the old ones, by their generations."""
        supervisor = self.supervisor
        leaving = [name for name in change.leaving if name in supervisor.children]
        born = [supervisor.children[name] for name in change.born if name in supervisor.children]
        try:
            for child in born:
                if child.on_trial and child.state != "ready":
                    raise Reverted(f"worker {child.name} died meanwhile")
            for child in born:
                supervisor.channel.send_event(child.name, Leavers(number=change.number, names=tuple(leaving)))
            supervisor.introduce([child for child in born if child.state == "ready"])
            watches = change.kind != "revert"
            if not self.waited(lambda: self._switched(dict(asked), watches), SWITCH_S):
                raise Reverted(f"not every worker switched within {SWITCH_S:g} s")
            settling = self._settle(leaving, None, watches=watches)
        except Reverted as error:
            if change.kind == "revert":
                raise
            self._revert(change.old, error, leaving, born)
        settling.retire()
        if change.kind == "revert":
            raise Reverted("Taken back, by the controller that came after.")
        self.finish(change)

    def revert(self, change: Underway) -> None:
        """Takes back, once more, what `change` was taking back when its controller died. Raises Reverted."""
        children = self.supervisor.children
        come = [children[name] for name in change.leaving if name in children]
        self._revert(change.new, Reverted("it was being taken back when the controller died"), (), come)

    # -- waiting for workers -------------------------------------------------------------------------------------------

    def waited(self, claim: Callable[[], bool], limit_s: float) -> bool:
        """Keeps the service going until the claim holds; False when the time is over."""
        deadline = time.monotonic() + limit_s
        while not claim():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if self.supervisor.is_stopping:
                raise Refused("The service is being stopped.")
            self.supervisor.pump(min(0.1, left))
        return True

    def said(self, kind: type[T]) -> list[tuple[tuple[str, int], T]]:
        found = [((name, generation), event) for name, generation, event in self._news if isinstance(event, kind)]
        return [pair for pair in found if getattr(pair[1], "number", self._number) == self._number]

    def forget(self, kind: type[Event]) -> None:
        """What was said so far of this kind is old."""
        self._news = [
            (name, generation, event) for name, generation, event in self._news if not isinstance(event, kind)
        ]

    def answers(self, kind: type[T]) -> dict[str, T]:
        return {name: event for (name, _), event in self.said(kind)}

    def waited_for(self, kind: type[Event], name: str, generation: int, limit_s: float) -> bool:
        """Keeps the service going until this instance has said so, or is gone; False when the time is over."""
        return self.waited(lambda: self.has(kind, name, generation), limit_s)

    def has(self, kind: type[Event], name: str, generation: int) -> bool:
        """True when this instance said so, or is gone: its successor starts with the new plan."""
        child = self.supervisor.children.get(name)
        if child is None or child.generation != generation or child.state == "down":
            return True
        return any(who == (name, generation) for who, _ in self.said(kind))

    def _step(self, step: str, text: str = "") -> None:
        if trouble := self.journal.try_write(self._number, self.supervisor.plan.epoch, step, text):
            if step == "begin":  # one that has begun goes on
                raise Refused(trouble, help="Make room there, then change the service.")
            self._tell(trouble)
        if self.underway is not None and step in PHASES:
            self.underway.step = step
            self.supervisor.save()
        self._tell(f"{step:<10} {text}")

    def step(self, step: str, text: str = "") -> None:
        """Writes a step into the journal and tells it."""
        self._step(step, text)


def compare_renewed(plan: Plan, name: str, supervisor: Supervisor) -> str:
    """Why this stage can't be built beside itself in its worker, "" if it can."""
    stage = plan.stages[name]
    other = msgspec.structs.replace(stage, kind=f"{stage.kind} ")
    changed = msgspec.structs.replace(plan, stages=plan.stages | {name: other})
    diff = compare(plan, changed, lambda found: supervisor.load(plan.stages[found.name]))
    (change,) = diff.changes
    if change.kind == "cold":
        raise Refused(f"Stage {name!r} can't be built anew while the service runs: {change.how}.")
    return "" if change.stages else change.how


def _unchanged(old: Plan, new: Plan, worker: str) -> Plan:
    """The new plan for a worker that leaves: its own stages stay as they are, with all that they are connected to."""
    own = {name: old.stages[name] for name in old.workers[worker].stages}
    names = {edge.name for edge in new.edges}
    edges = [edge for edge in old.edges if edge.name not in names and {edge.source, edge.target} & own.keys()]
    ends = {end: old.stages[end] for edge in edges for end in (edge.source, edge.target)}
    return msgspec.structs.replace(
        new,
        stages=ends | new.stages | own,
        edges=(*new.edges, *edges),
        workers=old.workers | new.workers | {worker: old.workers[worker]},
    )
