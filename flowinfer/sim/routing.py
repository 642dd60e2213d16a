"""Several prefill workers under a virtual clock: what a way of sharing prompts out does to hits and queues.

The outbox with its policies, pools and index are the real ones. A worker computes one prompt after the other, in the
time that the dispatch's own work model gives for the tokens it doesn't find, and caches it once it is done.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np

from flowinfer.cache.index import BlockIndex
from flowinfer.cache.policies.eviction import LRU
from flowinfer.engine.pool import KVPool
from flowinfer.graph.plan import Dispatch, EdgePlan
from flowinfer.graph.planner import BUCKET_CAPACITY, DEFAULT_CAPACITY
from flowinfer.message import Message, PrefixHint, Prompt, Sampling
from flowinfer.runtime.dispatch import predicted_ms
from flowinfer.runtime.outbox import Outbox
from flowinfer.sim.trace import Trace, TraceRequest

BUCKETS = {"short": 2_048, "medium": 16_384, "long": 65_536, "huge": math.inf}  # bucket-route's own, in tokens
WAYS: dict[str, EdgePlan] = {
    way: EdgePlan(
        name="lookup -> prefill",
        source="lookup",
        target="prefill",
        message="Prompt",
        port="prompts",
        dispatch=way,
        key="cache_salt" if way == "hash" else "",
        lanes=tuple(BUCKETS) if "bucket" in way else ("",),
        capacity=BUCKET_CAPACITY if "bucket" in way else DEFAULT_CAPACITY,
    )
    for way in get_args(Dispatch)
}


@dataclass
class Routed:
    """hit_rate of all blocks; balance: work of the busiest worker over the mean; waits in seconds of trace time.

    wait_short_s: mean of the prompts of the shortest bucket that the trace has.
    """

    way: str
    hit_rate: float
    balance: float
    wait_mean_s: float
    wait_p95_s: float
    wait_short_s: float


@dataclass
class _Worker:
    name: str
    pool: KVPool
    queue: deque[tuple[str, int]] = field(default_factory=deque)  # lane and number; the first one is being computed
    busy_s: float = 0.0


class _Run:
    """State of one simulation. speed: predicted ms that one worker does in a second of the trace."""

    def __init__(self, trace: Trace, edge: EdgePlan, num_workers: int, blocks_each: int, speed: float) -> None:
        self.trace, self.speed = trace, speed
        self.index = BlockIndex()
        self.workers = {name: self._worker(name, blocks_each) for name in (f"prefill.{i}" for i in range(num_workers))}
        self.now = 0.0
        self.outbox = Outbox(edge, self._take, lambda: self.now)
        for name in self.workers:
            self.outbox.connect(name, 1)
            for lane in edge.lanes:
                self.outbox.credit(name, 1, lane, edge.capacity, ())
        self.hits = 0
        self.waits: dict[int, float] = {}
        self.ends: list[tuple[float, int, str]] = []  # of what is being computed: when, number, worker

    def offer(self, number: int) -> None:
        """A request comes: it is looked up, and sent on as soon as somebody has credit for it."""
        request = self.trace.requests[number]
        self.finish_until(request.at)
        self.now = request.at
        hint = PrefixHint(hashes=list(request.blocks), owners=self.index.longest_prefix(request.blocks))
        tokens = np.broadcast_to(np.int32(0), request.input_length)
        prompt = Prompt(id=str(number), tokens=tokens, sampling=Sampling(), prefix=hint)
        prompt.bucket, prompt.cache_salt = bucket_of(request), session_of(request)
        self.outbox.put(prompt)
        self.outbox.flush()

    def finish_until(self, until: float) -> None:
        """Caches what was computed by then; its workers go on with their next ones."""
        while self.ends and self.ends[0][0] <= until:
            self.now, number, name = heapq.heappop(self.ends)
            worker = self.workers[name]
            lane, _ = worker.queue.popleft()
            keep(worker.pool, self.trace.requests[number].blocks)
            if worker.queue:
                self._begin(worker)
            self.outbox.credit(name, 1, lane, 1, [str(number)])
            self.outbox.flush()

    def _take(self, name: str, edge: EdgePlan, lane: str, messages: Sequence[Message], cost: int) -> None:
        worker = self.workers[name]
        for message in messages:
            assert isinstance(message, Prompt), "nothing else is offered"
            worker.queue.append((lane, int(message.id)))
            if len(worker.queue) == 1:
                self._begin(worker)

    def _begin(self, worker: _Worker) -> None:
        """The request finds what the worker has cached by now."""
        _, number = worker.queue[0]
        request = self.trace.requests[number]
        found = worker.pool.num_matching(request.blocks)
        tokens = float(request.input_length)
        cost = predicted_ms(tokens) - predicted_ms(tokens * found / max(1, len(request.blocks)))
        worker.busy_s += cost / self.speed
        self.hits += found
        self.waits[number] = self.now - request.at
        heapq.heappush(self.ends, (self.now + cost / self.speed, number, worker.name))

    def _worker(self, name: str, num_blocks: int) -> _Worker:
        pool = KVPool(
            0,
            num_blocks,
            cached_limit=num_blocks,
            on_stored=lambda names: self.index.stored(name, names),
            on_removed=lambda names: self.index.removed(name, names),
            eviction=LRU(),
        )
        return _Worker(name, pool)


def keep(pool: KVPool, blocks: Sequence[bytes]) -> None:
    """Caches the blocks of a prompt that was computed."""
    held = pool.acquire(blocks)
    fresh = pool.allocate(len(blocks) - len(held))
    assert fresh is not None, "the pool is smaller than a prompt"
    pool.commit(zip(fresh, blocks[len(held) :], strict=True))
    pool.release(held + fresh)


def route(trace: Trace, way: str, num_workers: int, blocks_each: int, load: float = 0.8) -> Routed:
    """Replays the trace over workers of blocks_each blocks.

    load: how busy they'd be without any cache, while the first nine of ten requests come; the others may be days apart.
    """
    most = trace.requests[: max(1, len(trace.requests) * 9 // 10)]
    span = max(most[-1].at - most[0].at, 1e-9)
    speed = sum(predicted_ms(request.input_length) for request in most) / (span * num_workers * load)
    run = _Run(trace, WAYS[way], num_workers, blocks_each, speed)
    for number in range(len(trace.requests)):
        run.offer(number)
    run.finish_until(math.inf)
    busy = [worker.busy_s for worker in run.workers.values()]
    waits = np.sort(list(run.waits.values()))
    shortest = bucket_of(min(trace.requests, key=lambda request: request.input_length))
    short = [wait for number, wait in run.waits.items() if bucket_of(trace.requests[number]) == shortest]
    return Routed(
        way,
        run.hits / trace.num_blocks,
        max(busy) / (sum(busy) / num_workers),
        float(waits.mean()),
        float(waits[int(0.95 * (len(waits) - 1))]),
        float(np.mean(short)),
    )


def bucket_of(request: TraceRequest) -> str:
    """As bucket-route's defaults have it."""
    return next(name for name, bound in BUCKETS.items() if request.input_length <= bound)


def session_of(request: TraceRequest) -> str:
    """For `hash`: the session where the trace names them; else the second block, the first that not all share."""
    return request.session or (request.blocks[:2] or (b"",))[-1].hex()
