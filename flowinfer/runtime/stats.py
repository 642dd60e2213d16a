"""The samples that a worker sends to the front: what its loop has counted, and the metrics of its stages."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flowinfer.observe import metrics

if TYPE_CHECKING:
    from flowinfer.runtime.group import Group
    from flowinfer.runtime.stage_run import StageRun
    from flowinfer.runtime.worker import Worker

Sample = tuple[str, dict[str, str], float]
_PREFIX = "flowinfer:"
_STATM = Path("/proc/self/statm")


def samples(worker: Worker) -> list[Sample]:
    """All samples of this process; names as on /metrics."""
    return loop_samples(worker) + metrics.snapshot()


def loop_samples(worker: Worker) -> list[Sample]:
    """What the loop of this worker has counted."""
    own = [*_edges(worker), *_stages(worker), *_late(worker), *_process(worker)]
    return [(_PREFIX + name, labels, value) for name, labels, value in own]


def _edges(worker: Worker) -> Iterator[Sample]:
    for name, outbox in worker.outputs.items():
        yield "edge_messages_total", {"edge": name}, float(outbox.num_sent)
        yield "edge_bytes_total", {"edge": name}, float(outbox.bytes_sent)
        yield "edge_queue_messages", {"edge": name}, float(outbox.waiting)
        yield "edge_credit_wait_seconds_total", {"edge": name}, outbox.wait_s
        for lane in outbox.edge.lanes:
            credit = sum(consumer.credit.get(lane, 0) for consumer in outbox.consumers.values())
            yield "edge_credit", {"edge": name, "lane": lane}, float(credit)
    for name, (edge, _, _) in worker.inputs.items():
        if edge.target in worker.by_name:
            yield from worker.by_name[edge.target].inboxes[edge.port].waits.samples(name)
    yield from _calls(worker)


def _calls(group: Group) -> Iterator[Sample]:
    """Edges whose ends are both here. Where several end in one port, they are told as one."""
    ends: dict[tuple[str, str], list[str]] = {}
    for edge in group.plan.edges:
        if edge.source in group.by_name and edge.target in group.by_name:
            ends.setdefault((edge.target, edge.port), []).append(edge.name)
    for (target, port), names in ends.items():
        inbox, name = group.by_name[target].inboxes[port], " + ".join(names)
        yield "edge_messages_total", {"edge": name}, float(inbox.num_taken)
        yield "edge_queue_messages", {"edge": name}, float(len(inbox.messages))
        yield from inbox.waits.samples(name, inbox.num_taken)


def _stages(group: Group) -> Iterator[Sample]:
    for run in group.runs:
        labels = {"stage": run.name}
        yield "stage_busy_seconds_total", labels, run.busy_s
        yield "stage_messages_total", labels, float(sum(inbox.num_taken for inbox in run.inboxes.values()))
        yield "stage_failures_total", labels, float(run.num_failed)
        yield "stage_memory_bytes", labels, float(run.memory)
        if (tokens := _tokens(group, run)) is not None:
            yield "stage_tokens_total", labels, float(tokens)


def _tokens(group: Group, run: StageRun) -> int | None:
    """Tokens in what a stage took, in a loop those that go round; where its inputs have none, in what it sent."""
    loops = {edge.port for edge in group.plan.edges if edge.back and edge.target == run.name}
    inboxes = [inbox for port, inbox in run.inboxes.items() if not loops or port in loops]
    taken = [inbox.num_tokens for inbox in inboxes if inbox.has_tokens]
    given = [outbox.num_tokens for outbox in run.outboxes if outbox.counts_tokens]
    return sum(taken) if taken else sum(given) if given else None


def _late(worker: Worker) -> Iterator[Sample]:
    for reason, count in worker.num_late.items():
        yield "refused_late_frames_total", {"reason": reason}, float(count)
    yield "malformed_frames_total", {}, float(worker.channel.num_malformed)


def _process(worker: Worker) -> Iterator[Sample]:
    yield "worker_up", {"worker": worker.name}, 1.0
    yield "worker_restarts_total", {"worker": worker.name}, float(worker.generation - 1)
    yield "worker_cpu_seconds_total", {}, time.process_time()
    yield "worker_resident_bytes", {}, float(resident_bytes())


def resident_bytes() -> int:
    """Bytes of memory that this process holds."""
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
