"""Credit, lanes, reservations and deaths as the sending half of an edge sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowinfer.graph.plan import EdgePlan
from flowinfer.message import Message, PrefixHint, Prompt, Sampling
from flowinfer.runtime.dispatch import rendezvous
from flowinfer.runtime.inbox import BACK_AFTER_S, Account, Debt, Grants, Inbox
from flowinfer.runtime.outbox import Outbox

EDGE = EdgePlan(name="a -> b", source="a", target="b", message="Prompt", port="prompts", capacity=8)


def prompt(request: str, **facets: Any) -> Prompt:
    return Prompt(id=request, tokens=np.ones(4, np.int32), sampling=Sampling(), **facets)


class Wire:
    """Remembers what was sent: (instance, lane, id, cost)."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, str, int]] = []

    def __call__(self, instance: str, edge: EdgePlan, lane: str, messages: Sequence[Message], cost: int) -> None:
        self.sent += [(instance, lane, message.id, cost) for message in messages]  # type: ignore[attr-defined]

    @property
    def ids(self) -> list[str]:
        return [sent[2] for sent in self.sent]


def outbox_to(wire: Wire, credit: dict[str, int], edge: EdgePlan = EDGE) -> Outbox:
    outbox = Outbox(edge, wire, lambda: 0.0)
    for name, amount in credit.items():
        outbox.connect(name, 1)
        for lane in edge.lanes:
            outbox.credit(name, 1, lane, amount, ())
    return outbox


def put(outbox: Outbox, *messages: Prompt) -> None:
    for message in messages:
        outbox.put(message)
    outbox.flush()


def test_what_has_no_credit_waits_in_order_and_then_goes() -> None:
    wire = Wire()
    outbox = outbox_to(wire, {"b.0": 2})
    put(outbox, *(prompt(f"r{i}") for i in range(5)))
    assert wire.ids == ["r0", "r1"] and outbox.waiting == 3
    outbox.credit("b.0", 1, "", 2, ["r0", "r1"])
    outbox.flush()
    assert wire.ids == ["r0", "r1", "r2", "r3"]


def test_an_outbox_at_its_capacity_is_full() -> None:
    outbox = outbox_to(Wire(), {"b.0": 0})
    put(outbox, *(prompt(f"r{i}") for i in range(7)))
    assert not outbox.full
    put(outbox, prompt("r7"))
    assert outbox.full


def test_the_instance_with_least_in_hand_pulls_the_next() -> None:
    wire = Wire()
    outbox = outbox_to(wire, {"b.0": 4, "b.1": 4})
    put(outbox, *(prompt(f"r{i}") for i in range(4)))
    assert sorted(sent[0] for sent in wire.sent) == ["b.0", "b.0", "b.1", "b.1"]
    outbox.credit("b.1", 1, "", 2, ["r1", "r3"])
    put(outbox, prompt("r4"), prompt("r5"))
    assert [sent[0] for sent in wire.sent[4:]] == ["b.1", "b.1"]


def test_nothing_goes_to_an_instance_that_is_not_connected() -> None:
    wire = Wire()
    outbox = Outbox(EDGE, wire, lambda: 0.0)
    outbox.credit("b.0", 1, "", 8, ())
    put(outbox, prompt("r0"))
    assert wire.sent == []
    outbox.connect("b.0", 1)
    outbox.flush()
    assert wire.ids == ["r0"]


def test_hash_sends_equal_keys_to_one_instance_and_does_not_let_them_block_others() -> None:
    wire = Wire()
    edge = msgspec.structs.replace(EDGE, dispatch="hash", key="cache_salt")
    names = ["b.0", "b.1"]
    first = next(f"k{i}" for i in range(99) if rendezvous(f"k{i}", names) == "b.0")
    second = next(f"k{i}" for i in range(99) if rendezvous(f"k{i}", names) == "b.1")
    outbox = outbox_to(wire, {"b.0": 1, "b.1": 9}, edge)
    put(outbox, *(prompt(f"r{i}", cache_salt=key) for i, key in enumerate([first, first, second, second])))
    assert sorted(wire.sent) == [("b.0", "", "r0", 1), ("b.1", "", "r2", 1), ("b.1", "", "r3", 1)]


def test_bucket_lanes_have_credit_of_their_own() -> None:
    wire = Wire()
    outbox = outbox_to(wire, {"b.0": 1}, msgspec.structs.replace(EDGE, dispatch="bucket", lanes=("short", "long")))
    put(outbox, prompt("r0", bucket="long"), prompt("r1", bucket="long"), prompt("r2", bucket="short"))
    assert sorted(wire.sent) == [("b.0", "long", "r0", 1), ("b.0", "short", "r2", 1)]


def test_a_reservation_binds_its_message_to_the_consumer_and_is_its_price() -> None:
    wire = Wire()
    outbox = outbox_to(wire, {"b.0": 5, "b.1": 10})
    assert outbox.reserve("r0", 7) == "b.1"
    assert outbox.reserve("r1", 7) is None
    outbox.credit("b.0", 1, "", 50, ())
    put(outbox, prompt("r0"))
    assert wire.sent == [("b.1", "", "r0", 7)]
    assert outbox.consumers["b.1"].credit[""] == 3


def test_what_no_share_is_large_enough_for_goes_alone() -> None:
    wire = Wire()
    outbox = outbox_to(wire, {"b.0": 5, "b.1": 4})
    assert outbox.reserve("small", 1) == "b.0" and outbox.reserve("other", 1) in ("b.0", "b.1")
    assert outbox.reserve("large", 7) is None
    outbox.unreserve("small")
    outbox.unreserve("other")
    assert outbox.reserve("large", 7) == "b.0"
    put(outbox, prompt("large"))
    assert outbox.consumers["b.0"].credit[""] == -2
    assert outbox.reserve("next", 5) is None
    outbox.credit("b.0", 1, "", 7, ["large"])
    assert outbox.consumers["b.0"].credit[""] == 5


def test_unreserve_gives_the_credit_back() -> None:
    outbox = outbox_to(Wire(), {"b.0": 7})
    outbox.reserve("r0", 7)
    outbox.unreserve("r0")
    outbox.unreserve("r0")
    assert outbox.reserve("r1", 7) == "b.0"


def test_a_reservation_of_a_dead_consumer_finds_another() -> None:
    wire = Wire()
    outbox = outbox_to(wire, {"b.0": 9, "b.1": 6})
    assert outbox.reserve("r0", 5) == "b.0" and outbox.reserve("r1", 5) == "b.1"
    outbox.drop("b.0", 1)
    put(outbox, prompt("r0"))
    assert wire.sent == [] and outbox.waiting == 1
    outbox.unreserve("r1")
    outbox.flush()
    assert wire.sent == [("b.1", "", "r0", 5)] and outbox.consumers["b.1"].credit[""] == 1


def test_the_death_of_a_consumer_names_the_requests_on_their_way() -> None:
    outbox = outbox_to(Wire(), {"b.0": 3})
    put(outbox, *(prompt(f"r{i}") for i in range(4)))
    outbox.credit("b.0", 1, "", 1, ["r0"])
    outbox.flush()
    assert outbox.drop("b.0", 1) == ["r1", "r2", "r3"]


def test_late_credit_of_a_dead_generation_counts_for_nothing() -> None:
    outbox = outbox_to(Wire(), {"b.0": 3})
    outbox.drop("b.0", 1)
    outbox.connect("b.0", 2)
    outbox.credit("b.0", 1, "", 99, ())
    assert outbox.consumers["b.0"].credit.get("", 0) == 0


def test_cancel_takes_waiting_messages_and_reservations_back() -> None:
    wire = Wire()
    outbox = outbox_to(wire, {"b.0": 6})
    outbox.reserve("r0", 6)
    put(outbox, prompt("r1"), prompt("r2"))
    assert [message.id for message in outbox.cancel({"r0", "r1"})] == ["r1"]  # type: ignore[attr-defined]
    outbox.flush()
    assert wire.ids == ["r2"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_credit_is_never_overdrawn_and_nothing_is_lost(data: st.DataObject) -> None:
    wire = Wire()
    outbox = outbox_to(wire, {"b.0": 3, "b.1": 2})
    put_in, cancelled, paid = 0, set[str](), 0
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["put", "credit", "cancel", "reserve"])):
            case "put":
                put(outbox, prompt(f"r{put_in}"))
                put_in += 1
            case "reserve":
                outbox.reserve(f"r{put_in}", 2)
            case "cancel" if put_in:
                request = f"r{data.draw(st.integers(0, put_in - 1))}"
                cancelled.update(m.id for m in outbox.cancel({request}))  # type: ignore[attr-defined]
            case "credit" if paid < len(wire.sent):
                name, lane, request, cost = wire.sent[paid]
                outbox.credit(name, 1, lane, cost, [request])
                outbox.flush()
                paid += 1
        assert all(consumer.credit[""] >= 0 for consumer in outbox.consumers.values())
        assert len(wire.sent) + outbox.waiting + len(cancelled) == put_in
        assert len(set(wire.ids)) == len(wire.ids)
    for request in range(put_in + 1):
        outbox.unreserve(f"r{request}")
    for name, lane, request, cost in wire.sent[paid:]:
        outbox.credit(name, 1, lane, cost, [request])
    outbox.flush()
    while len(wire.sent) + len(cancelled) < put_in:
        before = len(wire.sent)
        for name in ("b.0", "b.1"):
            outbox.credit(name, 1, "", 2, ())
        outbox.flush()
        assert len(wire.sent) > before


# ------------------------------------------------------------------------------------------------- the receiving half


def test_credit_returns_when_messages_are_taken_and_in_one_event() -> None:
    grants, inbox = Grants(), Inbox()
    grants.share("a -> b", 100)
    inbox.receive([prompt("r0"), prompt("r1")], grants.account("a -> b", "a.0", ""), 1)
    _, debts = inbox.take()
    for settled in debts:
        grants.settle(settled, now=5.0)
    assert grants.collect(5.0) == []
    ((producer, credit),) = grants.collect(5.0 + BACK_AFTER_S)
    assert (producer, credit.amount, credit.ids) == ("a.0", 2, ["r0", "r1"])


def test_half_a_share_returns_at_once() -> None:
    grants = Grants()
    grants.share("a -> b", 4)
    account = grants.account("a -> b", "a.0", "")
    account.used = 2
    grants.settle(Debt(account, 2), now=5.0)
    assert grants.collect(5.0)[0][1].amount == 2


def test_a_new_generation_gets_what_its_predecessors_messages_do_not_hold() -> None:
    grants, inbox = Grants(), Inbox()
    grants.share("a -> b", 10)
    inbox.receive([prompt("r0")], grants.account("a -> b", "a.0", ""), 3, held_port="prompts")
    grants.forget("a.0")
    assert [credit.amount for credit in grants.opening("a -> b", "a.0", ("",))] == [7]
    grants.settle(inbox.held.pop(("prompts", "r0")), now=1.0)
    grants.hurry()
    assert [credit.amount for _, credit in grants.collect(1.0)] == [3]


@pytest.mark.parametrize("held", ["", "prompts"])
def test_cancelled_messages_settle_their_debt(held: str) -> None:
    inbox = Inbox()
    inbox.receive([prompt("r0")], Account("a -> b", "a.0", "", 5.0), 3, held)
    dropped, debts = inbox.cancel({"r0"})
    assert [m.id for m in dropped] == ["r0"] and [debt.amount for debt in debts] == [3]  # type: ignore[attr-defined]
    assert not inbox.held and not inbox.debts


def test_a_rendezvous_moves_only_the_keys_of_a_lost_name() -> None:
    names = ["b.0", "b.1", "b.2"]
    keys = [f"k{i}" for i in range(200)]
    before = {key: rendezvous(key, names) for key in keys}
    after = {key: rendezvous(key, names[:2]) for key in keys}
    assert all(after[key] == before[key] for key in keys if before[key] != "b.2")


def hinted(request: str, owners: list[str], num_tokens: int = 640) -> Prompt:
    hint = PrefixHint(hashes=[bytes([i]) * 16 for i in range(10)], owners=owners)
    return Prompt(id=request, tokens=np.ones(num_tokens, np.int32), sampling=Sampling(), prefix=hint)


def outbox_by_prefix(wire: Wire) -> Outbox:
    return outbox_to(wire, {"b.0": 8, "b.1": 8}, msgspec.structs.replace(EDGE, dispatch="prefix"))


def test_prefix_sends_prompts_to_the_holder_until_its_queue_outweighs_the_prefix() -> None:
    wire = Wire()
    put(outbox_by_prefix(wire), *(hinted(f"r{i}", ["b.1"] * 5) for i in range(3)))
    assert {sent[2]: sent[0] for sent in wire.sent} == {"r0": "b.1", "r1": "b.1", "r2": "b.0"}


BOTH = msgspec.structs.replace(EDGE, dispatch="bucket+prefix", lanes=("short", "long"))


def laned(request: str, lane: str, owners: list[str], num_tokens: int = 640) -> Prompt:
    made = hinted(request, owners, num_tokens)
    made.bucket = lane
    return made


def test_within_the_share_of_a_lane_the_holder_of_the_prefix_gets_the_prompt() -> None:
    for holder in ("b.0", "b.2"):
        wire = Wire()
        outbox = outbox_to(wire, dict.fromkeys(("b.0", "b.1", "b.2", "b.3"), 8), BOTH)  # b.0, b.2 serve `short`
        for consumer in outbox.consumers.values():
            consumer.outstanding = 1  # nobody is idle
        put(outbox, laned("r0", "short", [holder] * 5, 4_000))
        assert [(sent[0], sent[1]) for sent in wire.sent] == [(holder, "short")]


@pytest.mark.parametrize(("num_cached", "goes_to"), [(10, "b.1"), (3, "b.0")])
def test_a_holder_of_another_lane_gets_what_fits_into_a_step_and_no_more(num_cached: int, goes_to: str) -> None:
    wire = Wire()
    outbox = outbox_to(wire, {"b.0": 8, "b.1": 8}, BOTH)  # b.0 serves `short`, b.1 `long`
    for consumer in outbox.consumers.values():
        consumer.outstanding = 1
    put(outbox, laned("r0", "short", ["b.1"] * num_cached, 1_000))
    assert [(sent[0], sent[1]) for sent in wire.sent] == [(goes_to, "short")]


def test_a_lane_whose_share_is_full_waits_and_lets_the_other_pass() -> None:
    wire = Wire()
    outbox = outbox_to(wire, {"b.0": 1, "b.1": 1}, BOTH)
    put(outbox, *(laned(f"s{i}", "short", ["b.0"] * 5) for i in range(4)), laned("l0", "long", [], 4_000))
    assert [sent[:3] for sent in wire.sent] == [("b.0", "short", "s0"), ("b.1", "long", "l0")]


def test_prefix_forgets_the_work_of_what_came_back() -> None:
    wire = Wire()
    outbox = outbox_by_prefix(wire)
    for i in range(4):
        put(outbox, hinted(f"r{i}", ["b.1"] * 5))
        outbox.credit("b.1", 1, "", 1, [f"r{i}"])
    assert {sent[0] for sent in wire.sent} == {"b.1"}


def test_prefix_goes_on_without_the_holder() -> None:
    wire = Wire()
    outbox = outbox_by_prefix(wire)
    outbox.drop("b.1", 1)
    put(outbox, hinted("r", ["b.1"] * 10))
    assert wire.sent == [("b.0", "", "r", 1)]


def test_a_sample_goes_out_right_behind_its_message_with_the_time_of_its_making() -> None:
    now, log = [10.0], list[tuple[str, object]]()
    outbox = Outbox(
        EDGE,
        lambda instance, edge, lane, messages, cost: log.extend(("sent", m.id) for m in messages),  # type: ignore[attr-defined]
        lambda: now[0],
        probe=lambda instance, edge, began: log.append((instance, began)),
    )
    outbox.connect("b.0", 1)
    put(outbox, prompt("r0"), prompt("r1"))  # without credit
    now[0] = 12.0
    outbox.credit("b.0", 1, "", 1, ())
    outbox.flush()
    assert log == [("sent", "r0"), ("b.0", 10.0)]
    outbox.credit("b.0", 1, "", 8, ["r0"])
    outbox.flush()
    put(outbox, prompt("r2"))
    assert log[2:] == [("sent", "r1"), ("sent", "r2"), ("b.0", 12.0)], "r1 was made before there could be another"


def test_a_sample_that_is_cancelled_makes_room_for_the_next() -> None:
    probes: list[float] = []
    outbox = Outbox(EDGE, Wire(), lambda: 5.0, probe=lambda instance, edge, began: probes.append(began))
    outbox.connect("b.0", 1)
    put(outbox, prompt("gone"))
    outbox.cancel({"gone"})
    outbox.credit("b.0", 1, "", 4, ())
    put(outbox, prompt("r1"))
    assert probes == [5.0]


BUCKETED = msgspec.structs.replace(EDGE, dispatch="bucket", lanes=("short", "long"))
HASHED = msgspec.structs.replace(EDGE, dispatch="hash", key="id")


@given(
    shapes=st.lists(st.sampled_from([EDGE, BUCKETED, HASHED, BOTH]), min_size=1, max_size=4),
    batches=st.lists(st.integers(0, 12), min_size=5, max_size=5),
)
@settings(deadline=None)
def test_an_edge_that_changes_its_dispatch_loses_and_repeats_nothing(
    shapes: list[EdgePlan], batches: list[int]
) -> None:
    """Consumers grant new lanes as a change does; messages return their credit at once, on the lane they came by."""
    wire = Wire()
    outbox = outbox_to(wire, {"b.0": 4, "b.1": 4})
    made, seen, edge = 0, 0, EDGE
    for shape, count in zip([EDGE, *shapes], batches, strict=False):
        outbox.reshape(shape)
        for name in ("b.0", "b.1"):
            for lane in set(shape.lanes) - set(edge.lanes):
                outbox.regrant(name, 1, lane, 4)
        edge = shape
        put(outbox, *(prompt(f"r{made + i}", bucket=("short", "long")[i % 2]) for i in range(count)))
        made += count
        while seen < len(wire.sent):
            name, lane, request, cost = wire.sent[seen]
            seen += 1
            outbox.credit(name, 1, lane, cost, (request,))
            outbox.flush()
    assert sorted(wire.ids) == sorted(f"r{i}" for i in range(made)) and outbox.waiting == 0
    for consumer in outbox.consumers.values():
        assert consumer.outstanding == 0
        assert {lane: consumer.credit[lane] for lane in edge.lanes} == dict.fromkeys(edge.lanes, 4)
