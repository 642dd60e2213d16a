"""prometheus_client's classes, or, where it isn't installed, stand-ins that count nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
    from prometheus_client.registry import Collector
else:
    try:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
        from prometheus_client.registry import Collector
    except ImportError:

        class Uncounted:
            """Takes what a metric takes and forgets it."""

            def __init__(self, *args: Any, **options: Any) -> None:
                pass

            def labels(self, *args: Any, **labels: Any) -> Uncounted:
                return self

            def inc(self, *args: Any) -> None:
                pass

            dec = set = observe = set_function = register = inc

            def collect(self) -> list[Any]:
                return []

        CollectorRegistry, Counter, Gauge, Histogram, Metric, Collector = (
            type(name, (Uncounted,), {})
            for name in ("CollectorRegistry", "Counter", "Gauge", "Histogram", "Metric", "Collector")
        )

__all__ = ["Collector", "CollectorRegistry", "Counter", "Gauge", "Histogram", "Metric"]
