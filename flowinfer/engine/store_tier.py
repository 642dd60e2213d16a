"""One store (disk, objects) behind an engine's pool: writes blocks behind it, reads them back where that is faster.

Blocks stay held in the pool while the store writes from them or reads into them, so nobody else can get that memory.
Of a model with windows a block is two records: its entries under its name, and where somebody may begin behind it, its
state under another name and namespace (see cache.replay).
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

from flowinfer.cache.keys import state_name
from flowinfer.cache.policies.admission import Admission
from flowinfer.cache.replay import leading
from flowinfer.cache.tiers import LATENCY_S, ReadSpeed, worth_restoring
from flowinfer.message import BlockRemoved, BlockStored
from flowinfer.observe import metrics
from flowinfer.stage import Context

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine

log = logging.getLogger(__name__)
MAX_QUEUED = 256  # requests whose blocks wait to be written; beyond, the oldest are forgotten
MAX_RECENT = 100_000  # names of blocks that needn't be offered to the store again soon
TICK_S = 0.25  # how often a tier that is closed while it writes says so
ENTRIES, STATE = "entries", "state"  # parts of a block, as KVLayout.parts has them
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

    def present(self, names: Sequence[bytes], namespace: str) -> list[bool]: ...

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


@dataclass(frozen=True)
class _Run:
    """Blocks that follow each other, of which a part is to be kept."""

    names: Sequence[bytes]
    part: str
    wanted: Wanted


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
        self._queue: deque[_Run] = deque()
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
        """Writes what is still queued, as far as there is time, and lets go of the store."""
        self.is_open = False
        since = self.ctx.clock.now()
        in_time = self._has_written(since)
        while in_time and self._queue:
            in_time = self._write_last(self._queue.popleft(), since)
        if lost := sum(len(run.names) for run in self._queue):
            log.warning("%s cache: no time to write %d blocks (serve.stop_timeout)", self.name, lost)
            self._event("dropped", lost)
        self._queue.clear()
        self.store.close()

    def _has_written(self, since: float) -> bool:
        """Waits for what is being put, and says so meanwhile. False where the time for it is over."""
        while not self._idle.wait(TICK_S):
            if not self.ctx.still_closing(f"writes cached blocks to the {self.name} tier", since):
                return False
        return True

    def _write_last(self, run: _Run, since: float) -> bool:
        """Writes in a thread of its own, for the loop doesn't turn any more. False where the time for it is over."""
        blocks, mark = self._acquire(run), self.engine.staging.mark()

        def write() -> None:
            try:
                self._write(run, blocks, mark)
            except Exception:
                log.exception("%s cache: blocks weren't written", self.name)

        self._idle.clear()
        threading.Thread(target=write, name=f"last-{self.name}-write", daemon=True).start()
        if self._has_written(since):
            self.engine.pool.release(blocks)
            return True
        self.ctx.submit(self._idle.wait, lambda _: self.engine.pool.release(blocks))  # if the worker goes on
        return False

    def announce(self, to: str | None = None) -> None:
        """Tells which blocks of this model the store holds."""
        if names := self.store.names(self.engine.namespace):
            self.ctx.send(BlockStored(owner=self.name, hashes=names), to=to)

    # ------------------------------------------------------------------------------------------------------- writing

    def keep(self, names: Sequence[bytes], wanted: Wanted, *, ends: Sequence[bytes] = ()) -> None:
        """Stores these cached blocks of the pool (a run in chain order) when there is time.

        ends: blocks whose state is kept too: the last ones of a run behind which somebody may go on.
        """
        if not self.is_open:
            return
        fresh = [name for name in names if name not in self._recent]
        self._recent.update(dict.fromkeys(fresh))
        while len(self._recent) > MAX_RECENT:
            self._recent.popitem(last=False)
        self._offer(_Run(fresh, ENTRIES, wanted))
        self._offer(_Run(list(ends), STATE, wanted))
        self._pump()

    def _offer(self, run: _Run) -> None:
        if not run.names:
            return
        if len(self._queue) >= MAX_QUEUED:
            dropped = self._queue.popleft()
            self._event("dropped", len(dropped.names))
            self._forget(dropped.names)
        self._queue.append(run)

    def _pump(self) -> None:
        """One request's blocks are written at a time: what is written is held, and the pool needs its blocks."""
        self.tell_changes()
        while self._queue and not self._is_writing:
            run = self._queue.popleft()
            if blocks := self._acquire(run):
                self._is_writing = True
                self._idle.clear()
                write = partial(self._write, run, blocks, self.engine.staging.mark())
                self.ctx.submit(write, partial(self._written, run, blocks))

    def _acquire(self, run: _Run) -> Blocks:
        """Holds the leading ones that are still cached: as many as have this part."""
        pool = self.engine.pool
        blocks = pool.acquire(run.names)
        if run.part == ENTRIES:
            self._forget(run.names[len(blocks) :])  # evicted before there was time
        elif any(pool.is_partial(name) for name in run.names[: len(blocks)]):
            pool.release(blocks)
            return []
        return blocks

    def _write(self, run: _Run, blocks: Blocks, mark: Any) -> list[bytes]:
        def put(first: int, payloads: Sequence[memoryview]) -> list[bytes]:
            names = self._record_names(run.names[first : first + len(payloads)], run.part)
            how = {"namespace": self._namespace(run.part), "cls": run.wanted.cls[:32], "tenant": run.wanted.tenant}
            pairs = list(zip(names, payloads, strict=True))
            return self.store.put(pairs, keep_s=run.wanted.keep_s, **how).result()

        try:
            return self.engine.staging.write(blocks, mark, put, run.part)
        finally:
            self._idle.set()

    def _written(self, run: _Run, blocks: Blocks, result: list[bytes] | BaseException) -> None:
        self.engine.pool.release(blocks)
        self._is_writing = False
        if isinstance(result, BaseException):
            log.error("%s cache: blocks weren't written", self.name, exc_info=result)
            result = []
        if run.part == ENTRIES:
            self._forget(set(run.names[: len(blocks)]) - set(result))  # they may be offered again
            if result:
                self.ctx.send(BlockStored(owner=self.name, hashes=result))
        if result:
            self._event("stored" if run.part == ENTRIES else "state_stored", len(result))
        self._pump()

    def _record_names(self, names: Sequence[bytes], part: str) -> list[bytes]:
        return list(names) if part == ENTRIES else [state_name(name) for name in names]

    def _namespace(self, part: str) -> str:
        return self.engine.namespace if part == ENTRIES else f"{self.engine.namespace}-{STATE}"

    def _forget(self, names: Sequence[bytes] | set[bytes]) -> None:
        for name in names:
            self._recent.pop(name, None)

    # ------------------------------------------------------------------------------------------------------- reading

    def present(self, names: Sequence[bytes], part: str = ENTRIES) -> list[bool]:
        """Of which of these blocks the store has this part. For background threads."""
        return self.store.present(self._record_names(names, part), self._namespace(part))

    def read(
        self, names: Sequence[bytes], blocks: Sequence[int], context: int, cost: Cost, mark: Any, *, replayed: int = 0
    ) -> int:
        """Fills blocks with what the store has of the entries of the leading names; returns how many.

        0 where it has none, or where computing them behind `context` tokens is faster; of what is read, `replayed`
        tokens are computed again all the same. For background threads.
        """
        layout = self.engine.layout
        there = leading(self.present(names))
        if not there:
            return 0
        size, tokens = there * layout.part_bytes(ENTRIES), max(0, there * layout.block_tokens - replayed)
        if not worth_restoring(self.speed.seconds(size), tokens, context, cost):
            self.speed.declined()
            self._event("declined", there)
            return 0
        num = self._load(names[:there], blocks[:there], ENTRIES, mark)
        self._event("restored", num)
        return num

    def read_states(self, names: Sequence[bytes], blocks: Sequence[int], mark: Any) -> bool:
        """Fills blocks with the state of these names; False where one isn't there. For background threads."""
        if not all(self.present(names, STATE)):
            return False
        num = self._load(names, blocks, STATE, mark)
        self._event("state_restored", num)
        return num == len(names)

    def _load(self, names: Sequence[bytes], blocks: Sequence[int], part: str, mark: Any) -> int:
        began = time.monotonic()
        records, namespace = self._record_names(names, part), self._namespace(part)

        def load(first: int, targets: Sequence[memoryview]) -> int:
            return leading(self.store.get(records[first : first + len(targets)], targets, namespace))

        num = self.engine.staging.read(blocks, mark, load, part)
        seconds = time.monotonic() - began
        if num:
            self.speed.observe(num * self.engine.layout.part_bytes(part), seconds)
            self._seconds.observe(seconds)
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
        if number:
            self._count.labels(tier=self.name, event=event).inc(number)
