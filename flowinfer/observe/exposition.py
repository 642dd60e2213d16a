"""Writes the samples of all workers as one Prometheus page, with the subset of vLLM's names that dashboards read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from flowinfer.observe.catalog import CATALOG, Metric
from flowinfer.observe.metrics import Sample

CONTENT_TYPE = (b"content-type", CONTENT_TYPE_PLAIN_0_0_4.encode())
SUFFIXES = ("_bucket", "_count", "_sum", "_total")
_RENAMED = {"reason": "finished_reason"}  # labels of vLLM's counters


def render(workers: Mapping[str, Iterable[Sample]], *, vllm_model: str | None = None) -> bytes:
    """The page. Samples get a `worker` label; with vllm_model, `vllm:` names follow, summed over workers."""
    samples = [
        (name, _labelled(labels, worker), value) for worker, own in workers.items() for name, labels, value in own
    ]
    by_family: dict[str, list[Sample]] = {}
    for sample in samples:
        by_family.setdefault(_stem(sample[0]), []).append(sample)
    families = [_family(metric, by_family) for metric in CATALOG]
    if vllm_model is not None:
        families += [_vllm_family(metric, by_family, vllm_model) for metric in CATALOG if metric.vllm]
    return generate_latest(_Page(f for f in families if f.samples))


class _Page:
    """What generate_latest reads: anything with collect()."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Family]:
        return self._families


def _stem(name: str) -> str:
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def _labelled(labels: Mapping[str, str], worker: str) -> dict[str, str]:
    return {"worker": worker, **labels}


def _family(metric: Metric, by_family: Mapping[str, list[Sample]]) -> Family:
    stem = _stem(metric.full_name)
    family = Family(stem, metric.help, metric.type)
    for name, labels, value in by_family.get(stem, ()):
        family.add_sample(name, labels, value)
    return family


def _vllm_family(metric: Metric, by_family: Mapping[str, list[Sample]], model: str) -> Family:
    """Sums over workers, except ratios, whose highest value counts."""
    stem, name = _stem(metric.full_name), f"vllm:{metric.vllm}"
    family = Family(name, metric.help, metric.type)
    totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample, labels, value in by_family.get(stem, ()):
        kept = tuple((_RENAMED.get(key, key), text) for key, text in labels.items() if key != "worker")
        key = (sample.replace(stem, name, 1), kept)
        totals[key] = max(totals.get(key, 0.0), value) if metric.unit == "percentunit" else totals.get(key, 0.0) + value
    for (sample, kept), value in totals.items():
        family.add_sample(sample, {"model_name": model, "engine": "0", **dict(kept)}, value)
    return family
