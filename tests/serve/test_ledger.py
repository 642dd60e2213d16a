"""The ledger closes each request once; admission says why not."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flowinfer.message import Call, Piece, Sampling
from flowinfer.serve.ledger import Entry, Ledger
from flowinfer.serve.policy import Admission


def entry(id: str, deadline: float) -> Entry:
    return Entry(id, lambda item: None, 0.0, deadline, (id,))


@given(st.lists(st.tuples(st.sampled_from("oce"), st.integers(0, 5), st.integers(1, 9)), max_size=40))
def test_every_entry_leaves_once_however_the_events_fall(events: list[tuple[str, int, int]]) -> None:
    ledger, opened, closed, now = Ledger(), 0, 0, 0.0
    for kind, name, number in events:
        id = str(name)
        if kind == "o" and id not in ledger:
            ledger.open(entry(id, now + number))
            opened += 1
        elif kind == "c":
            closed += ledger.close(id) is not None
        elif kind == "e":
            now += number
            late = ledger.expired(now)
            assert len(late) == len(set(late))
            closed += sum(ledger.close(id) is not None for id in late)
            assert all(ledger.find(id).deadline > now for id in ledger.ids())  # type: ignore[union-attr]
    assert opened - closed == len(ledger)


def test_a_group_is_down_while_none_of_its_replicas_runs() -> None:
    admission = Admission(10)
    admission.worker_up("decode.0", 1)
    admission.worker_up("decode.1", 1)
    admission.worker_down("decode.0", 1)
    assert admission.missing() is None
    admission.worker_down("decode.1", 1)
    assert admission.missing() == "decode"
    admission.worker_up("decode.1", 2)
    assert admission.missing() is None


def test_old_news_of_a_worker_changes_nothing() -> None:
    admission = Admission(10)
    admission.worker_up("decode.0", 3)
    admission.worker_down("decode.0", 2)
    assert admission.missing() is None
    admission.worker_down("decode.0", 3)
    admission.worker_up("decode.0", 3)
    assert admission.missing() == "decode"


def test_nobody_comes_in_before_all_workers_run() -> None:
    admission = Admission(10)
    refusal = admission.refusal(0, 1, full=False)
    assert refusal is not None
    assert refusal[1].status == 503
    admission.serving = True
    assert admission.refusal(0, 1, full=False) is None


def test_a_cancel_by_another_ends_the_request(start_plain: Any) -> None:
    service = start_plain()
    heard: list[Any] = []
    service.gateway.submit(Call(id="one", sampling=Sampling(), prompt="hi"), heard.append)
    service.next_call()
    service.put(lambda: service.gateway.cancel(["one"]))
    service.settle()
    assert [error.code for error in heard] == ["cancelled"]
    assert service.gateway.num_open == 0


def test_programs_in_the_process_need_no_http(start_plain: Any) -> None:
    service = start_plain()
    heard: list[Any] = []
    service.gateway.submit(Call(id="one", sampling=Sampling(), prompt="hi"), heard.append)
    call = service.next_call()
    assert call.deadline == service.ctx.clock.now() + 600
    service.say("one", "text", finish="stop")
    service.wait_idle()
    assert [item.text for item in heard if isinstance(item, Piece)] == ["text"]


def test_a_call_without_a_seed_is_given_one(start_plain: Any) -> None:
    service = start_plain()
    service.gateway.submit(Call(id="one", sampling=Sampling(), prompt="hi"), lambda item: None)
    assert service.next_call().sampling.seed is not None


def test_what_waits_when_the_service_closes_is_refused(start_plain: Any) -> None:
    service = start_plain()
    service.close()
    heard: list[Any] = []
    service.gateway.submit(Call(id="one", sampling=Sampling(), prompt="hi"), heard.append)
    service.gateway.close()
    assert [error.status for error in heard] == [503]


def test_an_open_id_is_refused(start_plain: Any) -> None:
    service = start_plain()
    heard: list[Any] = []
    for _ in range(2):
        service.gateway.submit(Call(id="one", sampling=Sampling(), prompt="hi"), heard.append)
    service.settle()
    assert [error.code for error in heard] == ["duplicate_id"]
    assert service.gateway.num_open == 1
