"""Several prefill workers under a virtual clock: what a way of sharing prompts out does to hits and queues.

Policies, pools and index are the real ones. A worker computes one prompt after the other, in the time that the
dispatch's own work model gives for the tokens it doesn't find; what it computes is cached once it is done.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from flowinfer.cache.index import BlockIndex
from flowinfer.cache.policies.eviction import LRU
from flowinfer.engine.pool import KVPool
from flowinfer.message import PrefixHint, Prompt, Sampling
from flowinfer.runtime.dispatch import (
    BucketPrefix,
    Buckets,
    Consumer,
    Dispatch,
    Head,
    Prefix,
    Pull,
    predicted_ms,
    rendezvous,
)
from flowinfer.sim.trace import Trace, TraceRequest

CREDIT = 256
BUCKETS = {"short": 2_048, "medium": 16_384, "long": 65_536, "huge": math.inf}  # bucket-route's own, in tokens
WAYS = ("pull", "hash", "prefix", "bucket", "bucket+prefix")


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
    consumer: Consumer
    pool: KVPool
    queue: deque[tuple[int, str, TraceRequest]] = field(default_factory=deque)  # the first one is being computed
    busy_s: float = 0.0


@dataclass
class _Run:
    """State of one simulation."""

    trace: Trace
    index: BlockIndex
    workers: list[_Worker]
    speed: float  # predicted ms that one worker does in a second of the trace
    hits: int = 0
    waits: list[float] = field(default_factory=list)
    short_waits: list[float] = field(default_factory=list)
    shortest: str = ""  # bucket
    ends: list[tuple[float, int, _Worker]] = field(default_factory=list)  # of what is being computed

    def finish_until(self, now: float) -> None:
        """Caches what was computed by now; its workers go on with their next ones."""
        while self.ends and self.ends[0][0] <= now:
            at, number, worker = heapq.heappop(self.ends)
            _, lane, request = worker.queue.popleft()
            worker.consumer.sent.pop(str(number))
            worker.consumer.outstanding -= 1
            worker.consumer.credit[lane] += 1
            keep(worker.pool, request.blocks)
            if worker.queue:
                self._begin(worker, at)

    def add(self, number: int, worker: _Worker, lane: str, request: TraceRequest, work: float) -> None:
        """Queues a request on a worker."""
        worker.consumer.sent[str(number)] = work
        worker.consumer.outstanding += 1
        worker.consumer.credit[lane] -= 1
        worker.queue.append((number, lane, request))
        if len(worker.queue) == 1:
            self._begin(worker, request.at)

    def _begin(self, worker: _Worker, at: float) -> None:
        """The request finds what the worker has cached by now."""
        number, _, request = worker.queue[0]
        found = worker.pool.num_matching(request.blocks)
        tokens = float(request.input_length)
        cost = predicted_ms(tokens) - predicted_ms(tokens * found / max(1, len(request.blocks)))
        worker.busy_s += cost / self.speed
        self.hits += found
        self.waits.append(at - request.at)
        if bucket_of(request) == self.shortest:
            self.short_waits.append(at - request.at)
        heapq.heappush(self.ends, (at + cost / self.speed, number, worker))


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
    index = BlockIndex()
    workers = [_worker(f"prefill.{i}", blocks_each, index) for i in range(num_workers)]
    most = trace.requests[: max(1, len(trace.requests) * 9 // 10)]
    span = max(most[-1].at - most[0].at, 1e-9)
    speed = sum(predicted_ms(request.input_length) for request in most) / (span * num_workers * load)
    shortest = bucket_of(min(trace.requests, key=lambda request: request.input_length))
    run, choose = _Run(trace, index, workers, speed, shortest=shortest), _chooser(way)
    for number, request in enumerate(trace.requests):
        run.finish_until(request.at)
        worker, lane, work = choose(run, number, request)
        run.add(number, worker, lane, request, work)
    run.finish_until(math.inf)
    busy = [worker.busy_s for worker in workers]
    waits = np.sort(run.waits)
    return Routed(
        way,
        run.hits / trace.num_blocks,
        max(busy) / (sum(busy) / num_workers),
        float(waits.mean()),
        float(waits[int(0.95 * (len(waits) - 1))]),
        float(np.mean(run.short_waits)),
    )


def bucket_of(request: TraceRequest) -> str:
    """As bucket-route's defaults have it."""
    return next(name for name, bound in BUCKETS.items() if request.input_length <= bound)


def _worker(name: str, num_blocks: int, index: BlockIndex) -> _Worker:
    pool = KVPool(
        0,
        num_blocks,
        cached_limit=num_blocks,
        on_stored=lambda names: index.stored(name, names),
        on_removed=lambda names: index.removed(name, names),
        eviction=LRU(),
    )
    return _Worker(Consumer(name, 1, connected=True, credit=dict.fromkeys(("", *BUCKETS), CREDIT)), pool)


Choice = Callable[[_Run, int, TraceRequest], tuple[_Worker, str, float]]  # who, in which lane, work that it is


def _chooser(way: str) -> Choice:
    if way == "hash":
        return _hashed
    lanes = tuple(BUCKETS)
    ways: dict[str, Dispatch] = {"prefix": Prefix(), "bucket": Buckets(lanes), "bucket+prefix": BucketPrefix(lanes)}
    dispatch = ways.get(way, Pull())

    def choose(run: _Run, number: int, request: TraceRequest) -> tuple[_Worker, str, float]:
        message = _prompt(run, number, request)
        lane = bucket_of(request) if "bucket" in way else ""
        consumers = [worker.consumer for worker in run.workers]
        chosen = dispatch.choose({lane: Head(1, 1, float(request.input_length), message)}, consumers)
        consumer = chosen[1] if chosen else min(consumers, key=lambda c: c.outstanding)  # none has credit
        return run.workers[consumers.index(consumer)], lane, dispatch.weigh(message, consumer)

    return choose


def _hashed(run: _Run, number: int, request: TraceRequest) -> tuple[_Worker, str, float]:
    """By session where the trace names them; else by the second block, the first that not all prompts share."""
    key = request.session or (request.blocks[:2] or (b"",))[-1].hex()
    name = rendezvous(key, [worker.consumer.name for worker in run.workers])
    return next(worker for worker in run.workers if worker.consumer.name == name), "", 0.0


def _prompt(run: _Run, number: int, request: TraceRequest) -> Prompt:
    hint = PrefixHint(hashes=list(request.blocks), owners=run.index.longest_prefix(request.blocks))
    tokens = np.broadcast_to(np.int32(0), request.input_length)
    return Prompt(id=str(number), tokens=tokens, sampling=Sampling(), prefix=hint)
