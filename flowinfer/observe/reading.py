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
    """One queue between workers. rate in messages/s; wait in seconds a message spent waiting for credit, on average."""

    edge: str
    rate: float
    bytes_per_s: float
    queue: float
    credit: float
    wait_s: float | None
    blocked: str


class StageRow(msgspec.Struct):
    """One stage. busy: share of the time that its workers spent in it, 0 to 1 a worker; batch: sequences now."""

    stage: str
    workers: int
    busy: float
    rate: float
    batch: float | None
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
    """What flowed between two readings. Rates are a second; ttft_s and itl_s are means of that time."""

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
            self.rate("refused_late_frames_total"),
            [self.edge(name) for name in self.after.label_values("edge_messages_total", "edge")],
            [self.stage(name) for name in self.after.label_values("stage_busy_seconds_total", "stage")],
            [self.worker(name) for name in self.after.label_values("worker_up", "worker")],
        )

    def edge(self, name: str) -> EdgeRow:
        queue, credit = self.after.total("edge_queue_messages", edge=name), self.after.total("edge_credit", edge=name)
        return EdgeRow(
            name,
            self.rate("edge_messages_total", edge=name),
            self.rate("edge_bytes_total", edge=name),
            queue or 0.0,
            credit or 0.0,
            self.share("edge_credit_wait_seconds_total", "edge_messages_total", edge=name),
            f"on credit of {name.rpartition('-> ')[2]}" if queue else "",
        )

    def stage(self, name: str) -> StageRow:
        return StageRow(
            name,
            len(self.after.values("stage_busy_seconds_total", stage=name)),
            self.rate("stage_busy_seconds_total", stage=name),
            self.rate("stage_messages_total", stage=name),
            self.after.total("batch_sequences", stage=name),
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


def busiest(rows: Iterable[StageRow]) -> str:
    """The stage that the service waits for, judged by its busy share; "" for none."""
    top = max(rows, key=lambda row: row.busy, default=None)
    return top.stage if top is not None and top.busy > 0.5 else ""
