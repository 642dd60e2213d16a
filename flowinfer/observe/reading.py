"""Two readings of /metrics as tables of what flows: per edge, stage and worker. Pure; fetches and prints nothing."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from flowinfer.errors import FlowInferError
from flowinfer.observe.catalog import PREFIX

Key = tuple[str, tuple[tuple[str, str], ...]]


class Reading(msgspec.Struct):
    """The samples of one page, without the prefix of their names, and when it was read, in seconds."""

    at: float
    samples: dict[Key, float]

    def values(self, name: str, **labels: str) -> dict[Key, float]:
        """Samples of this name that have these labels."""
        wanted = labels.items()
        return {key: value for key, value in self.samples.items() if key[0] == name and wanted <= dict(key[1]).items()}

    def total(self, name: str, **labels: str) -> float | None:
        """Their sum; None when there is none."""
        found = self.values(name, **labels)
        return sum(found.values()) if found else None

    def label_values(self, name: str, label: str) -> list[str]:
        """What this label says in samples of this name, in order of appearance."""
        return list(dict.fromkeys(dict(key[1]).get(label, "") for key in self.samples if key[0] == name))


class EdgeRow(msgspec.Struct):
    """One edge. rate in messages/s; bytes_per_s and credit only between workers: inside one, an edge is a call.

    wait_p50_s, wait_p95_s: from a message's making to its being taken, None where none was; between workers a sample.
    blocked: what the messages in the queue wait for.
    """

    edge: str
    rate: float
    bytes_per_s: float | None
    queue: float
    credit: float | None
    wait_p50_s: float | None
    wait_p95_s: float | None
    blocked: str


class StageRow(msgspec.Struct):
    """One stage. busy: share of the time that its workers spent in it, 0 to 1 a worker; batch: sequences now.

    tokens: a second, in what it took (in a loop, what goes round; else in what it sent). memory: bytes by which its
    workers grew when they opened it; a model that stages share is the first one's.
    """

    stage: str
    workers: int
    busy: float
    rate: float
    tokens: float | None
    batch: float | None
    memory: float | None
    waiting: float | None
    failed: float


class WorkerRow(msgspec.Struct):
    """One process. cpu: cores in use; KV blocks where it has any."""

    worker: str
    up: bool
    restarts: float
    memory: float
    cpu: float
    kv_blocks: float | None
    kv_free: float | None


class Snapshot(msgspec.Struct):
    """What flowed between two readings. Rates are a second; ttft_s and itl_s are means of that time.

    experts: rows of the busiest expert over the mean expert's while decoding, mean of all layers; None without any.
    """

    seconds: float
    running: float
    waiting: float
    requests: float
    failed: float
    tokens: float
    ttft_s: float | None
    itl_s: float | None
    accepted: float | None
    cached: float | None
    experts: float | None
    late: float
    edges: list[EdgeRow]
    stages: list[StageRow]
    workers: list[WorkerRow]


def parse(page: str, at: float) -> Reading:
    """A page of /metrics. Raises FlowInferError when it isn't one of a FlowInfer service."""
    samples: dict[Key, float] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples if family.name.startswith(PREFIX) else ():
                samples[sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items()))] = sample.value
    except ValueError as error:
        raise FlowInferError(f"the page isn't in Prometheus' format: {error}.") from error
    if not samples:
        raise FlowInferError(
            "the page holds no metrics of FlowInfer.", help="Is it the address of a FlowInfer service?"
        )
    return Reading(at, samples)


def between(before: Reading, after: Reading) -> Snapshot:
    """The tables of the time from one reading to the next."""
    return _Between(before, after).snapshot()


class _Between:
    def __init__(self, before: Reading, after: Reading) -> None:
        self.before, self.after = before, after
        self.seconds = max(after.at - before.at, 1e-9)

    def grown(self, name: str, **labels: str) -> float:
        """By how much a counter rose; a service that was started again begins at nought."""
        now, then = self.after.total(name, **labels) or 0.0, self.before.total(name, **labels) or 0.0
        return now - then if now >= then else now

    def rate(self, name: str, **labels: str) -> float:
        return self.grown(name, **labels) / self.seconds

    def share(self, top: str, under: str, **labels: str) -> float | None:
        below = self.grown(under, **labels)
        return self.grown(top, **labels) / below if below else None

    def mean_level(self, name: str, **labels: str) -> float | None:
        """Of a gauge that is 0 where there was nothing to measure."""
        found = [value for value in self.after.values(name, **labels).values() if value]
        return sum(found) / len(found) if found else None

    def snapshot(self) -> Snapshot:
        level = self.after.total
        return Snapshot(
            self.seconds,
            level("requests_running") or 0.0,
            level("requests_waiting") or 0.0,
            self.rate("requests_received_total"),
            self.rate("requests_failed_total"),
            self.rate("generation_tokens_total"),
            self.share("time_to_first_token_seconds_sum", "time_to_first_token_seconds_count"),
            self.share("inter_token_latency_seconds_sum", "inter_token_latency_seconds_count"),
            self.share("spec_accepted_tokens_total", "spec_draft_tokens_total"),
            self.share("prefix_cache_hits_tokens_total", "prefix_cache_queries_tokens_total"),
            self.mean_level("expert_peak_ratio", phase="decode"),
            self.rate("refused_late_frames_total"),
            self.edges(),
            [self.stage(name) for name in self.after.label_values("stage_busy_seconds_total", "stage")],
            [self.worker(name) for name in self.after.label_values("worker_up", "worker")],
        )

    def edges(self) -> list[EdgeRow]:
        rows = [self.edge(name) for name in self.after.label_values("edge_messages_total", "edge")]
        for row in rows:
            row.blocked = blocked(row, rows)
        return rows

    def edge(self, name: str) -> EdgeRow:
        is_call = self.after.total("edge_credit", edge=name) is None
        return EdgeRow(
            name,
            self.rate("edge_messages_total", edge=name),
            None if is_call else self.rate("edge_bytes_total", edge=name),
            self.after.total("edge_queue_messages", edge=name) or 0.0,
            self.after.total("edge_credit", edge=name),
            self.quantile(0.5, "edge_wait_seconds", edge=name),
            self.quantile(0.95, "edge_wait_seconds", edge=name),
            "",
        )

    def quantile(self, share: float, name: str, **labels: str) -> float | None:
        """Of a histogram's growth, straight between the bounds of a bucket, as Prometheus does it."""
        bounds = sorted({dict(key[1])["le"] for key in self.after.values(f"{name}_bucket", **labels)}, key=float)
        counts = [self.grown(f"{name}_bucket", **labels, le=bound) for bound in bounds]
        if not counts or counts[-1] <= 0:
            return None
        wanted, below, low = share * counts[-1], 0.0, 0.0
        for bound, count in zip(bounds, counts, strict=True):
            high = float(bound)
            if count >= wanted and count > below:
                return low if high == float("inf") else low + (high - low) * (wanted - below) / (count - below)
            below, low = count, high
        return low

    def stage(self, name: str) -> StageRow:
        return StageRow(
            name,
            len(self.after.values("stage_busy_seconds_total", stage=name)),
            self.rate("stage_busy_seconds_total", stage=name),
            self.rate("stage_messages_total", stage=name),
            None
            if self.after.total("stage_tokens_total", stage=name) is None
            else self.rate("stage_tokens_total", stage=name),
            self.after.total("batch_sequences", stage=name),
            self.after.total("stage_memory_bytes", stage=name),
            self.after.total("queue_prompts", stage=name),
            self.rate("stage_failures_total", stage=name),
        )

    def worker(self, name: str) -> WorkerRow:
        return WorkerRow(
            name,
            bool(self.after.total("worker_up", worker=name)),
            self.after.total("worker_restarts_total", worker=name) or 0.0,
            self.after.total("worker_resident_bytes", worker=name) or 0.0,
            self.rate("worker_cpu_seconds_total", worker=name),
            self.after.total("kv_blocks", worker=name),
            self.after.total("kv_blocks_free", worker=name),
        )


def blocked(row: EdgeRow, rows: Iterable[EdgeRow]) -> str:
    """What an edge waits for: credit of its consumer, or in a worker what that one's own outputs wait for."""
    by_source = {other.edge.partition(" -> ")[0]: other for other in rows if other.queue and other is not row}
    seen, at = [row], row
    while at.queue:
        consumer = at.edge.rpartition("-> ")[2]
        if at.credit is not None:
            return f"on credit of {consumer}" + (f", by {at.edge}" if at is not row else "")
        following = by_source.get(consumer)
        if following is None or following in seen:
            return f"on {consumer}"
        seen.append(following)
        at = following
    return ""


def busiest(rows: Iterable[StageRow]) -> str:
    """The stage that the service waits for, judged by its busy share; "" for none."""
    top = max(rows, key=lambda row: row.busy, default=None)
    return top.stage if top is not None and top.busy > 0.5 else ""
