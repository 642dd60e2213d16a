"""Looks at edges: nothing is left when nobody looks, and a viewer can't hold the service up."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from flowinfer.graph.plan import EdgePlan, Plan, StagePlan, WorkerPlan
from flowinfer.message import Prompt, Sampling
from flowinfer.runtime import tap as tap_module
from flowinfer.runtime.clock import FakeClock
from flowinfer.runtime.events import TapAsk
from flowinfer.runtime.local import LocalService
from flowinfer.runtime.tap import LEASE_S, Taps, Told
from flowinfer.runtime.watch import unwatch, watch
from flowinfer.stage import Stage

EDGE = "source -> sink"


class Source(Stage):
    """Gives as many prompts as it is told to."""

    def open(self) -> None:
        self.count, self.given = 0, 0

    @property
    def busy(self) -> bool:
        return self.count > 0

    def step(self) -> list[Prompt]:
        count, self.count = self.count, 0
        ids = [f"r{self.given + number}" for number in range(count)]
        self.given += count
        return [Prompt(id=id, tokens=np.ones(3, np.int32), sampling=Sampling()) for id in ids]


class Sink(Stage):
    def open(self) -> None:
        self.num_taken = 0

    def step(self, prompts: list[Prompt]) -> list[Prompt]:
        self.num_taken += len(prompts)
        for prompt in prompts:
            prompt.tokens[:] = 0  # stages write into what they get
        return []


@pytest.fixture
def service() -> Iterator[LocalService]:
    names = ("source", "sink")
    plan = Plan(
        name="test",
        digest="",
        file="pipe.yaml",
        stages={name: StagePlan(name=name, kind=name, config={}, worker="front") for name in names},
        edges=(EdgePlan(name=EDGE, source="source", target="sink", message="Prompt", port="prompts", capacity=1_000),),
        workers={"front": WorkerPlan(name="front", stages=names)},
    )
    with LocalService(plan, stages={"source": Source, "sink": Sink}, clock=FakeClock()) as made:
        yield made


@pytest.fixture
def viewer(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "viewer"))
        listener.settimeout(0)
        yield listener


def send(service: LocalService, count: int) -> None:
    source: Any = service.stage("source")
    source.count = count
    service.run_until_idle()


def told(viewer: socket.socket) -> tuple[Told, list[dict[str, Any]]]:
    """The last counts, and all messages."""
    messages: list[dict[str, Any]] = []
    try:
        while True:
            last = msgspec.json.decode(viewer.recv(1 << 20), type=Told)
            messages += [msgspec.json.decode(raw) for raw in last.messages]
    except BlockingIOError:
        return last, messages


def put_of(service: LocalService) -> Any:
    (edge,) = service.group.by_name["source"].outputs["Prompt"]
    return edge.put


def advance(service: LocalService, seconds: float) -> None:
    clock: Any = service.group.clock
    clock.advance(seconds)
    service.run_until_idle()


def test_who_looks_sees_messages_as_they_were_and_leaves_nothing_behind(service: LocalService) -> None:
    before, sums = put_of(service), list[int]()
    look = lambda message: sums.append(int(message.tokens.sum()))  # noqa: E731
    other = lambda message: None  # noqa: E731
    assert watch(service.group, EDGE, look) and watch(service.group, EDGE, other) and watch(service.group, EDGE, look)
    assert not watch(service.group, "no -> edge", look)
    send(service, 2)
    unwatch(service.group, look)
    send(service, 1)
    unwatch(service.group, other)
    assert sums == [3, 3]
    assert put_of(service) == before
    send(service, 1)
    assert service.stage("sink").num_taken == 4  # type: ignore[attr-defined]


def test_a_tap_shows_what_matches_and_counts_what_passes(
    service: LocalService, viewer: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap_module, "SHARE", 1e6)  # all the time that it wants
    taps = Taps(service.group)
    taps.ask(TapAsk(edge=EDGE, to=viewer.getsockname(), where="request in ('r1', 'r3')"))
    send(service, 5)
    advance(service, 0.1)
    counts, messages = told(viewer)
    assert [message["id"] for message in messages] == ["r1", "r3"]
    assert messages[0]["tokens"]["max"] == 1, "not what the next stage wrote into it"
    assert (counts.num_seen, counts.num_matched, counts.num_lost) == (5, 2, 0)


def test_a_tap_takes_its_share_of_the_time_and_counts_what_it_didnt_look_at(
    service: LocalService, viewer: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap_module, "SHARE", 0.0)  # only the first burst
    taps = Taps(service.group)
    taps.ask(TapAsk(edge=EDGE, to=viewer.getsockname()))
    for _ in range(20):
        send(service, 500)
    taps.ask(TapAsk(edge=EDGE, to=viewer.getsockname()))
    counts, _ = told(viewer)
    assert counts.num_seen == 10_000
    assert counts.num_skipped > 5_000, "a summary takes 20 µs, the burst is 5 ms"
    assert counts.num_seen == counts.num_skipped + counts.num_matched


def test_a_viewer_that_does_not_read_loses_messages_and_holds_nobody_up(
    service: LocalService, viewer: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap_module, "SHARE", 1e6)
    taps = Taps(service.group)
    ask = TapAsk(edge=EDGE, to=viewer.getsockname())
    taps.ask(ask)
    for _ in range(40):
        send(service, 500)  # twice what waits at most
        advance(service, 0.1)
        taps.ask(ask)
    assert service.stage("sink").num_taken == 20_000  # type: ignore[attr-defined]
    told(viewer)  # what had room in the socket
    taps.ask(ask)
    counts, _ = told(viewer)
    assert counts.num_seen == counts.num_matched == 20_000
    assert 10_000 <= counts.num_lost < 20_000


def test_a_tap_ends_with_its_viewer_with_its_lease_and_when_it_is_told(
    service: LocalService, viewer: socket.socket, tmp_path: Path
) -> None:
    taps, before = Taps(service.group), put_of(service)
    ask = TapAsk(edge=EDGE, to=viewer.getsockname())
    taps.ask(ask)
    assert put_of(service) != before
    taps.ask(TapAsk(edge=EDGE, to=viewer.getsockname(), limit=0))
    assert put_of(service) == before
    taps.ask(ask)
    advance(service, LEASE_S / 2)
    taps.ask(ask)
    advance(service, LEASE_S / 2 + 0.1)
    assert put_of(service) != before, "it was renewed"
    advance(service, LEASE_S)
    assert put_of(service) == before
    (tmp_path / "viewer").unlink()
    taps.ask(ask)
    assert put_of(service) == before
