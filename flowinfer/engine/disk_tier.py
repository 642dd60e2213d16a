"""Carries blocks between an engine's pool and the disk store, never on the critical path.

Blocks stay held in the pool while the store writes from them or reads into them, so nobody else can get that memory.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowinfer.cache.disk.retention import Retention
from flowinfer.cache.disk.store import DiskStore, StoreSettings
from flowinfer.cache.tiers import DISK, RETENTION, DiskTierConfig, Tiers, tenant_of, worth_restoring
from flowinfer.message import BlockRemoved, BlockStored, Message, Prompt
from flowinfer.observe import metrics
from flowinfer.stage import Context
from flowinfer.units import parse_duration

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine
    from flowinfer.engine.held import HeldKV

log = logging.getLogger(__name__)
MAX_QUEUED = 256  # requests whose blocks wait to be written; beyond, the oldest are forgotten
MAX_RECENT = 100_000  # names of blocks that needn't be offered to the store again soon
FIRST_RATE = 1e9  # bytes a second, until reads have been measured
Blocks = list[int]


class DiskTier:
    """The store as one engine uses it. All methods are for the worker's loop."""

    def __init__(self, ctx: Context, engine: Engine, config: DiskTierConfig, retention: dict[str, float]) -> None:
        self.ctx, self.engine = ctx, engine
        self._gone: deque[bytes] = deque()  # names that left the store, told by its threads
        self._settings = StoreSettings(
            path=Path(config.path).expanduser(),
            size=config.size,
            segment=config.segment,
            retention=Retention(retention),
            class_limits=config.class_sizes,
            tenant_limit=config.tenant_size,
        )
        self.store = self._open()
        self._num_users = 0
        self._queue: deque[tuple[list[bytes], str, str]] = deque()
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        self._classes: OrderedDict[str, tuple[str, str]] = OrderedDict()  # of requests that are being decoded elsewhere
        self._writing = self._closed = False
        self._rate = FIRST_RATE
        self._count = metrics.counter("disk_cache_blocks_total")
        metrics.gauge("disk_cache_read_bytes_per_second").set_function(lambda: self._rate)

    @classmethod
    def of(cls, ctx: Context, engine: Engine) -> DiskTier | None:
        """The tier that the graph's cache-lookup asks for, shared by the stages of this engine; None without one."""

        def make() -> DiskTier | None:
            for settings in ctx.settings_of("cache-lookup"):
                tiers = Tiers.model_validate(settings.get("tiers", {}))
                if tiers.disk is not None:
                    return cls(ctx, engine, tiers.disk, _retention(settings))
            return None

        tier = ctx.shared(("disk-tier", engine.layout.digest), make, arms=True)
        if tier is not None:
            tier.join()
        return tier

    def join(self) -> None:
        """One more stage uses the tier."""
        self._num_users += 1
        if self._closed:
            self.store, self._closed = self._open(), False

    def close(self) -> None:
        """One stage less; the last one writes what is still queued and lets go of the store."""
        self._num_users -= 1
        if self._num_users or self._closed:
            return
        self._closed = True
        for names, cls, tenant in self._queue:
            blocks = self.engine.pool.acquire(names)
            self._write(names[: len(blocks)], blocks, cls, tenant)
            self.engine.pool.release(blocks)
        self._queue.clear()
        self.store.close()

    def _open(self) -> DiskStore:
        return DiskStore(
            self._settings,
            wall=self.ctx.clock.wall,
            monotonic=time.monotonic,
            removed=lambda names, cause: self._gone.extend(names),
            fault=lambda cause: metrics.counter("disk_cache_faults_total").labels(cause=cause).inc(),
        )

    def announce(self, to: str | None = None) -> None:
        """Tells which blocks of this model the store holds."""
        if names := self.store.names(self.engine.layout.digest):
            self.ctx.send(BlockStored(owner=DISK, hashes=names), to=to)

    # ------------------------------------------------------------------------------------------------------- writing

    def keep(self, names: Sequence[bytes], cls: str, salt: str) -> None:
        """Stores these cached blocks of the pool (a run in chain order) when there is time."""
        fresh = [name for name in names if name not in self._recent]
        if not fresh or self._closed:
            return
        self._recent.update(dict.fromkeys(fresh))
        while len(self._recent) > MAX_RECENT:
            self._recent.popitem(last=False)
        if len(self._queue) >= MAX_QUEUED:
            self._count.labels(event="dropped").inc(len(self._queue.popleft()[0]))
        self._queue.append((fresh, cls, tenant_of(salt)))
        self._pump()

    def lent(self, request: str, cls: str, salt: str) -> None:
        """Another worker goes on filling blocks of ours for this request: see `returned`."""
        self._classes[request] = (cls, salt)
        if len(self._classes) > MAX_RECENT:
            self._classes.popitem(last=False)

    def returned(self, request: str, names: Sequence[bytes]) -> None:
        """Stores the blocks that the lessee has filled."""
        if request in self._classes:
            self.keep(names, *self._classes.pop(request))

    def _pump(self) -> None:
        """One request's blocks are written at a time: what is written is held, and the pool needs its blocks."""
        self._tell_gone()
        while self._queue and not self._writing:
            names, cls, tenant = self._queue.popleft()
            if blocks := self.engine.pool.acquire(names):
                self._writing = True
                run = names[: len(blocks)]
                self.ctx.submit(partial(self._write, run, blocks, cls, tenant), partial(self._written, run, blocks))

    def _write(self, names: Sequence[bytes], blocks: Blocks, cls: str, tenant: str) -> list[bytes]:
        payloads = [self._block_memory(block) for block in blocks]
        pairs = list(zip(names, payloads, strict=True))
        return self.store.put(pairs, namespace=self.engine.layout.digest, cls=cls[:32], tenant=tenant).result()

    def _written(self, names: list[bytes], blocks: Blocks, result: list[bytes] | BaseException) -> None:
        self.engine.pool.release(blocks)
        self._writing = False
        if isinstance(result, BaseException):
            log.error("disk cache: blocks weren't written", exc_info=result)
            result = []
        for name in set(names) - set(result):
            self._recent.pop(name, None)  # it may be offered again
        if result:
            self._count.labels(event="stored").inc(len(result))
            self.ctx.send(BlockStored(owner=DISK, hashes=result))
        self._pump()

    # ----------------------------------------------------------------------------------------------------- restoring

    def restore(self, prompt: Prompt, held: HeldKV, then: Callable[[int], Iterable[Message] | None]) -> bool:
        """Asks the store for the blocks behind those that `held` has. False: there is nothing to ask for.

        It is asked whatever the hint says: one look-up is a millisecond, and right after a start hints lag behind.
        then(num_blocks): as many are in place now; 0 where they aren't there, are damaged, or are computed faster.
        """
        at = held.num_committed
        if self._closed or prompt.prefix is None or at >= len(prompt.prefix.hashes):
            return False
        names = prompt.prefix.hashes[at:]
        blocks = held.blocks[at : at + len(names)]
        self.engine.pool.hold(blocks)
        context = at * self.engine.layout.block_tokens
        self.ctx.submit(
            partial(self._read, names, blocks, context, self.engine.cost.coefficients),
            partial(self._read_done, blocks, then),
            request=prompt.id,
        )
        return True

    def _read(self, names: list[bytes], blocks: Blocks, context: int, cost: tuple[float, float, float]) -> int:
        layout = self.engine.layout
        there = self.store.contains(names, layout.digest)
        if not there:
            return 0
        size, tokens = there * layout.block_bytes, there * layout.block_tokens
        if not worth_restoring(size, self._rate, tokens, context, cost):
            self._rate = min(self._rate * 1.1, FIRST_RATE)  # a disk that was slow is tried again one day
            self._count.labels(event="declined").inc(there)
            return 0
        began = time.monotonic()
        targets = [self._block_memory(block, fill=False) for block in blocks[:there]]
        found = self.store.get(names[:there], targets, layout.digest)
        num = found.index(False) if False in found else there
        self._put_back(blocks[:num], targets)
        if num:
            self._rate += 0.2 * (num * layout.block_bytes / max(1e-6, time.monotonic() - began) - self._rate)
        return num

    def _read_done(
        self, blocks: Blocks, then: Callable[[int], Iterable[Message] | None], result: int | BaseException
    ) -> Iterable[Message] | None:
        self.engine.pool.release(blocks)
        self._tell_gone()
        if isinstance(result, BaseException):
            log.error("disk cache: blocks weren't read", exc_info=result)
            result = 0
        self._count.labels(event="restored").inc(result)
        return then(result)

    def _tell_gone(self) -> None:
        names = [self._gone.popleft() for _ in range(len(self._gone))]
        if names:
            for name in names:
                self._recent.pop(name, None)
            self.ctx.send(BlockRemoved(owner=DISK, hashes=names))

    # ------------------------------------------------------------------------------------------------------- memory

    def _block_memory(self, block: int, *, fill: bool = True) -> memoryview:
        """The bytes of a block: themselves on a CPU, a copy in host memory else."""
        import torch

        data = self.engine.kv[block]
        if data.device.type != "cpu":
            data = data.cpu() if fill else torch.empty_like(data, device="cpu")
        return data.view(torch.uint8).flatten().numpy().data

    def _put_back(self, blocks: Blocks, targets: Sequence[memoryview]) -> None:
        """Copies what was read to where it belongs, where that is another memory."""
        import torch

        if self.engine.kv.device.type != "cpu":
            for block, target in zip(blocks, targets, strict=False):
                flat = torch.frombuffer(target, dtype=torch.uint8).view(self.engine.kv.dtype)
                self.engine.kv[block].copy_(flat.view_as(self.engine.kv[block]))
            torch.cuda.synchronize(self.engine.kv.device)


def _retention(settings: dict[str, Any]) -> dict[str, float]:
    written = settings.get("retention", {})
    return {**RETENTION, **{cls: parse_duration(seconds) for cls, seconds in written.items()}}
