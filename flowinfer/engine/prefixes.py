"""Begins a request behind what is cached of its prompt: holds the blocks, and makes those its own that will be written.

Cached blocks are never written. Where a hit is used but for the state of its last blocks (see cache.replay), these are
blocks of the request's own with copies of the entries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from flowinfer.cache.replay import DEFAULT, Beginning, Mode, ReplayRule, replay_rule
from flowinfer.engine.held import HeldKV
from flowinfer.errors import ModelError
from flowinfer.message import Ids, Prompt
from flowinfer.observe import metrics
from flowinfer.stage import Context

if TYPE_CHECKING:
    from flowinfer.engine.engine import Engine
    from flowinfer.engine.layout import KVLayout


def mode_of(ctx: Context) -> Mode:
    """How the graph's cache-lookup wants hits to be used."""
    modes = [settings["replay"] for settings in ctx.settings_of("cache-lookup") if "replay" in settings]
    mode: Mode = modes[0] if modes else DEFAULT
    return mode


def rule_of(layout: KVLayout, mode: Mode) -> ReplayRule:
    """The rule for KV of this layout."""
    return replay_rule(mode, layers=layout.num_layers, window=layout.window, block_tokens=layout.block_tokens)


class Prefixes:
    """Of one engine. A request goes through start, then any of take_pinned and take_restored, then settle."""

    def __init__(self, engine: Engine, mode: Mode) -> None:
        self.engine, self.mode, self.rule = engine, mode, rule_of(engine.layout, mode)

    def check(self, mode: Mode) -> None:
        """Raises ModelError where a stage beside those of this engine wants another mode: one memory can't have two."""
        if mode != self.mode and self.engine.layout.window:
            raise ModelError(
                f"cache-lookup has `replay: {self.mode}` in one arm and `{mode}` in the other, in one worker.",
                help="Place the stages with a model of the arm that differs in a worker of their own.",
            )

    def start(self, prompt: Prompt) -> HeldKV | None:
        """Holds blocks for all tokens of the prompt but the last, and what is cached here of it. None: no room now.

        A prompt whose own log-probabilities are asked for reuses nothing: they come from computing it.
        """
        pool = self.engine.pool
        names = prompt.prefix.hashes if prompt.prefix else []
        reused = pool.acquire(names if prompt.sampling.prompt_logprobs is None else [])
        partial = self._partial_of(names[: len(reused)])
        total = self.engine.layout.blocks_for(len(prompt.history) - 1)
        untouched = self.rule.untouched(len(reused), partial)
        fresh = pool.allocate(total - untouched)
        if fresh is None and untouched < len(reused):  # it must do with what needs no second block
            untouched = self.rule.whole_end(len(reused), partial)
            pool.release(reused[untouched:])
            del reused[untouched:]
            fresh = pool.allocate(total - untouched)
        if fresh is None:
            pool.release(reused)
            return None
        num_spare = len(reused) - untouched
        return HeldKV(
            id=prompt.id,
            blocks=reused + fresh[num_spare:],
            names=list(names),
            caching=prompt.prefix is not None and prompt.cache_keep_s != 0,
            salt=prompt.cache_salt,
            partial={i for i in partial if i < len(reused)},
            num_found=len(reused),
            spare=dict(zip(range(untouched, len(reused)), fresh[:num_spare], strict=True)),
        )

    def can_improve(self, held: HeldKV, num_blocks: int) -> bool:
        """Whether more of the prompt's num_blocks named blocks could be found elsewhere."""
        return self.rule.whole_end(held.num_found, held.partial) < num_blocks

    def take_pinned(self, held: HeldKV, source: Ids, partial: Iterable[int]) -> None:
        """Copies cached blocks of another worker (arena ids) behind what was found. partial: places of these."""
        at = held.num_found
        self.engine.copy_blocks(held.blocks[at : at + len(source)], source.tolist())
        held.num_found += len(source)
        held.partial.update(at + number for number in partial)

    def take_restored(self, held: HeldKV, num_blocks: int, states: Collection[int]) -> None:
        """The entries of num_blocks more blocks are in place, and the state of these numbers in `own_block` of each."""
        at = held.num_found
        held.num_found += num_blocks
        if self.rule.state_blocks:
            held.partial.update(range(at, held.num_found))
        for number in states:
            self._own(held, number)
            held.partial.discard(number)

    def settle(self, held: HeldKV) -> None:
        """Decides where the request begins, and enters what it uses into the cache."""
        begin, size = self.rule.begin(held.num_found, held.partial), self.engine.layout.block_tokens
        for number in [number for number in held.spare if number >= begin.first]:
            self._own(held, number)
        self.engine.pool.release(held.spare.values())
        held.spare.clear()
        self._count(begin, held.num_found)
        inexact_end = min(begin.first + self.rule.inexact, begin.blocks)
        held.partial = {i for i in held.partial if i < begin.first} | set(range(begin.first, inexact_end))
        held.replay = range(begin.first * size, begin.blocks * size)
        held.num_computed = held.cached_tokens = begin.first * size
        held.num_committed = begin.first
        if held.caching:
            self.engine.pool.commit(
                zip(held.blocks[: begin.first], held.names, strict=False),
                partial={held.names[i] for i in held.partial if i < begin.first},
            )

    def reclaim(self, held: HeldKV) -> None:
        """After a preemption: holds again those of its blocks that are still cached here, up to a whole one."""
        kept = held.num_leased
        again = self.engine.pool.acquire(held.names[kept:])
        lacking = {kept + i for i in self._partial_of(held.names[kept : kept + len(again)])}
        end = max(kept, self.rule.whole_end(kept + len(again), lacking))
        self.engine.pool.release(again[end - kept :])
        held.blocks += again[: end - kept]
        held.partial |= {i for i in lacking if i < end}
        held.num_committed = end
        if end > kept:
            held.num_computed = max(held.num_computed, end * self.engine.layout.block_tokens)

    def cut(self, held: HeldKV, num_blocks: int) -> None:
        """Only the leading num_blocks blocks are here; the request goes on behind those that are whole at their end."""
        usable = self.rule.whole_end(num_blocks, held.partial)
        held.num_computed = min(held.num_computed, usable * self.engine.layout.block_tokens)
        held.partial = {number for number in held.partial if number < usable}

    def _partial_of(self, names: Sequence[bytes]) -> set[int]:
        if not self.rule.state_blocks:
            return set()
        return {i for i, name in enumerate(names) if self.engine.pool.is_partial(name)}

    def _own(self, held: HeldKV, number: int) -> None:
        """Puts a block of ours, with the same entries, in the place of a cached one, unless it's ours already."""
        own = held.spare.pop(number, None)
        if own is None:
            return
        shared, held.blocks[number] = held.blocks[number], own
        entries = self.engine.layout.parts["entries"]
        with torch.inference_mode():
            self.engine.kv[own].view(-1)[entries].copy_(self.engine.kv[shared].view(-1)[entries])
        self.engine.pool.release([shared])

    def _count(self, begin: Beginning, num_found: int) -> None:
        size = self.engine.layout.block_tokens
        if begin.replayed:
            metrics.counter("prefix_replay_tokens_total").labels(mode=self.mode).inc(begin.replayed * size)
        if begin.blocks < num_found:
            metrics.counter("prefix_cache_unused_tokens_total").labels(mode=self.mode).inc(
                (num_found - begin.blocks) * size
            )
