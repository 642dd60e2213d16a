"""Draws the Grafana dashboard from the metric catalog: a row per area, a panel per metric, and a few ratios."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flowinfer.observe.catalog import CATALOG, PREFIX, ROWS, Metric

UID = "flowinfer"
SCHEMA_VERSION = 39  # Grafana 11
WIDTH, HEIGHT = 8, 7  # three panels a line of 24 columns
WINDOW = "$__rate_interval"
QUANTILES = (0.5, 0.95, 0.99)
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Ratio:
    """A panel that divides the rates of two counters, one line for each value of `by` where that is a label."""

    title: str
    row: str
    part: str
    whole: str
    unit: str = "percentunit"
    by: str = ""


RATIOS = (
    Ratio(
        "Prefix cache hit rate", "Prefix cache", "prefix_cache_hits_tokens_total", "prefix_cache_queries_tokens_total"
    ),
    Ratio("Draft tokens accepted", "Speculation", "spec_accepted_tokens_total", "spec_draft_tokens_total"),
    Ratio("Accepted tokens a draft", "Speculation", "spec_accepted_tokens_total", "spec_drafts_total", "short"),
    Ratio(
        "Drafts that held, by confidence",
        "Speculation",
        "spec_confidence_held_total",
        "spec_confidence_guesses_total",
        by="confidence",
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's JSON model."""
    return {
        "uid": UID,
        "title": "FlowInfer",
        "tags": ["flowinfer", "llm"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource_variable(), _worker_variable()]},
        "annotations": {"list": []},
        "panels": _numbered(_panels()),
    }


def text() -> str:
    """The dashboard as the file that is committed."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


def _panels() -> Iterator[dict[str, Any]]:
    y = 0
    for row in ROWS:
        yield {"type": "row", "title": row, "collapsed": False, "panels": [], "gridPos": _place(0, y, 24, 1)}
        panels = [_metric_panel(metric) for metric in CATALOG if metric.row == row]
        panels += [_ratio_panel(ratio) for ratio in RATIOS if ratio.row == row]
        for index, panel in enumerate(panels):
            yield panel | {"gridPos": _place(index % 3 * WIDTH, y + 1 + index // 3 * HEIGHT, WIDTH, HEIGHT)}
        y += 1 + -(-len(panels) // 3) * HEIGHT


def _metric_panel(metric: Metric) -> dict[str, Any]:
    targets = {"counter": _rate, "gauge": _level, "histogram": _quantiles}[metric.type](metric)
    unit = _rate_unit(metric) if metric.type == "counter" else metric.unit
    return _graph(_title(metric), metric.help, unit, targets)


def _rate(metric: Metric) -> list[tuple[str, str]]:
    by = _by(metric)
    return [(f"sum by ({by}) (rate({_selected(metric)}[{WINDOW}]))", _legend(by))]


def _level(metric: Metric) -> list[tuple[str, str]]:
    by = ", ".join(dict.fromkeys(("worker", *metric.labels)))
    return [(f"sum by ({by}) ({_selected(metric)})", _legend(by))]


def _quantiles(metric: Metric) -> list[tuple[str, str]]:
    by = ", ".join(("le", *metric.labels))
    rates = f"sum by ({by}) (rate({_selected(metric, '_bucket')}[{WINDOW}]))"
    legend = f" {_legend(', '.join(metric.labels))}" if metric.labels else ""
    return [(f"histogram_quantile({q}, {rates})", f"p{q * 100:g}{legend}") for q in QUANTILES]


def _ratio_panel(ratio: Ratio) -> dict[str, Any]:
    sum_by = f"sum by ({ratio.by}) " if ratio.by else "sum"
    rates = [f'{sum_by}(rate({PREFIX}{name}{{worker=~"$worker"}}[{WINDOW}]))' for name in (ratio.part, ratio.whole)]
    return _graph(ratio.title, "", ratio.unit, [(" / ".join(rates), _legend(ratio.by) if ratio.by else ratio.title)])


def _selected(metric: Metric, suffix: str = "") -> str:
    return f'{metric.full_name}{suffix}{{worker=~"$worker"}}'


def _by(metric: Metric) -> str:
    return ", ".join(metric.labels or ("worker",))


def _legend(by: str) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in by.split(", "))


def _rate_unit(metric: Metric) -> str:
    return {"bytes": "Bps", "s": "percentunit"}.get(metric.unit, "cps")


def _title(metric: Metric) -> str:
    words = metric.name.removesuffix("_total").removesuffix("_seconds").removesuffix("_bytes").replace("_", " ")
    return words[0].upper() + words[1:]


def _graph(title: str, description: str, unit: str, targets: Iterable[tuple[str, str]]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "description": description,
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expr, "legendFormat": legend, "range": True}
            for index, (expr, legend) in enumerate(targets)
        ],
    }


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}


def _worker_variable() -> dict[str, Any]:
    query = f"label_values({PREFIX}worker_up, worker)"
    return {
        "name": "worker",
        "label": "Worker",
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "workers"},
        "refresh": 2,  # when the time range changes
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _numbered(panels: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"id": number} | panel for number, panel in enumerate(panels, start=1)]
