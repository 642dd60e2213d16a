"""Replays a recording through a part of its graph, without the rest: the same every time, whatever the machine does.

Messages that came into the part are put in one by one, each worked off before the next; time is that of the recording;
background work runs at once. So batches may differ from those of the recording, and answers are held against it by
request.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import msgspec
import networkx as nx

from flowinfer.codec import Codec
from flowinfer.codec import Header as FrameHeader
from flowinfer.errors import FlowInferError
from flowinfer.flow.file import EVENTS, Record, Recording
from flowinfer.graph.plan import API, EdgePlan, Plan
from flowinfer.message import Event, Message, Sequence, Text, Tokens, type_registry
from flowinfer.runtime.clock import FakeClock
from flowinfer.runtime.local import LocalService
from flowinfer.runtime.stage_run import Put


@dataclass(frozen=True)
class Part:
    """The stages of a graph that lie between two, the edges into them and those out of them."""

    plan: Plan
    stages: tuple[str, ...]
    inward: tuple[EdgePlan, ...]
    outward: tuple[EdgePlan, ...]


def cut(plan: Plan, first: str = "", last: str = "") -> Part:
    """The part from `first` to `last`, both in it; by default the whole graph but the api. Raises FlowInferError.

    A loop is never cut open: its messages stay in their worker and aren't recorded.
    """
    for name in (first, last):
        if name and (name not in plan.stages or name == API):
            raise FlowInferError(f"There is no stage {name!r} to cut at.", help=f"Stages: {', '.join(_names(plan))}.")
    graph = nx.DiGraph((edge.source, edge.target) for edge in plan.edges if API not in (edge.source, edge.target))
    graph.add_nodes_from(_names(plan))
    behind = {first} | nx.descendants(graph, first) if first else set(graph)
    before = {last} | nx.ancestors(graph, last) if last else set(graph)
    stages = tuple(name for name in _names(plan) if name in behind & before)
    if not stages:
        raise FlowInferError(f"No way leads from {first!r} to {last!r}.")
    inside = [edge for edge in plan.edges if edge.source in stages and edge.target in stages]
    inward = tuple(edge for edge in plan.edges if edge.source not in stages and edge.target in stages)
    for edge in inward:
        if issubclass(type_registry[edge.message], Sequence):
            message = f"{edge.name} carries keys and values, which aren't recorded."
            raise FlowInferError(message, help="Begin at the stage that computes them, or before it.")
    outward = tuple(edge for edge in plan.edges if edge.source in stages and edge.target not in stages)
    kept = {name: plan.stages[name] for name in stages}
    return Part(msgspec.structs.replace(plan, stages=kept, edges=tuple(inside)), stages, inward, outward)


def _names(plan: Plan) -> list[str]:
    return [name for name in plan.stages if name != API]


class _Exit:
    """Stands where an edge leaves the part."""

    full = False

    def __init__(self, edge: EdgePlan, clock: FakeClock, out: list[Record]) -> None:
        self.edge = edge
        self.put: Put = lambda message: out.append(Record(clock.now(), edge.name, _copy(message)))


def replay(recording: Recording, part: Part, speed: float = inf) -> list[Record]:
    """What leaves the part when it is given what came into it. Raises StageError when a stage breaks for good.

    speed: 1 takes as long as the recording did, 10 a tenth of it, inf no more than the work itself. What is replayed is
    the same at every speed: the stages' clock shows the time of the recording.
    """
    began = time.perf_counter()
    clock, out = FakeClock(0.0), list[Record]()
    service = LocalService(part.plan, clock=clock, inline=True)
    for edge in part.outward:
        service.group.by_name[edge.source].add_output(_Exit(edge, clock, out))  # type: ignore[arg-type]
    inward = {edge.name: edge for edge in part.inward}
    with service:
        service.run_until_idle()
        for record in recording.records:
            if record.edge != EVENTS and record.edge not in inward:
                continue
            _keep_pace(began + record.at / speed)
            clock.advance(max(0.0, record.at - clock.now()))
            service.run_until_idle()  # timers that are due by now
            _put(service, inward, record)
            service.run_until_idle()
    return out


def _keep_pace(until: float) -> None:
    """Waits for a moment of perf_counter."""
    if (left := until - time.perf_counter()) > 0:
        time.sleep(left)


def _put(service: LocalService, inward: dict[str, EdgePlan], record: Record) -> None:
    message = _copy(record.message)
    if isinstance(message, Event):
        service.group.emit(message)
        return
    edge = inward[record.edge]
    request = getattr(message, "id", "")
    if request:
        service.group.open_requests[request] = 0
        service.group.learn_arm(message)
    service.group.by_name[edge.target].inboxes[edge.port].messages.append(message)


def _copy(message: Message) -> Message:
    """A copy that shares nothing: stages write into what they get."""
    if type(message).local:
        return message
    codec = Codec()
    return codec.decode(codec.encode(FrameHeader(type(message).__name__, "replay", 1), [message]))[1][0]


class Outcome(msgspec.Struct):
    """What a replay gave on one edge, by request: how many agree with the recording, and the first that doesn't."""

    edge: str
    num_same: int
    differing: list[str]
    first: tuple[str, str] | None = None  # recorded, replayed


def against(recording: Recording, out: list[Record], part: Part) -> list[Outcome]:
    """Holds a replay against what was recorded on the edges out of the part."""
    outcomes = []
    for edge in part.outward:
        before = by_request(record.message for record in recording.records if record.edge == edge.name)
        after = by_request(record.message for record in out if record.edge == edge.name)
        differing = [id for id in dict.fromkeys([*before, *after]) if before.get(id) != after.get(id)]
        first = (before.get(differing[0], "nothing"), after.get(differing[0], "nothing")) if differing else None
        outcomes.append(Outcome(edge.name, len(before.keys() & after.keys()) - len(differing), differing, first))
    return outcomes


def by_request(messages: Iterable[Message]) -> dict[str, str]:
    """What was said of each request, however it was batched: texts and tokens joined, other messages field by field."""
    found: dict[str, str] = {}
    for message in messages:
        for id, said in _said(message):
            found[id] = found.get(id, "") + said
    return found


def _said(message: Message) -> Iterable[tuple[str, str]]:
    if isinstance(message, Text):
        return [(p.id, p.text + (f"[{p.finish.reason}]" if p.finish else "")) for p in message.pieces]
    if isinstance(message, Tokens):
        ends = message.counts.cumsum()
        rows = [message.tokens[end - count : end] for end, count in zip(ends, message.counts, strict=True)]
        texts = ["".join(f" {token}" for token in row) for row in rows]
        finished = message.finished
        return [
            (id, text + (f" [{finished[i].reason}]" if i in finished else ""))
            for i, (id, text) in enumerate(zip(message.ids, texts, strict=True))
        ]
    fields = {
        name: getattr(message, name) for name in message.__struct_fields__ if name not in ("id", "kv", "deadline")
    }
    said = ", ".join(f"{name}: {_short(value)}" for name, value in fields.items())
    return [(getattr(message, "id", type(message).__name__), said)]


def _short(value: object) -> str:
    return str(value.tolist()) if hasattr(value, "tolist") else str(value)
