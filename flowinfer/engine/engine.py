"""One model on one device: its weights, its KV memory, and which request holds what of it. Decides nothing.

The stages of a worker that run the same model share one engine. KV lies in an arena of blocks (see layout); on CPU all
workers of a host map the same arena and allocate from ranges of their own, so that lending a prefix to another worker
costs a message and no copy: the owner keeps the blocks until the lessee's KVRelease, or until the lessee dies.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from flowinfer.cache.keys import extend_chain
from flowinfer.cache.policies.eviction import Eviction, make_eviction
from flowinfer.engine import hub
from flowinfer.engine.block_copies import BlockCopies
from flowinfer.engine.cost import StepTimeModel
from flowinfer.engine.expert_load import ExpertLoad, LoadWindow, Phase
from flowinfer.engine.formats import FP8
from flowinfer.engine.held import HeldKV, Run
from flowinfer.engine.layout import DTYPE_BYTES, KVLayout
from flowinfer.engine.models import fp8, load_model
from flowinfer.engine.pool import KVPool
from flowinfer.engine.prefixes import Prefixes, mode_of
from flowinfer.engine.staging import Staging
from flowinfer.engine.step import Features, Replays, StepInput
from flowinfer.errors import ModelError
from flowinfer.graph.kernel_set import kernel_set
from flowinfer.message import (
    BlockRemoved,
    BlockStored,
    Event,
    Ids,
    KVFetch,
    KVHandle,
    KVPin,
    KVPinned,
    KVRelease,
    KVUnpin,
    LeaseQuery,
    LeaseReport,
    Prompt,
    WorkerDown,
    WorkerUp,
)
from flowinfer.observe import metrics
from flowinfer.stage import Arena, Context
from flowinfer.transfer.outgoing import Outgoing

if TYPE_CHECKING:
    from flowinfer.engine.batch import Batch
    from flowinfer.engine.decode_graphs import DecodeGraphs

_LATEST = 0.2  # weight of the last step in the running mean of decode steps


class Engine:
    """Weights, KV memory and held sequences of one model. `kv` is the arena tensor, as in KVLayout."""

    def __init__(
        self, ctx: Context, model: str, dtype: str, weights: str = "checkpoint", kv_dtype: str = "auto"
    ) -> None:
        path = hub.resolve(model)
        torch.set_num_threads(ctx.threads)
        self.ctx = ctx
        kernels = _kernels_of(ctx)
        self.model = load_model(path, dtype=dtype, device=ctx.device, batch_invariant=bool(kernels), weights=weights)
        stored = str(self.model.dtype).removeprefix("torch.")
        if kv_dtype == FP8:
            fp8.refuse_kv(self.model, batch_invariant=bool(kernels))
        self.layout: KVLayout = hub.describe(path).layout(stored, kernels=kernels, weights=weights, kv=kv_dtype)
        arena = sized_arena(ctx.arena(self.layout), self.layout, ctx.device)
        self.kv = _arena_tensor(arena, self.layout, ctx.device)
        self.copies = BlockCopies(self.kv)
        self.staging = Staging(self.kv, self.layout)
        self.shares_memory = arena.shared
        self.pool = KVPool(
            arena.first_block,
            arena.end_block,
            cached_limit=arena.end_block - arena.first_block,
            on_stored=lambda hashes: ctx.send(BlockStored(owner=ctx.worker, hashes=hashes)),
            on_removed=self._on_removed,
            eviction=_eviction(ctx, arena.end_block - arena.first_block),
        )
        self._watch_pool()
        load_LE = self.model.expert_load_LE
        self.expert_load = None if load_LE is None else ExpertLoad(load_LE)
        self._watch_experts()
        self.prefixes = Prefixes(self, mode_of(ctx))
        self.namespace = self.layout.namespace(approximate=self.prefixes.mode == "bounded")
        self.held: dict[str, HeldKV] = {}
        self.outgoing = Outgoing(self)
        self.on_release: list[Callable[[str], None]] = []
        self.on_offer: list[Callable[[str], None]] = []  # told what is offered to another worker while it runs
        self.on_lessee_lost: list[Callable[[str], bool]] = []  # True: somebody here goes on with the request
        self.cost = StepTimeModel()
        self.starved = False  # decode lacks blocks: no new prompt may take any
        self._pins: dict[tuple[str, str], list[int]] = {}
        self._keeper: object = None
        self.last_step = (0, 0, 0.0)  # tokens, query-key pairs, seconds of the last forward pass
        self.busy_s = 0.0  # of all forward passes that were waited for
        self.decode_s = 0.0  # of a decode step, a running mean; 0 where the device runs them by itself
        self._down: dict[str, list[KVRelease]] = {}  # dead owners, and what their successors must be told
        for request, (lessee, blocks) in arena.quarantined.items():
            self.pool.quarantine(blocks)
            self.held[request] = HeldKV(id=request, blocks=list(blocks), lessee=lessee)

    def _on_removed(self, hashes: list[bytes]) -> None:
        metrics.counter("prefix_cache_evictions_total").inc(len(hashes))
        self.ctx.send(BlockRemoved(owner=self.ctx.worker, hashes=hashes))

    def _watch_pool(self) -> None:
        pool = self.pool
        metrics.gauge("kv_blocks").set(pool.num_blocks)
        metrics.gauge("kv_blocks_free").set_function(lambda: pool.num_free)
        metrics.gauge("kv_cache_usage_ratio").set_function(lambda: 1 - pool.num_free / max(1, pool.num_blocks))
        metrics.gauge("prefix_cache_blocks").set_function(lambda: pool.num_cached)

    def _watch_experts(self) -> None:
        for phase, window in self.expert_load.windows.items() if self.expert_load else ():
            for row, layer in enumerate(self.model.config.moe_layers):
                gauge = metrics.gauge("expert_peak_ratio").labels(phase=phase, layer=str(layer))
                gauge.set_function(partial(_peak, window, row))

    @classmethod
    def of(cls, ctx: Context, model: str, dtype: str, weights: str = "checkpoint", kv_dtype: str = "auto") -> Engine:
        """The engine of this model in this worker, loaded on first use.

        Raises ModelError for a stage that wants hits to be used in another way than one that has it already.
        """
        key = ("engine", model, dtype, weights, kv_dtype)
        engine = ctx.shared(key, lambda: cls(ctx, model, dtype, weights, kv_dtype), arms=True)
        engine.prefixes.check(mode_of(ctx))
        return engine

    # ------------------------------------------------------------------------------------------- holding and freeing

    def start(self, prompt: Prompt) -> HeldKV | None:
        """Holds blocks for all tokens of the prompt but the last, with what is cached here of it. None: no room now."""
        held = self.prefixes.start(prompt)
        if held is not None:
            self.held[prompt.id] = held
        return held

    def grow(self, held: HeldKV, num_tokens: int) -> bool:
        """Makes room for num_tokens tokens in all. False, and nothing changed, where blocks run out."""
        missing = self.layout.blocks_for(num_tokens) - len(held.blocks)
        fresh = self.pool.allocate(missing) if missing > 0 else []
        if fresh is None:
            return False
        held.blocks += fresh
        return True

    def lend(self, id: str, lessee: str) -> KVHandle:
        """Describes what the request holds for the worker that decodes it; another worker than this one leases it."""
        held = self.held[id]
        held.lessee = lessee if lessee != self.ctx.worker else None
        self.outgoing.lend(held)
        return self.describe(held)

    def describe(self, held: HeldKV) -> KVHandle:
        """What the request holds, as others must know it to read it."""
        return KVHandle(
            layout=self.layout.digest,
            owner=self.ctx.worker,
            generation=self.ctx.generation,
            blocks=np.array(held.blocks, np.int32),
            num_tokens=held.num_computed,
            cached_tokens=held.cached_tokens,
            ways=self.outgoing.ways if held.lessee is not None else [],
            computed_at=self.ctx.clock.now(),
            partial=sorted(held.partial),
        )

    def adopt(self, prompt: Prompt, handle: KVHandle, *, blocks: list[int], leased: bool) -> HeldKV:
        """Takes over a sequence that another worker computed: its own blocks on lease, or copies in blocks of ours."""
        held = HeldKV(
            id=prompt.id,
            blocks=blocks,
            num_computed=handle.num_tokens,
            cached_tokens=handle.cached_tokens,
            owner=handle.owner,
            num_leased=len(blocks) if leased else 0,
            names=list(prompt.prefix.hashes) if prompt.prefix else [],
            caching=prompt.prefix is not None and prompt.cache_keep_s != 0,
            salt=prompt.cache_salt,
        )
        num_full = handle.num_tokens // self.layout.block_tokens
        held.num_committed = num_full if leased else 0
        held.partial = {number for number in handle.partial if number < num_full}
        self.held[prompt.id] = held
        return held

    def release(self, id: str, history: Ids | None = None) -> None:
        """Frees what the request holds here. With its history, complete blocks stay in the prefix cache.

        What is lent to a living worker stays held until that worker lets go.
        """
        held = self.held.get(id)
        if held is None or held.lessee is not None:
            return
        commits = self.commit(held, history) if history is not None else []
        self.outgoing.cancel(id)
        del self.held[id]
        self.pool.release(held.own_blocks)
        if held.owner is not None:
            self._give_back_to(held.owner, KVRelease(id=id, lessee=self.ctx.worker, commits=commits))
        for told in self.on_release:
            told(id)

    def _give_back_to(self, owner: str, release: KVRelease) -> None:
        if owner in self._down:
            self._down[owner].append(release)  # its successor keeps the blocks for us until it hears of it
        else:
            self.ctx.send(release, to=owner)

    def drop_own_blocks(self, held: HeldKV, history: Ids) -> None:
        """Frees the blocks that are ours (a preemption); what is cached or leased serves to come back sooner."""
        self.commit(held, history)
        self.pool.release(held.own_blocks)
        del held.blocks[held.num_leased :]
        held.num_committed = min(held.num_committed, held.num_leased)
        held.num_computed = min(held.num_computed, held.num_leased * self.layout.block_tokens)
        held.partial = {number for number in held.partial if number < held.num_leased}
        held.replay = range(0)

    def reclaim_cached(self, held: HeldKV) -> None:
        """After a preemption: holds again those of its blocks that are still cached here."""
        self.prefixes.reclaim(held)

    def commit(self, held: HeldKV, history: Ids) -> list[tuple[int, bytes]]:
        """Enters newly completed blocks into the prefix cache; returns those that their owner has to enter."""
        size = self.layout.block_tokens
        num_full = held.num_computed // size
        if not held.caching or num_full <= held.num_committed:
            return []
        if num_full > len(held.names):
            known = len(held.names)
            parent = held.names[-1] if held.names else None
            held.names += extend_chain(
                parent,
                history[known * size : num_full * size],
                namespace=self.namespace,
                salt=held.salt,
                block_tokens=size,
            )
        named = [(held.blocks[i], held.names[i]) for i in range(held.num_committed, num_full)]
        num_theirs = max(0, held.num_leased - held.num_committed)
        held.num_committed = num_full
        self.pool.commit(named[num_theirs:], partial={held.names[number] for number in held.partial})
        return named[:num_theirs]

    # ------------------------------------------------------------------------------------------------------- running

    def run(self, runs: Sequence[Run], *, rows: str | None = None) -> torch.Tensor | None:
        """Runs tokens of several sequences in one forward pass and writes their KV.

        rows None: no logits (prefill). "all": float32 logits [T, vocab], one row a token.
        """
        counts = np.array([len(run.tokens) for run in runs], np.int32)
        kv_lens = np.array([run.start for run in runs], np.int32) + counts
        tables = np.zeros((len(runs), self.layout.blocks_for(int(kv_lens.max()))), np.int32)
        for i, run in enumerate(runs):
            used = self.layout.blocks_for(int(kv_lens[i]))
            tables[i, :used] = run.held.blocks[:used]
        tokens = np.concatenate([run.tokens for run in runs])
        replays = _replays(runs)
        logits = self.forward(tokens, counts, kv_lens, tables, rows=rows, phase="prefill", replays=replays)
        for run, end in zip(runs, kv_lens.tolist(), strict=True):
            run.held.num_computed = end
        return logits

    def forward(
        self,
        tokens: Ids,
        counts: Ids,
        kv_lens: Ids,
        tables: Ids,
        *,
        rows: str | None = "all",
        phase: Phase = "decode",
        features: Features | None = None,
        replays: Replays | None = None,
    ) -> torch.Tensor | None:
        """One forward pass: flat int32 tokens [T], tokens a sequence [S], context with them [S], block table [S, N].

        features, where given, takes what its layers give at each token.
        """
        began = time.perf_counter()
        starts = query_starts(counts, len(tokens))
        if len(tokens) == len(counts):  # a plain decode step: nothing to spread
            positions, pairs = kv_lens.astype(np.int64) - 1, int(kv_lens.sum())
        else:
            within = np.arange(len(tokens), dtype=np.int64) - np.repeat(starts[:-1], counts)
            positions = np.repeat(kv_lens - counts, counts) + within
            pairs = int(positions.sum()) + len(tokens)
        device = self.model.device
        clock = _DeviceClock(device) if device.type == "cuda" else None
        step = StepInput(
            tokens=torch.from_numpy(tokens.astype(np.int64)).to(device),
            positions=torch.from_numpy(positions).to(device),
            query_starts=starts,
            kv_lens=kv_lens,
            block_tables=tables,
            logit_rows=torch.arange(len(tokens), device=device) if rows == "all" else None,
            features=features,
            replays=replays,
        )
        with torch.inference_mode():
            logits = self.model.forward(step, self.kv)
        seconds = clock.stop() if clock is not None else time.perf_counter() - began
        if self.expert_load is not None:
            self.expert_load.end_step(phase)
        self.last_step = (len(tokens), pairs, seconds)
        if phase == "decode":
            self.decode_s += (seconds - self.decode_s) * (_LATEST if self.decode_s else 1.0)
        self.busy_s += time.perf_counter() - began
        return logits

    def decode_graphs(self, batch: Batch) -> DecodeGraphs | None:
        """CUDA graphs of this model's decode step over the batch's slots, captured now; None where it has none."""
        if self.model.device.type != "cuda":
            return None
        from flowinfer.engine.models.deepseek_v4.fused import FusedV4
        from flowinfer.engine.models.fused import FusedModel  # here: it imports Triton

        if not isinstance(self.model, FusedModel | FusedV4):
            return None
        from flowinfer.engine.decode_graphs import DecodeGraphs

        graphs = DecodeGraphs(self.model, self.kv, batch)
        graphs.load = self.expert_load
        graphs.capture()
        return graphs

    # -------------------------------------------------------------------------------------- what other workers ask for

    def observe(self, event: Event, *, by: object) -> None:
        """Takes the events of KV_EVENTS. Several stages of the worker hear them; the first that asked answers."""
        self._keeper = self._keeper or by
        if by is not self._keeper:
            return
        match event:
            case KVRelease():
                self._on_release(event)
            case KVPin():
                self._pin(event)
            case KVUnpin():
                self._unpin(event.reader, event.id)
            case KVFetch():
                self.outgoing.fetch(event)
            case WorkerDown():
                self._on_down(event)
            case LeaseQuery() if leases := self.leases_of(event.owner):
                self.ctx.send(LeaseReport(owner=event.owner, leases=leases), to="supervisor")
            case WorkerUp():
                self._on_up(event)

    def leases_of(self, owner: str) -> dict[str, list[int]]:
        """Blocks of this owner that are still read here, by request."""
        return {h.id: h.blocks[: h.num_leased] for h in self.held.values() if h.owner == owner and h.num_leased}

    def take_home(self, id: str, history: Ids) -> bool:
        """Copies the blocks that this sequence reads on lease into blocks of ours, and ends the lease.

        history: its tokens; all but the last are computed. False, and nothing changed, where blocks run out.
        """
        held = self.held.get(id)
        if held is None or held.owner is None or held.lessee is not None:
            return False
        blocks = self.pool.allocate(held.num_leased)
        if blocks is None:
            return False
        self.copy_blocks(blocks, held.blocks[: held.num_leased])
        self._give_back_to(held.owner, KVRelease(id=id, lessee=self.ctx.worker, commits=self.commit(held, history)))
        held.blocks[: held.num_leased] = blocks
        held.owner, held.num_leased, held.num_committed = None, 0, 0
        return True

    def copy_blocks(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Copies blocks of the arena, whoever owns the sources, over blocks of ours."""
        with torch.inference_mode():
            self.copies.within(np.array(targets, np.int32), np.array(sources, np.int32))

    def _on_release(self, event: KVRelease) -> None:
        held = self.held.get(event.id)
        if held is None or held.lessee != event.lessee:
            return
        if held.caching:
            self.pool.commit([(block, name) for block, name in event.commits if self.pool.owns(block)])
        self._end_lease(held)

    def _end_lease(self, held: HeldKV) -> None:
        held.lessee = None
        self.release(held.id, held.history)

    def _pin(self, event: KVPin) -> None:
        blocks = self.pool.acquire(event.hashes)
        self._pins[event.reader, event.id] = blocks
        partial = [i for i, name in enumerate(event.hashes[: len(blocks)]) if self.pool.is_partial(name)]
        answer = KVPinned(id=event.id, owner=self.ctx.worker, blocks=np.array(blocks, np.int32), partial=partial)
        self.ctx.send(answer, to=event.reader)

    def _unpin(self, reader: str, id: str) -> None:
        self.pool.release(self._pins.pop((reader, id), []))

    def _on_up(self, event: WorkerUp) -> None:
        for release in self._down.pop(event.worker, ()):
            self.ctx.send(release, to=event.worker)
        if self.pool.num_cached:
            # A front that started again has an empty index: without this, what is cached here is never asked for.
            self.ctx.send(BlockStored(owner=self.ctx.worker, hashes=self.pool.names()), to=event.worker)

    def _on_down(self, event: WorkerDown) -> None:
        self._down.setdefault(event.worker, [])
        self.outgoing.lost(event.worker)
        for reader, id in [pin for pin in self._pins if pin[0] == event.worker]:
            self._unpin(reader, id)
        for held in [held for held in self.held.values() if held.lessee == event.worker]:
            held.lessee = None
            if not any(goes_on(held.id) for goes_on in self.on_lessee_lost):
                self._end_lease(held)


class _DeviceClock:
    """Times what is queued on a card from here on, without the decode steps that are still in flight before it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._started, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._started.record(self._stream)

    def stop(self) -> float:
        """Seconds, once all of it is done: a step budget is about the device's time, not about starting its work."""
        self._ended.record(self._stream)
        self._ended.synchronize()
        return float(self._started.elapsed_time(self._ended)) / 1e3


def _replays(runs: Sequence[Run]) -> Replays | None:
    """What these runs may read and write, where any of them replays a part of its prefix."""
    if all(run.start >= run.held.replay.stop for run in runs):
        return None
    ranges = [run.held.replay if run.start < run.held.replay.stop else range(0) for run in runs]
    starts, stops = ([part.start for part in ranges], [part.stop for part in ranges])
    return Replays(np.array(starts, np.int32), np.array(stops, np.int32))


def _kernels_of(ctx: Context) -> str:
    """The plan's kernel set with batch_invariant. Raises ModelError where this worker computes by another one."""
    planned: str = getattr(ctx, "kernels", "")
    if planned and (own := kernel_set(ctx.device.partition(":")[0])) != planned:
        raise ModelError(
            f"batch_invariant: this worker computes by {own!r}, the service was planned for {planned!r}.",
            help="Give all workers with a model one kind of device and the same packages.",
        )
    return planned


def _peak(window: LoadWindow, row: int) -> float:
    return float(window.peaks()[row])


def query_starts(counts: Ids, num_tokens: int) -> Ids:
    """int32 [S + 1]: where the tokens of each sequence begin among num_tokens flat ones."""
    if num_tokens == len(counts):
        return np.arange(num_tokens + 1, dtype=np.int32)
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def sized_arena(arena: Arena, layout: KVLayout, device: str) -> Arena:
    """An arena on a GPU gets what its share of the memory leaves beside the weights; others have their size."""
    if arena.num_blocks or device == "cpu":
        return arena
    _, total = torch.cuda.mem_get_info(device)
    room = int(total * arena.device_share) - torch.cuda.memory_allocated(device)
    blocks = room // layout.block_bytes
    if blocks < 1:
        raise ModelError(f"{device} has no room for KV blocks beside the weights.", help="Use fewer workers on it.")
    return dataclasses.replace(arena, num_blocks=blocks, end_block=blocks)


def _eviction(ctx: Context, num_blocks: int) -> Eviction:
    """Of the pool, as the graph's cache-lookup sets it."""
    kinds = [settings["eviction"] for settings in ctx.settings_of("cache-lookup") if "eviction" in settings]
    return make_eviction(kinds[0] if kinds else "density", num_blocks)


def _arena_tensor(arena: Arena, layout: KVLayout, device: str) -> torch.Tensor:
    dtype = getattr(torch, layout.dtype)
    shape = (arena.num_blocks, *layout.block_shape)
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = arena.num_blocks * layout.block_bytes // DTYPE_BYTES[layout.dtype]
    return torch.frombuffer(arena.buffer, dtype=dtype, count=count).view(shape)
