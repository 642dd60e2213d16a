"""The door in an experiment: whose requests go to arm B, that copies never matter to a client, that all is recorded."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowinfer.errors import RequestError
from flowinfer.experiment.policy import place
from flowinfer.experiment.record import read, records
from flowinfer.fakes import FakeContext
from flowinfer.message import (
    ArmsClosed,
    Breach,
    Call,
    Cancel,
    Failure,
    Finish,
    Moved,
    Piece,
    Sampling,
    Serving,
    SetArms,
    Text,
    WorkerDown,
    WorkerUp,
)
from flowinfer.serve.gateway import Gateway, GatewayConfig


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


class Door:
    """A gateway that is stepped by hand. ends: what each client got at last."""

    def __init__(self, mode: str, share: float, **more: Any) -> None:
        experiment = {"name": "x", "mode": mode, "share": share, "workers": ("decode-b",), **more}
        self.ctx = FakeContext("api")
        self.gateway = Gateway(GatewayConfig.model_validate({"experiment": experiment}), self.ctx)
        self.gateway.open()
        for worker in ("decode.0", "decode-b.0"):
            self.gateway.observe(WorkerUp(worker=worker, generation=1, data="", control=""))
        self.gateway.observe(Serving())
        self.ends: dict[str, list[Piece | RequestError]] = {}
        self.heard: dict[str, str] = {}

    def ask(self, id: str, session: str = "", **fields: Any) -> list[Call]:
        """The calls that a request becomes."""
        call = Call(id=id, sampling=Sampling(), prompt="hi", session=session or id, **fields)
        self.ends[id], self.heard[id] = [], ""
        self.gateway.submit(call, lambda got: self.hear(id, got))
        return list(self.gateway.step([]))

    def hear(self, id: str, got: Piece | RequestError) -> None:
        if isinstance(got, RequestError) or got.finish is not None:
            self.ends[id].append(got)
        self.heard[id] += got.text if isinstance(got, Piece) else ""

    def say(self, id: str, text: str = "", finish: bool = False, **more: Any) -> None:
        last = Finish(reason="stop", completion_tokens=3, **more) if finish else None
        list(self.gateway.step([Text(step=0, pieces=[Piece(id=id, text=text, tokens=[len(text)], finish=last)])]))

    def leave(self, id: str) -> None:
        self.gateway.cancel_requests([id])
        list(self.gateway.step([]))

    def sent(self, kind: type) -> list[Any]:
        return [event for event, _ in self.ctx.sent if isinstance(event, kind)]

    def cancelled(self) -> set[str]:
        return {id for event in self.sent(Cancel) for id in event.ids}


def test_a_split_sends_each_session_to_its_arm() -> None:
    door = Door("split", 0.4)
    for number in range(40):
        session = f"s{number % 10}"
        (call,) = door.ask(f"r{number}", session)
        assert call.arm == ("b" if place(session, "x") < 0.4 else "")


def test_the_arm_waits_until_all_workers_know_it() -> None:
    door = Door("split", 1.0)
    door.gateway.observe(SetArms(open=False))
    assert door.sent(ArmsClosed) and door.ask("1")[0].arm == ""
    door.gateway.observe(SetArms(open=True))
    assert door.ask("2")[0].arm == "b"


def test_a_copy_goes_beside_its_request_and_nobody_hears_it() -> None:
    door = Door("mirror", 1.0)
    call, copy = door.ask("1", cache_salt="ann")
    assert (call.arm, call.id, call.cache_salt) == ("", "1", "ann")
    assert (copy.arm, copy.sampling.seed) == ("b", call.sampling.seed)
    assert copy.cache_salt != call.cache_salt  # what arm A has just cached would flatter arm B
    door.say(copy.id, "other")
    door.say(copy.id, "", finish=True)
    door.say("1", "mine")
    door.say("1", "", finish=True)
    assert door.heard["1"] == "mine" and len(door.ends["1"]) == 1
    assert door.gateway.num_open == 0
    door.gateway.close()
    (pair,) = read(records()[-1]).pairs
    assert (pair.at, pair.text_a, pair.text_b) == (0, "mine", "other")


@pytest.mark.parametrize("mishap", ["fail", "death", "late"])
def test_what_befalls_a_copy_is_no_concern_of_its_request(mishap: str) -> None:
    door = Door("mirror", 1.0)
    _, copy = door.ask("1")
    if mishap == "fail":
        door.gateway.observe(Failure(id=copy.id, status=500, message="broke"))
    elif mishap == "death":
        door.gateway.observe(Moved(ids=[copy.id], worker="decode-b.0", generation=1))
        door.gateway.observe(WorkerDown(worker="decode-b.0", generation=1))
    else:
        door.say("1", "mine", finish=True)
    assert door.gateway.num_open == (mishap != "late")
    if mishap != "late":
        door.say("1", "mine", finish=True)
    assert [isinstance(end, Piece) for end in door.ends["1"]] == [True]


def test_a_client_that_leaves_takes_its_copy_along() -> None:
    door = Door("mirror", 1.0)
    _, copy = door.ask("1")
    door.leave("1")
    assert door.cancelled() >= {"1", copy.id}


@pytest.mark.parametrize("why", ["max_open", "pipeline_full", "worker_down"])
def test_a_copy_without_room_is_dropped_and_counted_and_never_waited_for(why: str) -> None:
    door = Door("mirror", 1.0, max_open=2)
    if why == "max_open":
        assert len(door.ask("a")) == len(door.ask("b")) == 2
    elif why == "worker_down":
        door.gateway.observe(WorkerDown(worker="decode-b.0", generation=1))
    calls = door.ask("c") if why != "pipeline_full" else full_behind_the_request(door)
    assert [call.id for call in calls] == ["c"]
    door.gateway.close()
    end = read(records()[-1]).end
    assert end is not None and end.dropped[why] == 1


def full_behind_the_request(door: Door) -> list[Call]:
    """The queue takes the request, and then no more."""
    admitted = door.gateway.admission.refusal
    door.gateway.admission.refusal = lambda *a, full: admitted(*a, full=False)  # type: ignore[method-assign]
    door.ctx.full_outputs.add("call")
    return door.ask("c")


def test_arm_a_answers_for_an_arm_b_that_is_down_and_it_counts_against_b() -> None:
    door = Door("split", 1.0, stop_if={"errors": "> 5%"}, min_requests=20)
    door.gateway.observe(WorkerDown(worker="decode-b.0", generation=1))
    calls = [call for number in range(40) for call in door.ask(f"r{number}")]
    assert {call.arm for call in calls} == {""}  # taken in, and not refused
    (breach, *_) = door.sent(Breach)
    assert breach.reason.startswith("errors > 5%")


def test_a_breach_moves_all_sessions_to_arm_a_at_once() -> None:
    door = Door("split", 1.0, stop_if={"errors": "> 5%"}, min_requests=20)
    for number in range(25):
        door.ask(f"r{number}", "ann")
        door.gateway.observe(Failure(id=f"r{number}", status=500, message="broke"))
    assert door.ask("next", "ann")[0].arm == ""
    assert len(door.sent(Breach)) == 1
    door.gateway.observe(SetArms(open=True))  # another change of the graph meanwhile
    assert door.ask("later", "ann")[0].arm == ""


def test_another_live_change_forgets_nothing_of_what_arm_b_did() -> None:
    door = Door("split", 1.0, stop_if={"errors": "> 5%"}, min_requests=20)
    for number in range(25):
        if number == 15:
            door.gateway.reconfigure(door.gateway.config.model_copy(update={"max_requests": 99}))
        door.ask(f"r{number}")
        door.gateway.observe(Failure(id=f"r{number}", status=500, message="broke"))
    assert len(door.sent(Breach)) == 1


def test_closing_waits_for_what_is_open_and_fails_it_at_the_deadline() -> None:
    door = Door("split", 1.0)
    door.ask("1")
    door.ask("2")
    door.gateway.observe(SetArms(open=False))
    assert door.sent(ArmsClosed) == []
    door.say("1", "done", finish=True)
    assert door.sent(ArmsClosed) == []
    door.gateway.observe(SetArms(open=False, abort=True))
    assert door.sent(ArmsClosed) and isinstance(door.ends["2"][0], RequestError)


def tell_arm(call: Call) -> Iterator[Piece]:
    yield Piece(id=call.id, text=call.arm or "a", finish=Finish(reason="stop"))


def test_the_session_of_a_header_goes_before_that_of_the_body(start: Callable[..., Any]) -> None:
    experiment = {"name": "x", "mode": "split", "share": 0.5}
    service = start(
        lambda call: iter([Piece(id=call.id, text=call.arm or "a", finish=Finish(reason="stop"))]),
        experiment=experiment,
    )
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "user": "ann"}
    for headers in ({}, {"x-session-id": "s1"}, {"x-session-id": "s2"}, {"x-session-id": "s3"}):
        answer = httpx.post(f"{service.url}/v1/chat/completions", json=body, headers=headers, timeout=10)
        session = headers.get("x-session-id", "ann")
        wanted = "b" if place(session, "x") < 0.5 else "a"
        assert answer.json()["choices"][0]["message"]["content"] == wanted
    bad = httpx.post(f"{service.url}/v1/chat/completions", json=body, headers={"x-session-id": "a b"}, timeout=10)
    assert bad.status_code == 400


EVENTS = st.lists(st.sampled_from(["ask", "end", "end", "fail", "leave", "death", "up", "close", "open"]), max_size=60)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=EVENTS, mode=st.sampled_from(["split", "mirror"]), seed=st.integers(0, 999))
def test_the_ledger_balances_whatever_happens(events: list[str], mode: str, seed: int) -> None:
    """Every client hears one end, every copy ends or is cancelled, and all that ended is in the record once."""
    chance, door = random.Random(seed), Door(mode, 0.7, max_open=3)
    alive: dict[str, Call] = {}
    left: set[str] = set()
    copies: set[str] = set()
    deaths = 0
    for number, event in enumerate(events):
        some = chance.choice(sorted(alive)) if alive else ""
        if event == "ask":
            for call in door.ask(f"r{number}", f"s{number % 7}"):
                alive[call.id] = call
                copies |= {call.id} if call.id != f"r{number}" else set()
        elif event == "end" and some:
            alive.pop(some)
            door.say(some, "text", finish=True)
        elif event == "fail" and some:
            alive.pop(some)
            door.gateway.observe(Failure(id=some, status=500, message="broke"))
        elif event == "leave" and some and some not in copies:
            left.add(some)
            alive.pop(some)
            door.leave(some)
        elif event == "death":
            deaths += 1
            held = [id for id, call in alive.items() if call.arm == "b"]
            door.gateway.observe(Moved(ids=held, worker="decode-b.0", generation=deaths))
            door.gateway.observe(WorkerDown(worker="decode-b.0", generation=deaths))
            for id in held:
                alive.pop(id)
        elif event == "up":
            door.gateway.observe(WorkerUp(worker="decode-b.0", generation=deaths + 1, data="", control=""))
        elif event in ("close", "open"):
            door.gateway.observe(SetArms(open=event == "open"))
        gone = door.cancelled()
        alive = {id: call for id, call in alive.items() if id not in gone}
    for id in list(alive):
        door.say(id, "text", finish=True)
    assert door.gateway.num_open == 0 and door.gateway.arms is not None and not len(door.gateway.arms.copies)
    assert door.gateway.arms.open_in_b() == []
    assert {id for id, ends in door.ends.items() if len(ends) != 1} == left
    door.gateway.close()
    recorded = read(records()[-1])
    if mode == "split":
        lost = sum(outcome.ended == 0.0 for outcome in recorded.outcomes)  # arm B was down
        assert len(recorded.outcomes) - lost <= len(door.ends) - len(left)
    else:
        ended = Counter(pair.b.error != "" for pair in recorded.pairs)
        assert sum(ended.values()) <= len(copies)
