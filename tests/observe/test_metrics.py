"""The catalog is the only place where metrics are defined, and everything made from it agrees."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from flowinfer.errors import FlowInferError
from flowinfer.observe import exposition, grafana, metrics
from flowinfer.observe.catalog import BY_NAME, CATALOG, PREFIX, ROWS
from flowinfer.observe.fleet import Fleet
from flowinfer.observe.tally import Tally

COMMITTED = Path(__file__).parents[2] / "dashboards" / "flowinfer.json"
FUNCTIONS = {"sum", "by", "rate", "histogram_quantile"}


@pytest.mark.parametrize("metric", CATALOG, ids=lambda metric: metric.name)
def test_a_definition_is_whole(metric: Any) -> None:
    assert metric.help.endswith(".")
    assert metric.row in ROWS
    assert metric.name.endswith("_total") == (metric.type == "counter")
    assert bool(metric.buckets) == (metric.type == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(CATALOG)
    vllm = [metric.vllm for metric in CATALOG if metric.vllm]
    assert len(vllm) == len(set(vllm))


def test_a_counter_counts_into_the_snapshot() -> None:
    bound = metrics.counter("stage_messages_total").labels(stage="mine")
    bound.inc(3)
    assert ("flowinfer:stage_messages_total", {"stage": "mine"}, 3.0) in metrics.snapshot()


def test_a_histogram_gives_buckets_count_and_sum() -> None:
    metrics.histogram("step_seconds").labels(stage="mine").observe(0.003)
    samples = {
        (name, labels.get("le")): value for name, labels, value in metrics.snapshot() if labels.get("stage") == "mine"
    }
    assert samples["flowinfer:step_seconds_bucket", "0.0025"] == 0
    assert samples["flowinfer:step_seconds_bucket", "0.005"] == 1
    assert samples["flowinfer:step_seconds_count", None] == 1


@given(st.lists(st.sampled_from([0.0, 0.0005, 0.001, 0.0011, 0.5, 3.0, 1e9]), max_size=20))
def test_a_tally_says_what_a_histogram_says(values: list[float]) -> None:
    bounds, mine, theirs = (0.001, 0.01, 1, 2560), CollectorRegistry(), CollectorRegistry()
    tally, histogram = Tally("x", "X.", bounds, mine), Histogram("x", "X.", buckets=bounds, registry=theirs)
    for value in values:
        tally.observe(value)
        histogram.observe(value)
    assert generate_latest(mine).splitlines() == [
        line for line in generate_latest(theirs).splitlines() if b"_created" not in line
    ]


def test_undefined_names_and_wrong_types_are_refused() -> None:
    with pytest.raises(FlowInferError, match=r"catalog\.py"):
        metrics.counter("made_up_total")
    with pytest.raises(FlowInferError):
        metrics.gauge("stage_messages_total")


def test_samples_of_workers_keep_their_label_or_get_one() -> None:
    samples = [("flowinfer:worker_up", {"worker": "decode.0"}, 1.0), ("flowinfer:kv_blocks", {}, 8.0)]
    page = exposition.render({"front.0": samples}).decode()
    assert 'flowinfer:worker_up{worker="decode.0"} 1.0' in page
    assert 'flowinfer:kv_blocks{worker="front.0"} 8.0' in page
    assert "# TYPE flowinfer:kv_blocks gauge" in page


def test_counters_go_on_over_a_restart_and_levels_do_not() -> None:
    fleet = Fleet()
    first = [("a_total", {"x": "1"}, 5.0), ("b_total", {}, 1.0), ("level", {}, 3.0)]
    fleet.update("w.0", first)
    fleet.down("w.0")
    assert sorted(fleet.samples()["w.0"]) == [("a_total", {"x": "1"}, 5.0), ("b_total", {}, 1.0)]
    fleet.update("w.0", [("a_total", {"x": "1"}, 2.0), ("level", {}, 4.0)])
    wanted = [("a_total", {"x": "1"}, 7.0), ("b_total", {}, 1.0), ("level", {}, 4.0)]
    assert sorted(fleet.samples()["w.0"]) == wanted


# ----------------------------------------------------------------------------------------------------------- dashboard


def expressions() -> list[str]:
    return [target["expr"] for panel in grafana.dashboard()["panels"] for target in panel.get("targets", [])]


def defined_series() -> set[str]:
    suffixes = {"histogram": ("_bucket", "_count", "_sum")}
    return {m.full_name + suffix for m in CATALOG for suffix in suffixes.get(m.type, ("",))}


def test_the_committed_dashboard_is_up_to_date() -> None:
    assert COMMITTED.read_text(encoding="utf-8") == grafana.text(), "run `flowinfer dashboards build`"


def test_every_query_asks_for_metrics_that_exist() -> None:
    for expr in expressions():
        asked = re.findall(rf"{PREFIX}\w+", expr)
        assert asked
        assert set(asked) <= defined_series()


def test_every_query_groups_by_labels_that_exist() -> None:
    for expr in expressions():
        names = set(re.findall(rf"{PREFIX}(\w+?)(?:_bucket)?\{{", expr))
        labels = {"worker", "le", *set.intersection(*(set(BY_NAME[name].labels) for name in names))}
        for group in re.findall(r"by \(([^)]*)\)", expr):
            assert set(group.split(", ")) <= labels


def test_every_metric_has_a_panel() -> None:
    shown = {name for expr in expressions() for name in re.findall(rf"{PREFIX}(\w+?)(?:_bucket)?\{{", expr)}
    assert shown == set(BY_NAME)


def test_parentheses_balance() -> None:
    for expr in expressions():
        assert expr.count("(") == expr.count(")")
        assert expr.count("{") == expr.count("}")


def test_panels_have_their_own_place_and_number() -> None:
    panels = json.loads(grafana.text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells


def test_it_is_a_dashboard_of_grafana_11() -> None:
    model = grafana.dashboard()
    assert model["schemaVersion"] >= 39
    assert {variable["name"] for variable in model["templating"]["list"]} == {"datasource", "worker"}
    assert [panel["title"] for panel in model["panels"] if panel["type"] == "row"] == list(ROWS)
