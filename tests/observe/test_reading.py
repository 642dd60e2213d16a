"""Tables from two pages of /metrics, as the service writes them."""

from __future__ import annotations

import pytest

from flowinfer.errors import FlowInferError
from flowinfer.observe.exposition import render
from flowinfer.observe.metrics import Sample
from flowinfer.observe.reading import between, busiest, parse


def page(messages: float, busy: float, queue: float = 0.0, tokens: float = 0.0) -> str:
    edge = {"edge": "lookup -> prefill"}
    front: list[Sample] = [
        ("flowinfer:edge_messages_total", edge, messages),
        ("flowinfer:edge_bytes_total", edge, messages * 100),
        ("flowinfer:edge_queue_messages", edge, queue),
        ("flowinfer:edge_credit", edge | {"lane": "short"}, 3.0),
        ("flowinfer:edge_credit", edge | {"lane": "long"}, 2.0),
        ("flowinfer:edge_credit_wait_seconds_total", edge, messages * 0.5),
        ("flowinfer:generation_tokens_total", {}, tokens),
        ("flowinfer:worker_up", {"worker": "front.0"}, 1.0),
    ]
    prefill: list[Sample] = [
        ("flowinfer:stage_busy_seconds_total", {"stage": "prefill"}, busy),
        ("flowinfer:worker_up", {"worker": "prefill.0"}, 1.0),
        ("flowinfer:kv_blocks", {}, 64.0),
        ("flowinfer:kv_blocks_free", {}, 60.0),
        ("flowinfer:worker_resident_bytes", {}, 5e8),
    ]
    other: list[Sample] = [("flowinfer:stage_busy_seconds_total", {"stage": "prefill"}, busy)]
    workers = {"front.0": front, "prefill.0": prefill, "prefill.1": other}
    return render(workers, vllm_model="m").decode()


def test_rates_are_those_of_the_time_between() -> None:
    now = between(parse(page(10, 1.0, tokens=100), 50.0), parse(page(30, 1.5, queue=4, tokens=150), 52.0))
    (edge,) = now.edges
    assert (edge.rate, edge.bytes_per_s, edge.queue, edge.credit, edge.wait_s) == (10.0, 1000.0, 4.0, 5.0, 0.5)
    assert edge.blocked == "on credit of prefill"
    assert now.tokens == 25.0


def test_replicas_of_a_stage_are_summed() -> None:
    (stage,) = between(parse(page(0, 1.0), 0.0), parse(page(0, 1.6), 1.0)).stages
    assert (stage.workers, round(stage.busy, 6)) == (2, 1.2)
    assert busiest([stage]) == "prefill"


def test_a_worker_shows_its_memory_and_blocks() -> None:
    workers = {row.worker: row for row in between(parse(page(0, 0), 0.0), parse(page(0, 0), 1.0)).workers}
    assert (workers["prefill.0"].kv_blocks, workers["prefill.0"].kv_free) == (64.0, 60.0)
    assert workers["front.0"].kv_blocks is None


def test_a_counter_that_began_anew_never_gives_a_negative_rate() -> None:
    (edge,) = between(parse(page(1000, 0), 0.0), parse(page(5, 0), 1.0)).edges
    assert edge.rate == 5.0


@pytest.mark.parametrize("text", ["", "other_metric 1\n", "<html>"])
def test_a_page_of_somebody_else_is_refused(text: str) -> None:
    with pytest.raises(FlowInferError):
        parse(text, 0.0)
