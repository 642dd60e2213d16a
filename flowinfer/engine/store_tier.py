"""One store (disk, objects) behind an engine's pool: writes blocks behind it, reads them back where that is faster.

Blocks stay held in the pool while the store writes from them or reads into them, so nobody else can get that memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from flowinfer.cache.policies.admission import Admission
from flowinfer.cache.tiers import LATENCY_S, ReadSpeed, worth_restoring
from flowinfer.message import BlockRemoved, BlockStored
from flowinfer.observe import metrics
from flowinfer.stage import Context

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine

log = logging.getLogger(__name__)
MAX_QUEUED = 256  # requests whose blocks wait to be written; beyond, the oldest are forgotten
MAX_RECENT = 100_000  # names of blocks that needn't be offered to the store again soon
CLOSING_S = 3.0  # how long the end of a service waits for the run of blocks that is being put
Blocks = list[int]
Cost = tuple[float, float, float]


class Store(Protocol):
    """What keeps blocks: cache.disk.store.DiskStore, cache.objects.store.ObjectStore."""

    def put(
        self,
        blocks: Sequence[tuple[bytes, memoryview]],
        *,
        namespace: str,
        cls: str,
        tenant: str = "",
        keep_s: float | None = None,
    ) -> Future[list[bytes]]: ...

    def contains(self, names: Sequence[bytes], namespace: str) -> int: ...

    def get(self, names: Sequence[bytes], targets: Sequence[memoryview], namespace: str) -> list[bool]: ...

    def names(self, namespace: str) -> list[bytes]: ...

    def close(self) -> None: ...


Removed = Callable[[Sequence[bytes], str], None]


@dataclass(frozen=True)
class Wanted:
    """How blocks are to be kept. keep_s: seconds after their last use; None: those of their class."""

    cls: str
    tenant: str
    keep_s: float | None = None


class StoreTier:
    """A store as one engine uses it. All methods are for the worker's loop, but `read`.

    open_store(removed, added, fault) opens the store.  admission: what of a prompt is worth offering to it.
    """

    def __init__(
        self,
        name: str,
        ctx: Context,
        engine: Engine,
        open_store: Callable[[Removed, Removed, Callable[[str], None]], Store],
        admission: Admission,
    ) -> None:
        self.name, self.ctx, self.engine, self._open_store, self.admission = name, ctx, engine, open_store, admission
        self._changes: deque[tuple[bool, bytes]] = deque()  # (came, name), told by threads of the store
        self._queue: deque[tuple[list[bytes], Wanted]] = deque()
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        self._is_writing = False
        self._idle = threading.Event()  # no background thread is putting blocks
        self._idle.set()
        self.is_open = False
        self.speed = ReadSpeed(LATENCY_S[name])
        self._count = metrics.counter("cache_tier_blocks_total")
        self._seconds = metrics.histogram("cache_tier_restore_seconds").labels(tier=name)
        rate = metrics.gauge("cache_tier_read_bytes_per_second").labels(tier=name)
        rate.set_function(lambda: self.speed.bytes_per_s)
        self.open()

    def open(self) -> None:
        """Opens the store; a closed tier may be opened again."""
        self.store = self._open_store(
            lambda names, cause: self._changes.extend((False, name) for name in names),
            lambda names, cause: self._changes.extend((True, name) for name in names),
            lambda cause: metrics.counter("cache_tier_faults_total").labels(tier=self.name, cause=cause).inc(),
        )
        self.is_open = True

    def close(self) -> None:
        """Writes what is still queued and lets go of the store."""
        self.is_open = False
        self._idle.wait(CLOSING_S)
        for names, wanted in self._queue:
            blocks = self.engine.pool.acquire(names)
            self._write(names[: len(blocks)], blocks, wanted, self.engine.staging.mark())
            self.engine.pool.release(blocks)
        self._queue.clear()
        self.store.close()

    def announce(self, to: str | None = None) -> None:
        """Tells which blocks of this model the store holds."""
        if names := self.store.names(self.engine.layout.digest):
            self.ctx.send(BlockStored(owner=self.name, hashes=names), to=to)

    # ------------------------------------------------------------------------------------------------------- writing

    def keep(self, names: Sequence[bytes], wanted: Wanted) -> None:
        """Stores these cached blocks of the pool (a run in chain order) when there is time."""
        fresh = [name for name in names if name not in self._recent]
        if not fresh or not self.is_open:
            return
        self._recent.update(dict.fromkeys(fresh))
        while len(self._recent) > MAX_RECENT:
            self._recent.popitem(last=False)
        if len(self._queue) >= MAX_QUEUED:
            dropped, _ = self._queue.popleft()
            self._event("dropped", len(dropped))
            self._forget(dropped)
        self._queue.append((fresh, wanted))
        self._pump()

    def _pump(self) -> None:
        """One request's blocks are written at a time: what is written is held, and the pool needs its blocks."""
        self.tell_changes()
        while self._queue and not self._is_writing:
            names, wanted = self._queue.popleft()
            blocks = self.engine.pool.acquire(names)
            self._forget(names[len(blocks) :])  # evicted before there was time
            if blocks:
                self._is_writing = True
                self._idle.clear()
                run, mark = names[: len(blocks)], self.engine.staging.mark()
                self.ctx.submit(partial(self._write, run, blocks, wanted, mark), partial(self._written, run, blocks))

    def _write(self, names: Sequence[bytes], blocks: Blocks, wanted: Wanted, mark: Any) -> list[bytes]:
        def put(first: int, payloads: Sequence[memoryview]) -> list[bytes]:
            pairs = list(zip(names[first : first + len(payloads)], payloads, strict=True))
            how = {"namespace": self.engine.layout.digest, "cls": wanted.cls[:32], "tenant": wanted.tenant}
            return self.store.put(pairs, keep_s=wanted.keep_s, **how).result()

        try:
            return self.engine.staging.write(blocks, mark, put)
        finally:
            self._idle.set()

    def _written(self, names: list[bytes], blocks: Blocks, result: list[bytes] | BaseException) -> None:
        self.engine.pool.release(blocks)
        self._is_writing = False
        if isinstance(result, BaseException):
            log.error("%s cache: blocks weren't written", self.name, exc_info=result)
            result = []
        self._forget(set(names) - set(result))  # they may be offered again
        if result:
            self._event("stored", len(result))
            self.ctx.send(BlockStored(owner=self.name, hashes=result))
        self._pump()

    def _forget(self, names: Sequence[bytes] | set[bytes]) -> None:
        for name in names:
            self._recent.pop(name, None)

    # ------------------------------------------------------------------------------------------------------- reading

    def read(self, names: Sequence[bytes], blocks: Sequence[int], context: int, cost: Cost, mark: Any) -> int:
        """Fills blocks with what the store has of the leading names; returns how many. For background threads.

        0 where it has none, or where computing them behind `context` tokens is faster.
        """
        layout = self.engine.layout
        there = self.store.contains(names, layout.digest)
        if not there:
            return 0
        size, tokens = there * layout.block_bytes, there * layout.block_tokens
        if not worth_restoring(self.speed.seconds(size), tokens, context, cost):
            self.speed.declined()
            self._event("declined", there)
            return 0
        began = time.monotonic()

        def load(first: int, targets: Sequence[memoryview]) -> int:
            found = self.store.get(names[first : first + len(targets)], targets, layout.digest)
            return found.index(False) if False in found else len(found)

        num = self.engine.staging.read(blocks[:there], mark, load)
        seconds = time.monotonic() - began
        if num:
            self.speed.observe(num * layout.block_bytes, seconds)
            self._seconds.observe(seconds)
            self._event("restored", num)
        return num

    def tell_changes(self) -> None:
        """Passes on what came to the store and left it behind our back, in order."""
        changes = [self._changes.popleft() for _ in range(len(self._changes))]
        state = {name: came for came, name in changes}  # the last word on each
        came = [name for name, is_there in state.items() if is_there]
        gone = [name for name, is_there in state.items() if not is_there]
        self._forget(gone)
        if came:
            self.ctx.send(BlockStored(owner=self.name, hashes=came))
        if gone:
            self.ctx.send(BlockRemoved(owner=self.name, hashes=gone))

    def _event(self, event: str, number: int) -> None:
        self._count.labels(tier=self.name, event=event).inc(number)
