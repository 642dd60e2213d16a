"""Replays a trace against a cache, one request after the other: look up, compute the rest, keep it. Serves nothing.

The cache is the real one (KVPool, its eviction and the index that its events feed), without memory behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowinfer.cache.index import BlockIndex
from flowinfer.cache.policies.eviction import Eviction
from flowinfer.cache.policies.expiry import SlidingExpiry
from flowinfer.engine.pool import KVPool
from flowinfer.sim.trace import Trace

OWNER = "pool"


@dataclass
class Replayed:
    """Blocks of a replay: looked up, found (leading ones only), written into the cache, evicted from it."""

    blocks: int = 0
    hits: int = 0
    written: int = 0
    evicted: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0


def replay(trace: Trace, num_blocks: int, eviction: Eviction) -> Replayed:
    """A pool of num_blocks (at least the longest prompt) under this eviction."""
    done, index = Replayed(blocks=trace.num_blocks), BlockIndex()

    def stored(names: list[bytes]) -> None:
        done.written += len(names)
        index.stored(OWNER, names)

    def removed(names: list[bytes]) -> None:
        done.evicted += len(names)
        index.removed(OWNER, names)

    pool = KVPool(0, num_blocks, cached_limit=num_blocks, on_stored=stored, on_removed=removed, eviction=eviction)
    for request in trace.requests:
        hits = len(index.longest_prefix(request.blocks))
        held = pool.acquire(request.blocks)
        assert len(held) == hits, "the index and the pool disagree"
        done.hits += hits
        fresh = pool.allocate(len(request.blocks) - hits)
        assert fresh is not None, "the pool is smaller than a prompt"
        pool.commit(zip(fresh, request.blocks[hits:], strict=True))
        pool.release(held + fresh)
    return done


def replay_expiring(trace: Trace, ttl_s: float) -> Replayed:
    """A cache without a limit whose blocks live for ttl_s after their last use."""
    done, cache = Replayed(blocks=trace.num_blocks), SlidingExpiry(ttl_s)
    for request in trace.requests:
        done.evicted += len(cache.expire(request.at))
        done.hits += cache.num_leading(request.blocks)
        before = len(cache)
        cache.use(request.blocks, request.at)
        done.written += len(cache) - before
    return done
