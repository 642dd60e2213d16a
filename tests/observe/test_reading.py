"""Tables from two pages of /metrics, as the service writes them."""

from __future__ import annotations

import random

import pytest

from flowinfer.errors import FlowInferError
from flowinfer.observe.exposition import render
from flowinfer.observe.metrics import Sample
from flowinfer.observe.reading import EdgeRow, between, blocked, busiest, parse
from flowinfer.runtime.waits import Waits

EDGE = "lookup -> prefill"


def page(messages: float, busy: float, queue: float = 0.0, tokens: float = 0.0, waits: Waits | None = None) -> str:
    edge = {"edge": EDGE}
    front: list[Sample] = [
        ("flowinfer:edge_messages_total", edge, messages),
        ("flowinfer:edge_bytes_total", edge, messages * 100),
        ("flowinfer:edge_queue_messages", edge, queue),
        ("flowinfer:edge_credit", edge | {"lane": "short"}, 3.0),
        ("flowinfer:edge_credit", edge | {"lane": "long"}, 2.0),
        ("flowinfer:edge_messages_total", {"edge": "api -> lookup"}, messages),
        ("flowinfer:edge_queue_messages", {"edge": "api -> lookup"}, queue),
        ("flowinfer:generation_tokens_total", {}, tokens),
        ("flowinfer:worker_up", {"worker": "front.0"}, 1.0),
    ]
    front += [(f"flowinfer:{name}", labels, value) for name, labels, value in (waits or Waits()).samples(EDGE)]
    prefill: list[Sample] = [
        ("flowinfer:stage_busy_seconds_total", {"stage": "prefill"}, busy),
        ("flowinfer:stage_tokens_total", {"stage": "prefill"}, tokens),
        ("flowinfer:stage_memory_bytes", {"stage": "prefill"}, 3e8),
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
    edge, call = now.edges
    assert (edge.rate, edge.bytes_per_s, edge.queue, edge.credit) == (10.0, 1000.0, 4.0, 5.0)
    assert (call.rate, call.bytes_per_s, call.credit) == (10.0, None, None)
    assert now.tokens == 25.0
    assert (now.stages[0].tokens, now.stages[0].memory) == (25.0, 3e8)


def test_expert_load_is_the_mean_of_layers_that_decoded() -> None:
    ratio = "flowinfer:expert_peak_ratio"
    layers = [(ratio, {"phase": "decode", "layer": str(i)}, value) for i, value in enumerate((3.0, 2.0, 0.0))]
    experts = render({"decode.0": [*layers, (ratio, {"phase": "prefill", "layer": "0"}, 9.0)]}, vllm_model="m").decode()
    assert between(parse(experts, 1.0), parse(experts, 2.0)).experts == 2.5
    dense = page(1, 1.0)
    assert between(parse(dense, 1.0), parse(dense, 2.0)).experts is None


def test_waits_are_quantiles_of_the_time_between_within_a_bucket() -> None:
    """Against the exact quantile; what was waited before the first reading doesn't count."""
    rng, waits = random.Random(1), Waits()
    for _ in range(1_000):
        waits.observe(30.0)
    before = page(0, 0, waits=waits)
    seconds = sorted(rng.lognormvariate(-5, 1) for _ in range(5_000))
    for value in seconds:
        waits.observe(value)
    row = between(parse(before, 0.0), parse(page(0, 0, waits=waits), 1.0)).edges[0]
    assert row.wait_p50_s is not None and row.wait_p95_s is not None
    assert row.wait_p50_s == pytest.approx(seconds[2_500], rel=0.35)
    assert row.wait_p95_s == pytest.approx(seconds[4_750], rel=0.35)


def test_without_messages_there_is_no_wait() -> None:
    edge, call = between(parse(page(5, 0), 0.0), parse(page(5, 0), 1.0)).edges
    assert (edge.wait_p50_s, call.wait_p95_s) == (None, None)


def row(edge: str, queue: float, credit: float | None = None) -> EdgeRow:
    return EdgeRow(edge, 1.0, None, queue, credit, None, None, "")


def test_what_blocks_an_edge_in_a_worker_is_told_by_the_edge_that_leaves_it() -> None:
    rows = [row("api -> a", 3), row("a -> b", 2), row("b -> c", 8, credit=0), row("c -> api", 0)]
    assert [blocked(one, rows) for one in rows] == [
        "on credit of c, by b -> c",
        "on credit of c, by b -> c",
        "on credit of c",
        "",
    ]


def test_a_loop_that_blocks_itself_ends_the_search() -> None:
    rows = [row("a -> b", 1), row("b -> a", 1)]
    assert blocked(rows[0], rows) == "on a"


def test_replicas_of_a_stage_are_summed() -> None:
    (stage,) = between(parse(page(0, 1.0), 0.0), parse(page(0, 1.6), 1.0)).stages
    assert (stage.workers, round(stage.busy, 6)) == (2, 1.2)
    assert busiest([stage]) == "prefill"


def test_a_worker_shows_its_memory_and_blocks() -> None:
    workers = {row.worker: row for row in between(parse(page(0, 0), 0.0), parse(page(0, 0), 1.0)).workers}
    assert (workers["prefill.0"].kv_blocks, workers["prefill.0"].kv_free) == (64.0, 60.0)
    assert workers["front.0"].kv_blocks is None


def test_a_counter_that_began_anew_never_gives_a_negative_rate() -> None:
    edge = between(parse(page(1000, 0), 0.0), parse(page(5, 0), 1.0)).edges[0]
    assert edge.rate == 5.0


@pytest.mark.parametrize("text", ["", "other_metric 1\n", "<html>"])
def test_a_page_of_somebody_else_is_refused(text: str) -> None:
    with pytest.raises(FlowInferError):
        parse(text, 0.0)
