"""The plan: what runs where, as plain data that the supervisor hands to its workers. Decides nothing.

The graph's checker builds it; `msgspec.json.encode(plan)` is what a worker process is started with.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Dispatch = Literal["pull", "bucket", "hash", "prefix", "bucket+prefix"]
API = "api"  # the reserved stage: gives Call, takes Text; lives in the front worker
FRONT = "front"  # the worker of api and of every stage that isn't placed


Arm = Literal["", "a", "b"]  # of an experiment; "" is both


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: `config` is its resolved `with`, as JSON values; `mark` is file:line:column of its entry."""

    name: str
    kind: str
    config: dict[str, Any]
    worker: str
    mark: str = ""
    arm: Arm = ""


class EdgePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One edge: messages of type `message` (class name) from `source` into the input `port` of `target`.

    capacity is the credit that each consumer instance grants at the start, in `unit`, for each lane. lanes are bucket
    names with dispatch `bucket`, else one lane "". fused: both ends in one worker, so that it's a call.  arm: whose
    messages of an experiment it takes.
    """

    name: str
    source: str
    target: str
    message: str
    port: str
    dispatch: Dispatch = "pull"
    key: str = ""  # dispatch hash: the field of the message that is hashed, as in "cache_salt" or "id"
    lanes: tuple[str, ...] = ("",)
    capacity: int = 256
    unit: str = "messages"
    back: bool = False
    fused: bool = False
    arm: Arm = ""


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, `replicas` processes of it; `stages` in topological order.

    kv_bytes is the KV memory that the file gives each process, 0 where it says nothing: then a GPU gives what is free,
    and the host tier_bytes, the process's part of the memory tier, or a default.
    """

    name: str
    stages: tuple[str, ...]
    replicas: int = 1
    device: str = "cpu"
    threads: int = 1
    kv_bytes: int = 0
    tier_bytes: int = 0
    log_level: str = ""  # "": as the service
    mark: str = ""


class ServePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP front. max_requests: open requests beyond which admission answers 429."""

    host: str = "127.0.0.1"
    port: int = 8000
    apis: tuple[str, ...] = ("openai",)
    max_requests: int = 256
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    stop_timeout_s: float = 30.0
    drain: str = ""  # of a change, as flowinfer.spec.drain reads it
    log_level: str = "info"  # of workers that name none
    tls: bool = False  # the front serves HTTPS


class NetworkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How workers reach each other: ipc sockets in the run directory, or tcp bound to `bind` (CURVE off loopback)."""

    transport: Literal["ipc", "tcp"] = "ipc"
    bind: str = "127.0.0.1"
    curve_public_key: str = ""
    curve_secret_key_file: str = ""


class ExperimentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """An experiment: what its arm B gets. base: digest of the plan without it.

    digest: of what both arms are, whatever their shares.  changes: a unified diff from A's resolved file to B's.
    workers: those that only arm B has.
    """

    name: str
    mode: Literal["split", "mirror"]
    share: float
    base: str
    digest: str
    changes: str
    workers: tuple[str, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A checked service. digest names the document that it came from; epoch rises with each live change.

    kernels: with batch_invariant, what computes here, see `kernel_set`; blocks of another set are never reused.
    """

    name: str
    digest: str
    file: str
    stages: dict[str, StagePlan]
    edges: tuple[EdgePlan, ...]
    workers: dict[str, WorkerPlan]
    serve: ServePlan = ServePlan()
    network: NetworkPlan = NetworkPlan()
    allow_local: bool = False
    epoch: int = 1
    kernels: str = ""
    experiment: ExperimentPlan | None = None

    def log_level(self, worker: str) -> str:
        """From which level on the processes of this worker log."""
        return self.workers[worker].log_level or self.serve.log_level
