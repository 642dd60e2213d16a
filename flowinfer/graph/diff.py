"""The difference of two plans by stage, edge and setting, and how a running service would take each. Pure.

Settings say their class where they are declared (flowinfer.stage.setting). A stage is replaced *in place*, beside the
old one in its worker, when no message, memory or credit outlives a step in it; else its whole worker is replaced
beside the old one, unless that worker holds the service's door.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from flowinfer.graph.devices import count_gpus, missing
from flowinfer.graph.plan import API, EdgePlan, Plan, StagePlan, WorkerPlan
from flowinfer.stage import ChangeClass, Stage, change_class, ports
from flowinfer.units import format_share

ORDER: tuple[ChangeClass, ...] = ("live", "warm", "cold", "refused")
Loader = Callable[[StagePlan], type[Stage]]
ABSENT = "(absent)"
LOGGED = "for what is logged from then on"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One difference. path: as `--set` writes it.  how: what would happen, or why it can't.

    stages: those that are replaced in place.  workers: those whose instances are replaced beside the old ones.
    """

    path: str
    before: Any
    after: Any
    kind: ChangeClass
    how: str
    stages: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """All differences of two plans. kept: what a running service keeps until its next start, and why."""

    changes: tuple[Change, ...]
    kept: tuple[str, ...] = ()

    @property
    def kind(self) -> ChangeClass:
        """The heaviest class of all changes; live where there are none."""
        return max((change.kind for change in self.changes), key=ORDER.index, default="live")

    def stages(self) -> frozenset[str]:
        """Stages that are replaced in place."""
        return frozenset(name for change in self.changes for name in change.stages)

    def workers(self) -> frozenset[str]:
        """Workers whose instances are replaced beside the old ones."""
        return frozenset(name for change in self.changes for name in change.workers)


def compare(old: Plan, new: Plan, load: Loader, num_gpus: Callable[[], int] = count_gpus) -> Diff:
    """What differs in `new`, and how a service that runs `old` takes it. Loads stage classes, opens nothing.

    num_gpus: of the machine that the service runs on.
    """
    return _Comparison(old, new, load, num_gpus).diff()


def settled(old: Plan, new: Plan) -> Plan:
    """`new` with what a running service keeps until its next start: KV memory and threads that follow from replicas."""
    if not _is_rescaled(old, new):
        return new
    workers = {
        name: msgspec.structs.replace(worker, kv_bytes=old.workers[name].kv_bytes, threads=old.workers[name].threads)
        if name in old.workers
        else worker
        for name, worker in new.workers.items()
    }
    return msgspec.structs.replace(new, workers=workers)


def _is_rescaled(old: Plan, new: Plan) -> bool:
    return any(old.workers[name].replicas != new.workers[name].replicas for name in old.workers.keys() & new.workers)


class _Comparison:
    def __init__(self, old: Plan, new: Plan, load: Loader, num_gpus: Callable[[], int]) -> None:
        self.old, self.raw, self.new, self.load, self.num_gpus = old, new, settled(old, new), load, num_gpus

    def diff(self) -> Diff:
        parts = (
            self._experiment, self._stages, self._edges, self._workers, self._serve, self._network, self._kernels
        )  # fmt: skip
        return Diff(changes=tuple(change for part in parts for change in part()), kept=tuple(self._kept()))

    # -- stages --------------------------------------------------------------------------------------------------------

    def _stages(self) -> Iterator[Change]:
        for name in dict.fromkeys((*self.old.stages, *self.new.stages)):
            before, after = self.old.stages.get(name), self.new.stages.get(name)
            path = f"stages.{name}"
            if before is None or after is None:
                yield self._added_or_removed(path, name, before, after)
            elif before.worker != after.worker:
                how = "a stage that moves to another worker needs all of them started anew"
                yield Change(path=f"{path}.place", before=before.worker, after=after.worker, kind="cold", how=how)
            elif before.kind != after.kind:
                yield self._replaced(f"{path}.use", before.kind, after.kind, name)
            else:
                yield from self._settings(path, before, after)

    def _added_or_removed(self, path: str, name: str, before: StagePlan | None, after: StagePlan | None) -> Change:
        was, now = before.kind if before else ABSENT, after.kind if after else ABSENT
        stage: StagePlan = before or after  # type: ignore[assignment]
        if self._is_of_arm(stage.worker):
            how = f"in worker {stage.worker}, which only arm B has"
            return Change(path=path, before=was, after=now, kind="warm", how=how)
        reason = self._not_in_place(name)
        if reason:
            return Change(path=path, before=was, after=now, kind="cold", how=reason)
        word = "built and put on its edges" if after else "taken off its edges once it's empty"
        how = f"{word} inside worker {(after or before).worker}"  # type: ignore[union-attr]
        return Change(path=path, before=was, after=now, kind="warm", how=how, stages=(name,))

    def _is_of_arm(self, worker: str) -> bool:
        """True for a worker that comes or goes with arm B of an experiment, and that nothing else needs."""
        plans = [plan for plan in (self.old, self.new) if worker in plan.workers]
        return len(plans) == 1 and plans[0].experiment is not None and worker in plans[0].experiment.workers

    def _experiment(self) -> Iterator[Change]:
        """What arm B gets; that its stages come and go is told by them."""
        was, now = (
            plan.stages[API].config.get("experiment") if API in plan.stages else None for plan in (self.old, self.new)
        )
        if was == now:
            return
        how = "the door sends requests by it once all workers do"
        if now is None:
            how = "the door sends all requests to arm A, then what is open in arm B may end"
        yield Change(path="experiment", before=_arm_in_words(was), after=_arm_in_words(now), kind="live", how=how)

    def _settings(self, path: str, before: StagePlan, after: StagePlan) -> Iterator[Change]:
        cls = self.load(after)
        prefix = {True: "serve", False: f"{path}.with"}[after.name == API]
        for key in dict.fromkeys((*before.config, *after.config)):
            if before.config.get(key) == after.config.get(key) or (after.name == API and key == "experiment"):
                continue
            for leaf, was, now in _leaves(
                f"{prefix}.{key}", before.config.get(key, ABSENT), after.config.get(key, ABSENT)
            ):
                yield self._setting(cls, key, leaf, was, now, after.name)

    def _setting(self, cls: type[Stage], key: str, path: str, was: Any, now: Any, stage: str) -> Change:
        kind = change_class(cls.Config, key)
        if kind == "live" and cls.reconfigure is not Stage.reconfigure:
            return Change(path=path, before=was, after=now, kind="live", how="between two steps")
        if kind == "cold":
            how = "doesn't fit beside what runs"
            return Change(path=path, before=was, after=now, kind="cold", how=how)
        if kind == "refused":
            return Change(path=path, before=was, after=now, kind="refused", how="only a new start brings it")
        return self._replaced(path, was, now, stage)

    def _replaced(self, path: str, was: Any, now: Any, stage: str) -> Change:
        """The stage is replaced in place, or its worker beside the old one, or everything."""
        reason = self._not_in_place(stage)
        worker = self.new.stages[stage].worker
        if not reason:
            how = f"a new {stage} beside the old one in worker {worker}, which ends its own requests"
            return Change(path=path, before=was, after=now, kind="warm", how=how, stages=(stage,))
        if worker != self._door:
            how = f"a new worker {worker} beside the old one, which ends its own requests"
            return Change(path=path, before=was, after=now, kind="warm", how=how, workers=(worker,))
        return Change(path=path, before=was, after=now, kind="cold", how=reason)

    @property
    def _door(self) -> str:
        return self.new.stages[API].worker if API in self.new.stages else ""

    def _not_in_place(self, name: str) -> str:
        """Why this stage can't be built beside its predecessor in one worker, "" if it can."""
        for plan in (self.old, self.new):
            if name in plan.stages and (reason := self._not_shareable(plan, name)):
                return reason
        for edge in self._new_edges_of(name):
            if not edge.fused and edge.arm != "b":
                return f"edge {edge.name} between workers is new or gone"
        return ""

    def _not_shareable(self, plan: Plan, name: str) -> str:
        stage = plan.stages[name]
        if name == API:
            return "the door of the service can't stand beside itself"
        cls = self.load(stage)
        contract = cls.Config.model_validate(stage.config).contract()
        inputs, outputs = ports(cls)
        if contract.held or contract.reserves or contract.units or (contract.model and contract.model.weights):
            return f"{name} holds memory or credit of its requests"
        if any(port.message.local for port in (*inputs, *outputs)):
            return f"{name} shares the device's batch with its neighbours"
        if stage.worker != self._door and any("id" not in port.message.__struct_fields__ for port in inputs):
            return f"{name} gets whole steps in a worker that doesn't know their requests"
        return ""

    def _new_edges_of(self, name: str) -> list[EdgePlan]:
        """Edges of this stage that only one of the plans has."""
        old, new = ({edge.name: edge for edge in plan.edges} for plan in (self.old, self.new))
        lone = old.keys() ^ new.keys()
        return [
            edge
            for edge in (*self.old.edges, *self.new.edges)
            if edge.name in lone and name in (edge.source, edge.target)
        ]

    # -- edges, workers, the rest --------------------------------------------------------------------------------------

    def _edges(self) -> Iterator[Change]:
        old, new = ({edge.name: edge for edge in plan.edges} for plan in (self.old, self.new))
        for name in dict.fromkeys((*old, *new)):
            before, after = old.get(name), new.get(name)
            path = f'edges."{name}"'
            if before is None or after is None:
                edge: EdgePlan = before or after  # type: ignore[assignment]
                kind, how = self._lone_edge(edge)
                was, now = (edge.message, ABSENT) if before else (ABSENT, edge.message)
                yield Change(path=path, before=was, after=now, kind=kind, how=how)
            else:
                yield from self._edge(path, before, after)

    def _lone_edge(self, edge: EdgePlan) -> tuple[ChangeClass, str]:
        if edge.arm == "b":  # nothing of arm B is open before it comes and when it goes
            return "warm", "of arm B, beside those that there are"
        if not edge.fused:
            return "cold", "a queue between workers is opened when they start"
        for end in (edge.source, edge.target):
            for plan in (self.old, self.new):
                if end in plan.stages and end != API and (reason := self._not_shareable(plan, end)):
                    return "cold", reason
        return "warm", "switched between two turns of the worker"

    def _edge(self, path: str, before: EdgePlan, after: EdgePlan) -> Iterator[Change]:
        for key in ("dispatch", "key", "lanes"):
            was, now = getattr(before, key), getattr(after, key)
            if was != now:
                how = "what waits is sorted anew between two turns"
                yield Change(path=f"{path}.{key}", before=was, after=now, kind="live", how=how)
        for key in ("message", "unit", "back"):
            was, now = getattr(before, key), getattr(after, key)
            if was != now:
                how = "queues between workers keep their shape while they run"
                yield Change(path=f"{path}.{key}", before=was, after=now, kind="cold", how=how)
        if before.capacity != after.capacity:
            by_blocks = after.unit == "blocks"
            how = "the consumer offers its blocks when it starts" if by_blocks else "credit grows or shrinks in place"
            kind: ChangeClass = "cold" if by_blocks else "live"
            yield Change(path=f"{path}.capacity", before=before.capacity, after=after.capacity, kind=kind, how=how)

    def _workers(self) -> Iterator[Change]:
        for name in dict.fromkeys((*self.old.workers, *self.new.workers)):
            before, after = self.old.workers.get(name), self.new.workers.get(name)
            path = f"workers.{name}"
            if after is not None and (before is None or before.device != after.device):
                yield from self._missing_device(f"{path}.device", before, after)
            if before is None or after is None:
                was, now = (ABSENT, "a worker") if before is None else ("a worker", ABSENT)
                if self._is_of_arm(name):
                    how = "of arm B, beside the others" if before is None else "goes once arm B is empty"
                    yield Change(path=path, before=was, after=now, kind="warm", how=how)
                    continue
                yield Change(path=path, before=was, after=now, kind="cold", how="all workers are started anew")
            else:
                yield from self._worker(path, before, after)

    def _missing_device(self, path: str, before: WorkerPlan | None, after: WorkerPlan) -> Iterator[Change]:
        if reason := missing(after.device, self.num_gpus):
            was = before.device if before else ABSENT
            yield Change(path=path, before=was, after=after.device, kind="refused", how=reason)

    def _worker(self, path: str, before: WorkerPlan, after: WorkerPlan) -> Iterator[Change]:
        if before.replicas != after.replicas:
            up = after.replicas > before.replicas
            how = (
                "a new instance starts, then joins" if up else "an instance gets nothing new, ends what it has, leaves"
            )
            yield Change(path=f"{path}.replicas", before=before.replicas, after=after.replicas, kind="warm", how=how)
        if before.log_level != after.log_level:
            was, now = before.log_level or "(as serve)", after.log_level or "(as serve)"
            yield Change(path=f"{path}.log_level", before=was, after=now, kind="live", how=LOGGED)
        how = "memory and threads are laid out at the start"
        for key, word in (("device", "device"), ("threads", "threads"), ("kv_bytes", "kv_memory")):
            was, now = getattr(before, key), getattr(after, key)
            if was != now and not (key == "device" and missing(now, self.num_gpus)):
                yield Change(path=f"{path}.{word}", before=was, after=now, kind="cold", how=how)

    def _serve(self) -> Iterator[Change]:
        """What the api's own settings don't show."""
        for key in ("host", "port"):
            was, now = getattr(self.old.serve, key), getattr(self.new.serve, key)
            if was != now:
                how = "the listening socket is opened once; start the service anew"
                yield Change(path=f"serve.{key}", before=was, after=now, kind="refused", how=how)
        used = (("drain_timeout", "drain_timeout_s", "drain"), ("drain", "drain", "drain"))
        for key, name, by in (*used, ("stop_timeout", "stop_timeout_s", "stop")):
            was, now = getattr(self.old.serve, name), getattr(self.new.serve, name)
            if was != now:
                yield Change(path=f"serve.{key}", before=was, after=now, kind="live", how=f"used by the next {by}")
        was, now = self.old.serve.log_level, self.new.serve.log_level
        if was != now:
            yield Change(path="serve.log_level", before=was, after=now, kind="live", how=LOGGED)

    def _network(self) -> Iterator[Change]:
        if self.old.network != self.new.network:
            how = "how workers reach each other is fixed while they run; start the service anew"
            before, after = self.old.network.transport, self.new.network.transport
            yield Change(path="network", before=before, after=after, kind="refused", how=how)

    def _kernels(self) -> Iterator[Change]:
        was, now = bool(self.old.kernels), bool(self.new.kernels)
        if was != now:
            how = "blocks of both kinds of arithmetic would stand side by side; start the service anew"
            yield Change(path="batch_invariant", before=was, after=now, kind="refused", how=how)

    def _kept(self) -> Iterator[str]:
        for name in self.new.workers.keys() & self.raw.workers:
            raw, kept = self.raw.workers[name], self.new.workers[name]
            if (raw.kv_bytes, raw.threads) != (kept.kv_bytes, kept.threads):
                yield f"workers.{name}: KV memory and threads follow the replicas only at the next start"


def _arm_in_words(settings: Any) -> str:
    """`no-drafts: split 10%`."""
    return ABSENT if settings is None else f"{settings['name']}: {settings['mode']} {format_share(settings['share'])}"


def _leaves(path: str, was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """The members of two maps that differ, each by its path; anything else as a whole."""
    was, now = ({} if side is ABSENT and isinstance(other, dict) else side for side, other in ((was, now), (now, was)))
    if not (isinstance(was, dict) and isinstance(now, dict)):
        yield path, was, now
        return
    for key in dict.fromkeys((*was, *now)):
        if was.get(key, ABSENT) != now.get(key, ABSENT):
            yield from _leaves(f"{path}.{key}", was.get(key, ABSENT), now.get(key, ABSENT))


def is_live(cls: type[Stage], before: StagePlan, after: StagePlan) -> bool:
    """True when a stage of this class can take the change between two steps, or there is none."""
    if before.kind != after.kind:
        return False
    differing = [key for key in before.config.keys() | after.config if before.config.get(key) != after.config.get(key)]
    takes_them = cls.reconfigure is not Stage.reconfigure
    return all(takes_them and change_class(cls.Config, key) == "live" for key in differing)
