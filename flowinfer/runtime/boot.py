"""What a worker process is started with, and what it reports when it can't go on. Plain data, JSON on pipes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from flowinfer.engine.layout import KVLayout
from flowinfer.graph.plan import Plan


class ArenaRange(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's share of a KV arena: block ids first_block up to end_block of the memory behind fd."""

    layout: KVLayout
    fd: int
    num_blocks: int
    first_block: int
    end_block: int
    shared: bool = False
    quarantined: dict[str, tuple[str, tuple[int, ...]]] = {}  # by request id: who reads it, and its blocks


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a worker needs to begin. life_fd reads end-of-file once the supervisor is dead."""

    plan: Plan
    worker: str
    replica: int
    generation: int
    run_dir: str
    supervisor_data: str
    supervisor_control: str
    life_fd: int
    threads: int = 1
    crowded: bool = False  # the workers that run models have more threads than there are cores
    device: str = "cpu"
    engine_index: int = 0  # of the instances that run models, which `auto` spreads over the GPUs
    num_engines: int = 1
    listener_fd: int | None = None
    arenas: tuple[ArenaRange, ...] = ()

    @property
    def name(self) -> str:
        """The instance, as in prefill.0."""
        return f"{self.worker}.{self.replica}"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A line in a worker's report: the stage that is being opened, or why the worker gave up.

    error: one line for people; trace: for the log, "" when the error was raised on purpose.
    """

    opening: str = ""
    error: str = ""
    help: str = ""
    trace: str = ""


def report_path(run_dir: str | Path, instance: str, generation: int) -> Path:
    """The file in which a worker reports. A file, not a pipe: it outlives a supervisor that dies."""
    return Path(run_dir) / f"{instance}.{generation}.report"
