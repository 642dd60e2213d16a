"""A worker among its peers: frames it refuses, requests it announces, credit it returns, peers that die."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowinfer.channel import Channel, Keys
from flowinfer.codec import Header
from flowinfer.errors import TransportError
from flowinfer.graph.plan import EdgePlan, Plan, StagePlan, WorkerPlan
from flowinfer.message import (
    Cancel,
    Credit,
    Ended,
    Event,
    Failure,
    KVData,
    LeaseQuery,
    LeaseReport,
    Message,
    Moved,
    Prompt,
    Sampling,
    WorkerDown,
    WorkerUp,
)
from flowinfer.runtime.clock import FakeClock
from flowinfer.runtime.events import Probe
from flowinfer.runtime.group import GRACE_S, Host
from flowinfer.runtime.inbox import BACK_AFTER_S
from flowinfer.runtime.worker import Worker
from flowinfer.stage import Contract, Stage, StageConfig


class Keeper(Stage):
    """Holds what it gets."""

    class Config(StageConfig):
        def contract(self) -> Contract:
            return Contract(held=frozenset({"prompts"}))

    listens = (WorkerDown, KVData)

    def open(self) -> None:
        self.kept: list[str] = []
        self.events: list[Event] = []

    def step(self, prompts: list[Prompt]) -> None:
        self.kept += [prompt.id for prompt in prompts]

    def observe(self, event: Event) -> None:
        self.events.append(event)


class Taker(Keeper):
    """The same without holding credit."""

    Config = StageConfig


class Peer:
    """The other workers and the supervisor: a channel that remembers what it is told."""

    def __init__(self, name: str, folder: Path) -> None:
        self.channel = Channel(name)
        self.endpoints = self.channel.bind_ipc(folder)

    def told(self, kind: type[Event], wait_s: float = 5.0) -> list[Any]:
        """The next events of this kind; waits for the first."""
        for _ in range(50):
            events, _ = self.channel.poll(wait_s)
            found = [event for _, group in events for event in group if isinstance(event, kind)]
            if found or not wait_s:
                return found
        raise AssertionError(f"no {kind.__name__} came")

    def silent(self) -> bool:
        events, data = self.channel.poll(0.02)
        return not events and not data


def plan_of(kind: str, capacity: int = 8) -> Plan:
    return Plan(
        name="test",
        digest="",
        file="pipe.yaml",
        stages={
            "source": StagePlan(name="source", kind="source", config={}, worker="front"),
            "sink": StagePlan(name="sink", kind=kind, config={}, worker="back"),
        },
        edges=(
            EdgePlan(
                name="source -> sink",
                source="source",
                target="sink",
                message="Prompt",
                port="prompts",
                capacity=capacity,
            ),
        ),
        workers={
            "front": WorkerPlan(name="front", stages=("source",)),
            "back": WorkerPlan(name="back", stages=("sink",)),
        },
    )


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer("front.0", tmp_path)
    yield peer
    peer.channel.close()


Make = Callable[..., Worker]


@pytest.fixture
def make(tmp_path: Path, clock: FakeClock, front: Peer) -> Iterator[Make]:
    """Makes the worker back.0, connected to front.0, with its opening grants taken."""
    made: list[Worker] = []

    def no_arena(layout: Any) -> Any:
        raise NotImplementedError

    def begin(cls: type[Stage] = Keeper, **settings: Any) -> Worker:
        channel = Channel("back.0")
        endpoints = channel.bind_ipc(tmp_path)
        worker = Worker(plan_of("sink", **settings), "back", Host(no_arena), lambda _: cls, channel, clock=clock)
        worker.open()
        made.append(worker)
        data, control = front.endpoints
        worker.handle(WorkerUp(worker="front.0", generation=1, data=data, control=control))
        front.channel.connect("back.0", 1, endpoints)
        return worker

    yield begin
    for worker in made:
        worker.channel.close()


def prompts(*ids: str) -> list[Message]:
    return [Prompt(id=request, tokens=np.ones(2, np.int32), sampling=Sampling()) for request in ids]


def frame(*ids: str, generation: int = 1, epoch: int = 1, cost: int = 1) -> list[tuple[Header, list[Message]]]:
    return [(Header("Prompt", "front.0", generation, epoch, "source -> sink", "", cost), prompts(*ids))]


def stage(worker: Worker) -> Any:
    return worker.by_name["sink"].stage


def test_a_consumer_grants_its_capacity_to_a_new_producer(make: Make, front: Peer) -> None:
    make(capacity=8)
    (credit,) = front.told(Credit)
    assert (credit.edge, credit.lane, credit.amount) == ("source -> sink", "", 8)


def test_a_stage_that_knows_its_capacity_raises_the_grant(make: Make, front: Peer) -> None:
    worker = make()
    front.told(Credit)
    stage(worker).ctx.offer("prompts", 100)
    assert front.told(Credit)[0].amount == 100


def test_requests_that_arrive_are_announced_to_the_front(make: Make, front: Peer) -> None:
    worker = make()
    front.told(Credit)
    worker._take_data(frame("r1", "r2"))
    assert front.told(Moved) == [Moved(ids=["r1", "r2"], worker="back.0", generation=1, hops=[1, 1])]


def test_credit_of_a_held_port_comes_back_with_its_amount_when_the_stage_gives_it_back(make: Make, front: Peer) -> None:
    worker = make()
    front.told(Credit)
    worker._take_data(frame("r1", cost=5))
    worker.turn()
    worker._return_credit()
    front.told(Moved)
    assert front.silent()
    stage(worker).ctx.give_back("prompts", "r1")
    worker._return_credit()
    (credit,) = front.told(Credit)
    assert (credit.amount, credit.ids) == (5, ["r1"])


def test_credit_of_a_common_port_comes_back_by_itself(make: Make, front: Peer, clock: FakeClock) -> None:
    worker = make(Taker, capacity=100)
    front.told(Credit)
    worker._take_data(frame("r1", "r2"))
    worker.turn()
    front.told(Moved)
    clock.advance(BACK_AFTER_S)
    worker._return_credit()
    assert front.told(Credit)[0].amount == 2


def test_messages_of_closed_requests_are_refused_and_their_credit_returns(make: Make, front: Peer) -> None:
    worker = make(capacity=2)
    front.told(Credit)
    worker.handle(Ended(ids=["r1"]))
    worker._take_data(frame("r1"))
    worker.turn()
    worker._return_credit()
    assert stage(worker).kept == [] and worker.num_late == {"closed": 1}
    assert front.told(Credit)[0].amount == 1


def test_credit_that_a_stage_forgot_is_reclaimed_after_the_end(make: Make, front: Peer, clock: FakeClock) -> None:
    worker = make(capacity=2)
    front.told(Credit)
    worker._take_data(frame("r1"))
    worker.turn()
    front.told(Moved)
    worker.handle(Cancel(ids=["r1"]))
    clock.advance(GRACE_S)
    worker.turn()
    worker._return_credit()
    assert worker.num_reclaimed == 1 and front.told(Credit)[0].amount == 1


@pytest.mark.parametrize(("header", "reason"), [({"generation": 1}, "generation"), ({"epoch": 7}, "epoch")])
def test_frames_of_the_dead_and_of_other_epochs_are_refused(make: Make, header: dict[str, int], reason: str) -> None:
    worker = make()
    worker.handle(WorkerDown(worker="front.0", generation=1))
    worker._take_data(frame("r1", **({"generation": 2} | header)))
    worker.turn()
    assert stage(worker).kept == [] and worker.num_late == {reason: 1}


def test_the_death_of_the_front_cancels_everything(make: Make) -> None:
    worker = make()
    worker._take_data(frame("r1"))
    worker.handle(WorkerDown(worker="front.0", generation=1))
    assert "r1" in worker.closed and not worker.open_requests
    assert isinstance(stage(worker).events[-1], WorkerDown)


def test_malformed_frames_are_counted_and_the_next_is_read(make: Make, front: Peer) -> None:
    worker = make()
    front.channel.send_event("back.0", Ended(ids=["warm-up"]))  # opens the connection
    worker.channel.poll(5.0)
    peer = front.channel._peers["back.0"]
    peer.control.send_multipart([b"\x01\x00junk", b"more"])
    peer.control.send(b"")
    front.channel.send_event("back.0", Ended(ids=["r1"]))
    seen: list[Message] = []
    while not seen:
        seen = [event for _, group in worker.channel.poll(5.0)[0] for event in group]
    assert seen == [Ended(ids=["r1"])] and worker.channel.num_malformed >= 2


def test_bulk_events_travel_with_the_data(make: Make, front: Peer) -> None:
    worker = make()
    block = np.arange(100_000, dtype=np.uint8)
    front.channel.send_event("back.0", KVData(id="r1", ticket=1, index=3, layout="", data=block, check=0))
    events, data = worker.channel.poll(5.0)
    assert events == [] and len(data) == 1
    worker._take_data(data)
    (event,) = stage(worker).events
    assert event.index == 3 and (event.data == block).all()


def test_a_worker_answers_a_lease_query_even_without_leases(make: Make, tmp_path: Path) -> None:
    worker = make()
    supervisor = Peer("supervisor", tmp_path)
    worker.channel.connect("supervisor", 1, supervisor.endpoints)
    worker.handle(LeaseQuery(owner="prefill.0"))
    assert supervisor.told(LeaseReport) == [LeaseReport(owner="prefill.0", final=True)]
    supervisor.channel.close()


class Giver(Stage):
    """Gives what it is asked to."""

    def open(self) -> None:
        self.gives: list[Message] = []

    @property
    def busy(self) -> bool:
        return bool(self.gives)

    def step(self) -> Iterator[Prompt]:
        gives, self.gives = self.gives, []
        yield from gives  # type: ignore[misc]


@pytest.fixture
def giver(tmp_path: Path, clock: FakeClock) -> Iterator[Worker]:
    def no_arena(layout: Any) -> Any:
        raise NotImplementedError

    channel = Channel("front.0")
    channel.bind_ipc(tmp_path)
    worker = Worker(plan_of("sink"), "front", Host(no_arena), lambda _: Giver, channel, clock=clock)
    worker.open()
    yield worker
    channel.close()


def test_requests_under_way_to_a_worker_that_dies_fail_clearly(giver: Worker, tmp_path: Path) -> None:
    back = Peer("back.0", tmp_path)
    data, control = back.endpoints
    giver.handle(WorkerUp(worker="back.0", generation=1, data=data, control=control))
    giver._take_credit(Header("Credit", "back.0", 1), Credit(edge="source -> sink", lane="", amount=8))
    giver.by_name["source"].stage.gives = prompts("r1", "r2")  # type: ignore[attr-defined]
    giver.turn()
    giver._take_credit(Header("Credit", "back.0", 1), Credit(edge="source -> sink", lane="", amount=1, ids=["r1"]))
    giver.handle(WorkerDown(worker="back.0", generation=1))
    failures = [event for event in giver._events if isinstance(event, Failure)]
    assert [(f.id, f.status, f.code) for f in failures] == [("r2", 503, "worker_died")]
    assert "back.0 died" in failures[0].message
    back.channel.close()


def test_curve_lets_in_who_has_the_key_and_nobody_else() -> None:
    import zmq

    ours, theirs = (Keys(*(part.decode() for part in zmq.curve_keypair())) for _ in range(2))
    server, friend, stranger = Channel("s.0", keys=ours), Channel("f.0", keys=ours), Channel("x.0", keys=theirs)
    endpoints = server.bind_tcp("127.0.0.1")
    stranger.connect("s.0", 1, endpoints)
    stranger.send_event("s.0", Ended(ids=["bad"]))
    friend.connect("s.0", 1, endpoints)
    friend.send_event("s.0", Ended(ids=["good"]))
    events, _ = server.poll(10.0)
    later, _ = server.poll(0.1)
    assert [header.sender for header, _ in events + later] == ["f.0"]
    for channel in (server, friend, stranger):
        channel.close()


def test_tcp_off_loopback_needs_keys() -> None:
    channel = Channel("s.0")
    with pytest.raises(TransportError, match="open to the network"):
        channel.bind_tcp("0.0.0.0")
    channel.close()


def test_a_socket_path_that_is_too_long_says_so(tmp_path: Path) -> None:
    channel = Channel("x" * 120 + ".0")
    with pytest.raises(TransportError, match="longer than 107 bytes"):
        channel.bind_ipc(tmp_path)
    channel.close()


def test_a_probe_tells_how_long_its_message_waited_until_it_was_taken(
    make: Make, front: Peer, clock: FakeClock
) -> None:
    worker = make(Taker)
    front.told(Credit)
    worker._take_data(frame("r1"))
    began = clock.now() - 0.3  # at the sender, and on the way
    worker._take_data([(Header("Probe", "front.0", 1), [Probe(edge="source -> sink", began=began)])])
    clock.advance(0.7)
    worker.turn()
    waits = worker.by_name["sink"].inboxes["prompts"].waits
    samples = {(name, labels.get("le")): value for name, labels, value in waits.samples("source -> sink")}
    assert samples["edge_wait_seconds_count", None] == 1
    assert samples["edge_wait_seconds_sum", None] == pytest.approx(1.0)
    assert not worker.by_name["sink"].timed
