"""The metric objects of this process, made from the catalog on first use. Serves nothing over HTTP.

Bind labels once, as in `busy = metrics.counter("stage_busy_seconds_total").labels(stage=name)`; then `busy.inc(dt)`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from flowinfer.errors import FlowInferError
from flowinfer.observe.catalog import BY_NAME, Metric
from flowinfer.observe.prometheus import CollectorRegistry, Counter, Gauge, Histogram
from flowinfer.observe.tally import Tally

Sample = tuple[str, dict[str, str], float]
Made = TypeVar("Made", Counter, Gauge, Histogram, Tally)

registry = CollectorRegistry()
_lock = threading.Lock()
_made: dict[str, Counter | Gauge | Histogram | Tally] = {}


def counter(name: str) -> Counter:
    """The counter of this name in the catalog. Raises FlowInferError for a name that isn't there."""
    return _get(name, Counter, lambda m: Counter(m.full_name, m.help, m.labels, registry=registry))


def gauge(name: str) -> Gauge:
    """The gauge of this name. Raises FlowInferError for a name not in the catalog."""
    return _get(name, Gauge, lambda m: Gauge(m.full_name, m.help, m.labels, registry=registry))


def histogram(name: str) -> Histogram:
    """The histogram of this name. Raises FlowInferError for a name not in the catalog."""
    return _get(
        name, Histogram, lambda m: Histogram(m.full_name, m.help, m.labels, buckets=m.buckets, registry=registry)
    )


def tally(name: str) -> Tally:
    """The histogram of this name, without labels, for a path on which each token counts. One thread observes."""
    return _get(name, Tally, lambda m: Tally(m.full_name, m.help, m.buckets, registry), kind="histogram")


def snapshot() -> list[Sample]:
    """All samples of this process: (name, labels, value), histograms as _bucket, _count and _sum."""
    families = registry.collect()
    return [
        (sample.name, dict(sample.labels), sample.value)
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


def _get(name: str, cls: type[Made], make: Callable[[Metric], Made], *, kind: str = "") -> Made:
    with _lock:
        found = _made.get(name)
        if found is None:
            found = _made[name] = make(_defined(name, kind or cls.__name__.lower()))
    if not isinstance(found, cls):
        raise FlowInferError(f"metric {name!r} is a {type(found).__name__.lower()}, not a {cls.__name__.lower()}.")
    return found


def _defined(name: str, kind: str) -> Metric:
    metric = BY_NAME.get(name)
    if metric is None or metric.type != kind:
        raise FlowInferError(f"no {kind} {name!r} is defined.", help="Add it to flowinfer/observe/catalog.py.")
    return metric
