"""The loop of a worker, stepped by hand: order, pressure, timers, background work, cancellation, containment."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from flowinfer.errors import RequestError, StageError
from flowinfer.graph.plan import EdgePlan, Plan, StagePlan, WorkerPlan
from flowinfer.message import Call, Event, Finish, KVHandle, KVRelease, Piece, Prompt, Sampling, Sequence, Text
from flowinfer.runtime.clock import FakeClock
from flowinfer.runtime.group import GRACE_S
from flowinfer.runtime.local import LocalService
from flowinfer.stage import Stage


class ToPrompt(Stage):
    def step(self, calls: list[Call]) -> Iterable[Prompt]:
        for call in calls:
            yield Prompt(id=call.id, tokens=np.ones(3, np.int32), sampling=call.sampling)


class Middle(Stage):
    """Passes prompts on, unless told to break, refuse or hold."""

    def open(self) -> None:
        self.held: list[Prompt] = []
        self.cancelled: list[str] = []

    def step(self, prompts: list[Prompt]) -> Iterable[Prompt]:
        for prompt in prompts:
            if prompt.id.startswith("break"):
                raise RuntimeError("that can't be")
            if prompt.id.startswith("refuse"):
                self.ctx.fail(prompt.id, RequestError(400, "not you", code="no"))
            elif prompt.id.startswith("hold"):
                self.held.append(prompt)
            else:
                yield prompt

    def cancel(self, requests: Collection[str]) -> None:
        self.cancelled += requests


class ToText(Stage):
    def step(self, prompts: list[Prompt]) -> Iterable[Text]:
        if prompts:
            yield Text(step=1, pieces=[Piece(id=p.id, text="ok", finish=Finish(reason="stop")) for p in prompts])


def service_of(clock: FakeClock | None = None, capacity: int = 8, **stages: type[Stage]) -> LocalService:
    classes: dict[str, type[Stage]] = {"prompt": ToPrompt, "middle": Middle, "text": ToText} | stages
    names = ["api", *classes]
    links = [("api", "prompt", "Call", "calls"), ("prompt", "middle", "Prompt", "prompts")]
    links += [("middle", "text", "Prompt", "prompts"), ("text", "api", "Text", "texts")]
    plan = Plan(
        name="test",
        digest="",
        file="pipe.yaml",
        stages={
            n: StagePlan(name=n, kind=n, config={}, worker="front", mark=f"pipe.yaml:{i}:1")
            for i, n in enumerate(names)
        },
        edges=tuple(
            EdgePlan(name=f"{a} -> {b}", source=a, target=b, message=m, port=p, capacity=capacity)
            for a, b, m, p in links
        ),
        workers={"front": WorkerPlan(name="front", stages=tuple(names))},
    )
    return LocalService(plan, stages=classes, clock=clock or FakeClock())


def call(request: str) -> Call:
    return Call(id=request, sampling=Sampling(), prompt="x")


class Outcomes:
    """What the sinks of submitted calls got."""

    def __init__(self, service: LocalService) -> None:
        self.service = service
        self.got: dict[str, list[Any]] = {}

    def submit(self, *requests: str) -> None:
        for request in requests:
            self.got[request] = []
            self.service.submit(call(request), self.got[request].append)

    def failed(self, request: str) -> RequestError:
        (error,) = self.got[request]
        assert isinstance(error, RequestError)
        return error


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_requests_pass_all_stages_in_one_turn_and_answers_come_in_the_next() -> None:
    with service_of() as service:
        outcomes = Outcomes(service)
        outcomes.submit("r1")
        service.turn()
        assert outcomes.got["r1"] == []
        service.turn()
        assert [piece.text for piece in outcomes.got["r1"]] == ["ok"]


def test_generate_answers_in_the_order_of_the_calls() -> None:
    with service_of() as service:
        answers = service.generate([call("b"), call("a"), call("refuse")])
        assert list(answers) == ["b", "a", "refuse"]
        assert isinstance(answers["refuse"], RequestError) and answers["refuse"].status == 400


def test_a_full_queue_stops_each_stage_before_it_and_loses_nothing() -> None:
    with service_of(capacity=2) as service:
        outcomes = Outcomes(service)
        text = service.group.by_name["text"]
        gate = _Gate()
        text._gates.append(gate)  # type: ignore[arg-type]
        outcomes.submit(*(f"r{i}" for i in range(20)))
        service.run_until_idle()
        waiting = [len(run.inboxes[port].messages) for run, port in _ports(service)]
        assert waiting == [2, 2, 2]
        gate.full = False
        service.run_until_idle()
        assert all(len(got) == 1 for got in outcomes.got.values())


def test_the_time_for_which_a_stage_may_not_run_is_the_wait_of_what_came_in(clock: FakeClock) -> None:
    with service_of(clock, capacity=2) as service:
        outcomes, gate = Outcomes(service), _Gate()
        text = service.group.by_name["text"]
        text._gates.append(gate)  # type: ignore[arg-type]
        outcomes.submit("r1")
        service.run_until_idle()
        clock.advance(3.0)
        outcomes.submit("r2")
        service.run_until_idle()
        clock.advance(1.0)
        gate.full = False
        service.run_until_idle()
        outcomes.submit("r3")
        service.run_until_idle()
        waits = text.inboxes["prompts"].waits
        samples = {(name, labels.get("le")): value for name, labels, value in waits.samples("middle -> text", 3)}
        assert samples["edge_wait_seconds_sum", None] == pytest.approx(4.0 + 1.0)
        assert [samples["edge_wait_seconds_bucket", le] for le in ("0.0001", "1.0", "5.0")] == [1, 2, 3]


class _Gate:
    full = True


def _ports(service: LocalService) -> list[tuple[Any, str]]:
    by_name = service.group.by_name
    return [(by_name["prompt"], "calls"), (by_name["middle"], "prompts"), (by_name["text"], "prompts")]


def test_an_error_in_step_fails_the_requests_of_its_batch_only(caplog: pytest.LogCaptureFixture) -> None:
    with service_of() as service:
        outcomes = Outcomes(service)
        outcomes.submit("break")
        service.run_until_idle()
        outcomes.submit("r1")
        service.run_until_idle()
        error = outcomes.failed("break")
        assert (error.status, error.code) == (500, "stage_failed") and "'middle'" in str(error)
        assert [piece.text for piece in outcomes.got["r1"]] == ["ok"]
        assert len([record for record in caplog.records if record.exc_info]) == 1


def test_three_errors_in_a_row_end_the_worker_with_their_cause() -> None:
    with service_of() as service:
        outcomes = Outcomes(service)
        for attempt in ("break1", "break2"):
            outcomes.submit(attempt)
            service.run_until_idle()
        outcomes.submit("break3")
        with pytest.raises(StageError, match=r"'middle' \(pipe.yaml:2:1\).*that can't be"):
            service.run_until_idle()


def test_a_cancelled_request_leaves_queues_and_stages_and_is_refused_later() -> None:
    with service_of() as service:
        outcomes = Outcomes(service)
        outcomes.submit("hold", "r1")
        service.turn()
        service.cancel(["hold"])
        service.turn()
        middle: Any = service.stage("middle")
        assert middle.cancelled == ["hold"]
        assert outcomes.failed("hold").code == "cancelled"
        service.group.runs[2].stage.ctx.submit(lambda: None, lambda _: middle.held)  # it comes too late
        _finish_background(service)
        assert service.group.num_late == {"closed": 1}


def _finish_background(service: LocalService) -> None:
    assert service.group._pool is not None
    service.group._pool.shutdown(wait=True)
    service.group._pool = None
    service.run_until_idle()


def test_what_stages_still_hold_after_the_end_is_cancelled_after_a_grace(clock: FakeClock) -> None:
    with service_of(clock) as service:
        service.generate([call("r1")])
        service.run_until_idle()
        middle: Any = service.stage("middle")
        assert middle.cancelled == []
        clock.advance(GRACE_S)
        service.run_until_idle()
        assert middle.cancelled == ["r1"]


def test_a_refused_sequence_gives_its_blocks_back() -> None:
    class Released(Middle):
        listens = (KVRelease,)

        def observe(self, event: Event) -> None:
            self.cancelled.append(event)  # type: ignore[arg-type]

    with service_of(middle=Released) as service:
        group = service.group
        group.cancel(["late"])
        kv = KVHandle(layout="", owner=group.name, generation=1, blocks=np.zeros(1, np.int32), num_tokens=3)
        group.refuse(Sequence(id="late", tokens=np.ones(3, np.int32), sampling=Sampling(), kv=kv), "closed")
        service.run_until_idle()
        middle: Any = service.stage("middle")
        assert KVRelease(id="late", lessee="front.0") in middle.cancelled


def test_timers_run_once_their_time_has_come(clock: FakeClock) -> None:
    with service_of(clock) as service:
        ran: list[float] = []
        context = service.stage("middle").ctx
        context.call_at(clock.now() + 7 * 86_400, lambda: ran.append(clock.now()))
        service.run_until_idle()
        assert ran == [] and service.group.wait_s() == 7 * 86_400
        clock.advance(7 * 86_400)
        service.run_until_idle()
        assert ran == [clock.now()]


def test_background_work_returns_messages_into_the_loop() -> None:
    class Slow(Middle):
        def step(self, prompts: list[Prompt]) -> Iterable[Prompt]:
            for prompt in prompts:
                self.ctx.submit(lambda prompt=prompt: (threading.get_ident(), prompt), self._done)  # type: ignore[misc]
            return ()

        def _done(self, result: Any) -> Iterable[Prompt]:
            thread, prompt = result
            self.cancelled.append(str(thread != threading.get_ident()))
            return [prompt]

    with service_of(middle=Slow) as service:
        answers = service.generate([call("r1")])
        middle: Any = service.stage("middle")
        assert [piece.text for piece in answers["r1"]] == ["ok"] and middle.cancelled == ["True"]


def test_background_errors_reach_then_as_a_value() -> None:
    with service_of() as service:
        seen: list[Any] = []

        def fail() -> None:
            raise OSError("disk")

        service.stage("middle").ctx.submit(fail, lambda error: seen.append(error))
        _finish_background(service)
        assert isinstance(seen[0], OSError)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("way", ["submit", "call_at"])
def test_an_error_in_a_callback_fails_its_requests_at_once(clock: FakeClock, way: str, named: bool) -> None:
    class Later(Stage):
        def step(self, prompts: list[Prompt]) -> Iterable[Prompt]:
            for prompt in prompts:
                request = {"request": prompt.id} if named else {}
                if way == "submit":
                    self.ctx.submit(lambda: None, lambda _, prompt=prompt: self._pass(prompt), **request)  # type: ignore[misc]
                else:
                    self.ctx.call_at(clock.now() + 1, lambda prompt=prompt: self._pass(prompt), **request)  # type: ignore[misc]
            return ()

        def _pass(self, prompt: Prompt) -> Iterable[Prompt]:
            if prompt.id == "break":
                raise RuntimeError("that can't be")
            yield prompt

    with service_of(clock, middle=Later) as service:
        outcomes = Outcomes(service)
        outcomes.submit("r1", "break", "r2")
        service.run_until_idle()
        clock.advance(2)
        deadline = time.monotonic() + 10
        while not all(outcomes.got.values()) and time.monotonic() < deadline:
            service.turn()
        assert (outcomes.failed("break").status, outcomes.failed("break").code) == (500, "stage_failed")
        if named:  # otherwise all that came in the same step may fail
            assert [outcomes.got[id][0].text for id in ("r1", "r2")] == ["ok", "ok"]
        assert all(len(got) == 1 for got in outcomes.got.values())


def test_a_busy_stage_is_stepped_without_messages() -> None:
    class Counter(Middle):
        steps = 0

        @property
        def busy(self) -> bool:
            return self.steps < 3

        def step(self, prompts: list[Prompt]) -> Iterable[Prompt]:
            self.steps += 1
            return prompts

    with service_of(middle=Counter) as service:
        assert service.group.wait_s() == 0
        service.run_until_idle()
        assert service.stage("middle").steps == 3 and service.group.wait_s() != 0  # type: ignore[attr-defined]


def test_an_output_that_no_edge_takes_is_an_error() -> None:
    class Odd(Middle):
        def step(self, prompts: list[Prompt]) -> Iterable[Prompt]:
            return [call(p.id) for p in prompts]  # type: ignore[misc]

    with service_of(middle=Odd) as service:
        answers = service.generate([call("r1")])
        assert "no edge takes" in str(answers["r1"])


def test_a_stage_that_cannot_open_closes_those_before_it() -> None:
    closed: list[str] = []

    class First(ToPrompt):
        def close(self) -> None:
            closed.append("prompt")

    class Bad(Middle):
        def open(self) -> None:
            raise FileNotFoundError("no such model")

    with pytest.raises(StageError, match=r"'middle' \(pipe.yaml:2:1\): FileNotFoundError: no such model"):
        service_of(prompt=First, middle=Bad).open()
    assert closed == ["prompt"]


def test_a_service_in_a_thread_answers_and_stops() -> None:
    done = threading.Event()
    with service_of() as service:
        service.start()
        service.submit(call("r1"), lambda piece: done.set())
        assert done.wait(20)
    assert service.error is None


def test_a_back_edge_is_delivered_in_the_next_turn() -> None:
    class Loop(Middle):
        """Sends every prompt round once more."""

        seen: ClassVar[list[int]] = []

        def step(self, prompts: list[Prompt], again: list[Sequence]) -> Iterable[Prompt | Sequence]:
            self.seen.append(len(again))
            yield from (Sequence(id=p.id, tokens=p.tokens, sampling=p.sampling) for p in prompts)
            yield from (Prompt(id=p.id, tokens=p.tokens, sampling=p.sampling) for p in again)

    service = service_of(middle=Loop)
    plan = service.group.plan
    back = EdgePlan(
        name="middle -> middle", source="middle", target="middle", message="Sequence", port="again", back=True
    )
    classes: dict[str, type[Stage]] = {"prompt": ToPrompt, "middle": Loop, "text": ToText}
    with LocalService(msgspec.structs.replace(plan, edges=(*plan.edges, back)), stages=classes) as service:
        answers = service.generate([call("r1")])
        assert [piece.text for piece in answers["r1"]] == ["ok"] and Loop.seen == [0, 1]
