"""Every metric of the service in one table. Prometheus objects, the dashboard and the docs are made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MetricType = Literal["counter", "gauge", "histogram"]
PREFIX = "flowinfer:"

# The bucket bounds that dashboards for LLM servers are drawn for; seconds.
# fmt: off
Bounds = tuple[float, ...]
TTFT_BUCKETS: Bounds = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)
ITL_BUCKETS: Bounds = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_BUCKETS: Bounds = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)
STEP_BUCKETS: Bounds = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
WAIT_BUCKETS: Bounds = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60,
)
# fmt: on

# Rows of the dashboard, in order.
ROWS = (
    "Traffic",
    "Latency",
    "Experiment",
    "Edges",
    "Stages",
    "Prefix cache",
    "Speculation",
    "Experts",
    "KV pool",
    "KV transfer",
    "Workers",
)


@dataclass(frozen=True)
class Metric:
    """One metric. `name` lacks the prefix; `unit` as in Grafana; `vllm` is its name in the vLLM-compatible subset."""

    name: str
    type: MetricType
    help: str
    row: str
    labels: tuple[str, ...] = ()
    unit: str = "short"
    buckets: tuple[float, ...] = ()
    vllm: str = ""

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def _counter(name: str, help: str, row: str, *labels: str, unit: str = "short", vllm: str = "") -> Metric:
    return Metric(name, "counter", help, row, labels, unit, vllm=vllm)


def _gauge(name: str, help: str, row: str, *labels: str, unit: str = "short", vllm: str = "") -> Metric:
    return Metric(name, "gauge", help, row, labels, unit, vllm=vllm)


def _seconds(name: str, help: str, row: str, buckets: tuple[float, ...], *labels: str, vllm: str = "") -> Metric:
    return Metric(name, "histogram", help, row, labels, "s", buckets, vllm)


TRAFFIC = (
    _counter("requests_received_total", "Requests admitted.", "Traffic"),
    _counter("requests_finished_total", "Requests that ended, by reason.", "Traffic", "reason", vllm="request_success"),
    _counter("requests_failed_total", "Requests that failed, by error code.", "Traffic", "code"),
    _counter(
        "admission_rejections_total", "Requests refused at the door.", "Traffic", "reason", vllm="admission_rejections"
    ),
    _counter("cancellations_total", "Requests stopped before their end, by cause.", "Traffic", "cause"),
    _gauge("requests_running", "Requests that have begun to answer.", "Traffic", vllm="num_requests_running"),
    _gauge("requests_waiting", "Requests without a first token yet.", "Traffic", vllm="num_requests_waiting"),
    _counter("prompt_tokens_total", "Prompt tokens of ended requests.", "Traffic", vllm="prompt_tokens"),
    _counter("generation_tokens_total", "Tokens generated.", "Traffic", vllm="generation_tokens"),
    _counter("late_pieces_total", "Text that came for requests already closed, and was dropped.", "Traffic"),
    _counter("http_responses_total", "HTTP responses, by path and status.", "Traffic", "path", "status"),
)

LATENCY = (
    _seconds(
        "time_to_first_token_seconds",
        "Admission to first token.",
        "Latency",
        TTFT_BUCKETS,
        vllm="time_to_first_token_seconds",
    ),
    _seconds(
        "inter_token_latency_seconds",
        "Between pieces of one answer.",
        "Latency",
        ITL_BUCKETS,
        vllm="inter_token_latency_seconds",
    ),
    _seconds(
        "time_per_output_token_seconds",
        "Mean time per token after the first, one value a request.",
        "Latency",
        ITL_BUCKETS,
        vllm="request_time_per_output_token_seconds",
    ),
    _seconds(
        "request_latency_seconds", "Admission to end.", "Latency", REQUEST_BUCKETS, vllm="e2e_request_latency_seconds"
    ),
    _seconds(
        "request_queue_seconds",
        "Waiting for prefill to start.",
        "Latency",
        REQUEST_BUCKETS,
        vllm="request_queue_time_seconds",
    ),
    _seconds(
        "request_prefill_seconds",
        "Prefill start to its end.",
        "Latency",
        REQUEST_BUCKETS,
        vllm="request_prefill_time_seconds",
    ),
)

EXPERIMENT = (
    _counter(
        "arm_requests_total",
        "Requests and copies of an experiment that ended, by arm and result.",
        "Experiment",
        "experiment",
        "arm",
        "result",
    ),
    _counter(
        "mirror_dropped_total",
        "Copies that weren't sent or were given up, by reason.",
        "Experiment",
        "experiment",
        "reason",
    ),
    _seconds(
        "arm_time_to_first_token_seconds",
        "Admission to first token, by arm.",
        "Experiment",
        TTFT_BUCKETS,
        "experiment",
        "arm",
    ),
    _seconds(
        "arm_time_per_output_token_seconds",
        "Mean time per token after the first, by arm.",
        "Experiment",
        ITL_BUCKETS,
        "experiment",
        "arm",
    ),
    _seconds(
        "arm_request_latency_seconds", "Admission to end, by arm.", "Experiment", REQUEST_BUCKETS, "experiment", "arm"
    ),
)

EDGES = (
    _counter("edge_messages_total", "Messages sent on an edge.", "Edges", "edge"),
    _counter("edge_bytes_total", "Bytes sent on an edge between workers.", "Edges", "edge", unit="bytes"),
    _gauge("edge_queue_messages", "Messages waiting at the sender for credit.", "Edges", "edge"),
    _gauge("edge_credit", "Credit left, in the unit of the edge.", "Edges", "edge", "lane"),
    _seconds("edge_wait_seconds", "From a message's making to its taking; a sample.", "Edges", WAIT_BUCKETS, "edge"),
    _counter("edge_credit_wait_seconds_total", "Time that messages waited for credit.", "Edges", "edge", unit="s"),
    _counter("refused_late_frames_total", "Messages refused: closed id, old epoch or generation.", "Edges", "reason"),
    _counter("sequences_moved_total", "Running sequences that left a decoding worker, by how.", "Edges", "by"),
    _counter("malformed_frames_total", "Frames that weren't ours, dropped.", "Edges"),
)

STAGES = (
    _counter("stage_busy_seconds_total", "Time spent in step().", "Stages", "stage", unit="s"),
    _counter("stage_messages_total", "Messages taken by a stage.", "Stages", "stage"),
    _counter("stage_tokens_total", "Tokens in the messages that a stage took.", "Stages", "stage"),
    _gauge("stage_memory_bytes", "Memory that opening the stage took.", "Stages", "stage", unit="bytes"),
    _counter("stage_failures_total", "Requests that failed in a stage.", "Stages", "stage"),
    _seconds("step_seconds", "Duration of one step that had work.", "Stages", STEP_BUCKETS, "stage"),
    _gauge("batch_sequences", "Sequences in the running batch.", "Stages", "stage"),
    _gauge("queue_prompts", "Prompts waiting in a stage.", "Stages", "stage", "bucket"),
)

CACHE = (
    _counter(
        "prefix_cache_queries_tokens_total", "Prompt tokens looked up.", "Prefix cache", vllm="prefix_cache_queries"
    ),
    _counter("prefix_cache_hits_tokens_total", "Prompt tokens reused.", "Prefix cache", vllm="prefix_cache_hits"),
    _counter(
        "prefix_replay_tokens_total", "Prompt tokens run again for their window keys alone.", "Prefix cache", "mode"
    ),
    _counter(
        "prefix_cache_unused_tokens_total", "Cached prompt tokens that hits were shortened by.", "Prefix cache", "mode"
    ),
    _counter("prefix_cache_evictions_total", "Cached blocks evicted.", "Prefix cache"),
    _gauge("prefix_cache_blocks", "Blocks whose content is cached.", "Prefix cache"),
    _counter("cache_tier_blocks_total", "Blocks of lower tiers, by what was done.", "Prefix cache", "tier", "event"),
    _counter(
        "cache_tier_faults_total", "Reads and writes of lower tiers that failed.", "Prefix cache", "tier", "cause"
    ),
    _gauge("cache_tier_read_bytes_per_second", "Speed of restoring.", "Prefix cache", "tier", unit="Bps"),
    _seconds("cache_tier_restore_seconds", "Duration of restoring a prefix.", "Prefix cache", WAIT_BUCKETS, "tier"),
)

SPECULATION = (
    _counter("spec_drafts_total", "Drafts verified.", "Speculation", vllm="spec_decode_num_drafts"),
    _counter("spec_draft_tokens_total", "Draft tokens verified.", "Speculation", vllm="spec_decode_num_draft_tokens"),
    _counter(
        "spec_accepted_tokens_total", "Draft tokens accepted.", "Speculation", vllm="spec_decode_num_accepted_tokens"
    ),
    _counter(
        "spec_drafted_per_position_total", "Draft tokens verified, by position in the draft.", "Speculation", "position"
    ),
    _counter(
        "spec_accepted_per_position_total",
        "Draft tokens accepted, by position in the draft.",
        "Speculation",
        "position",
        vllm="spec_decode_num_accepted_tokens_per_pos",
    ),
    _counter(
        "spec_confidence_guesses_total",
        "Draft tokens that were put to the test, by their confidence, rounded down to a tenth.",
        "Speculation",
        "confidence",
    ),
    _counter(
        "spec_confidence_held_total",
        "Of those, the ones that came true: a share equal to the confidence means that it can be trusted.",
        "Speculation",
        "confidence",
    ),
)

EXPERTS = (
    _gauge(
        "expert_peak_ratio", "Rows of the busiest expert over the mean, last 100 steps.", "Experts", "phase", "layer"
    ),
    _gauge(
        "expert_worker_peak_ratio",
        "Load of the busiest worker over the mean, mean of all layers, last 100 steps, by where experts would lie.",
        "Experts",
        "stage",
        "placement",
    ),
    _counter("expert_placements_total", "Times that experts were placed anew.", "Experts", "stage"),
    _counter("expert_moves_total", "Copies of experts that such a placement moves.", "Experts", "stage"),
)

KV_POOL = (
    _gauge("kv_blocks", "Blocks that the worker owns.", "KV pool"),
    _gauge("kv_blocks_free", "Blocks free now.", "KV pool"),
    _gauge(
        "kv_cache_usage_ratio",
        "Share of blocks in use, 0 to 1.",
        "KV pool",
        unit="percentunit",
        vllm="kv_cache_usage_perc",
    ),
    _counter("preemptions_total", "Sequences put back for want of blocks.", "KV pool", vllm="num_preemptions"),
)

TRANSFER = (
    _counter("transfer_bytes_total", "KV bytes moved between workers.", "KV transfer", "transport", unit="bytes"),
    _seconds("transfer_seconds", "Duration of one KV hand-over.", "KV transfer", STEP_BUCKETS, "transport"),
    _seconds(
        "transfer_exposed_seconds",
        "What decode waited for KV after prefill had ended.",
        "KV transfer",
        STEP_BUCKETS,
        "transport",
    ),
    _counter("transfer_failures_total", "KV hand-overs that failed.", "KV transfer", "reason"),
    _counter("transfer_refused_blocks_total", "KV blocks that came late or twice.", "KV transfer", "reason"),
)

WORKERS = (
    _gauge("worker_up", "1 while the worker runs.", "Workers", "worker"),
    _counter("worker_restarts_total", "Times that a worker was started again.", "Workers", "worker"),
    _gauge("worker_resident_bytes", "Resident memory of the process.", "Workers", unit="bytes"),
    _counter("worker_cpu_seconds_total", "Processor time of the process.", "Workers", unit="s"),
    _counter("log_lines_dropped_total", "Log lines that came too fast, or couldn't be written.", "Workers"),
)

CATALOG: tuple[Metric, ...] = (
    TRAFFIC + LATENCY + EXPERIMENT + EDGES + STAGES + CACHE + SPECULATION + EXPERTS + KV_POOL + TRANSFER + WORKERS
)
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in CATALOG}


def markdown() -> str:
    """All metrics as a Markdown table."""
    head = "| Metric | Type | Labels | Meaning | vLLM name |\n|---|---|---|---|---|\n"
    return head + "".join(_markdown_row(metric) for metric in CATALOG)


def _markdown_row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    vllm = f"`vllm:{metric.vllm}`" if metric.vllm else ""
    return f"| `{metric.full_name}` | {metric.type} | {labels} | {metric.help} | {vllm} |\n"
