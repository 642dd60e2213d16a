"""Decides how long blocks stay and which go first when room is short. Pure: time and sizes are arguments.

Time is the cache's own: it never runs back, and a leap forward of the wall clock is believed only once it has lasted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

DRIFT_S = 60.0  # a wall clock ahead by no more is followed at once: leap seconds, slews, a short suspend
GAP_S = 86_400.0  # so is one that was away for at most a day: a service that was off overnight
SETTLE_S = 600.0  # a leap beyond is believed after ten minutes: by then a wrong clock has been put right
DAY_S = 86_400.0
HOUR_S = 3_600.0


class SteadyClock:
    """Cache time in seconds since 1970, from the wall clock and a monotonic one.

    A wall clock set back stops nothing: cache time goes on from its high-water mark. One that leaps ahead by more than
    a minute while running, or a day between two runs, expires nothing until it has stayed ahead for ten minutes.
    """

    def __init__(self, high_water: float, wall: float, monotonic: float) -> None:
        self._time = wall if 0 <= wall - high_water <= GAP_S or not high_water else high_water
        self._at = monotonic
        self._ahead_since: float | None = None

    def now(self, wall: float, monotonic: float) -> float:
        """Cache time at this reading of both clocks."""
        self._time += max(0.0, monotonic - self._at)
        self._at = max(self._at, monotonic)
        ahead = wall - self._time
        if ahead <= DRIFT_S:
            self._ahead_since = None
            self._time = max(self._time, wall)
        elif self._ahead_since is None:
            self._ahead_since = monotonic
        elif monotonic - self._ahead_since >= SETTLE_S:
            self._time, self._ahead_since = wall, None
        return self._time


@dataclass(frozen=True)
class Retention:
    """Seconds that blocks of a class stay after their last use; `default` for classes that aren't named."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    default: float = HOUR_S

    def of(self, cls: str) -> float:
        """Seconds that this class stays. 0: it isn't stored at all."""
        return self.seconds.get(cls, self.seconds.get("default", self.default))

    def asked(self, cls: str, seconds: float | None) -> float:
        """Seconds of a request of this class that asks for so many: any that is no longer than the longest of all."""
        return self.of(cls) if seconds is None else min(seconds, max(self.default, *self.seconds.values(), 0.0))


def expiry_group(expiry: float, keep_s: float) -> int:
    """Number of the group of blocks that expire at about the same time, and so lie in one segment.

    A group spans an eighth of the retention, a day at most: a segment outlives its first block by no more than that.
    """
    return int(expiry // min(DAY_S, max(60.0, keep_s / 8)))


@dataclass(frozen=True)
class Held:
    """A live block of a segment. used: cache time of its last use; hit: whether it was read since it was written."""

    name: bytes
    tenant: str
    size: int
    used: float
    hit: bool


@dataclass(frozen=True)
class Candidate:
    """A sealed segment that may go. size: bytes on disk."""

    id: int
    size: int
    blocks: Sequence[Held]


def fair_share(by_tenant: Mapping[str, int], room: int) -> int:
    """The bytes that every tenant may hold so that all fit `room`: small ones keep all, large ones are cut to one size.

    Max-min fairness (Bertsekas & Gallager, Data Networks, 1992).
    """
    left, sizes = room, sorted(by_tenant.values())
    for position, size in enumerate(sizes):
        share = left // (len(sizes) - position)
        if size > share:
            return share
        left -= size
    return max([room, *sizes])


def choose_victim(candidates: Sequence[Candidate], by_tenant: Mapping[str, int]) -> tuple[int, list[bytes]]:
    """(segment to free, blocks of it that are worth copying forward). by_tenant: bytes in the whole store.

    Worth it are blocks that were hit since they were written, and all those of tenants that hold less than the mean,
    who would else pay for a tenant that writes without end. The segment goes of which least is worth it; ties: the one
    used longest ago. At most half a segment is copied, so that each eviction frees room. (CLOCK, Corbato 1968, with
    segments for pages: what is copied has to be hit again.)
    """
    mean = sum(by_tenant.values()) / max(1, len(by_tenant))

    def kept(candidate: Candidate) -> list[Held]:
        small = {block.tenant: by_tenant.get(block.tenant, 0) < mean for block in candidate.blocks}
        worth = [block for block in candidate.blocks if block.hit or small[block.tenant]]
        return _fitting(sorted(worth, key=lambda b: (not small[b.tenant], -b.used)), candidate.size // 2)

    def rank(candidate: Candidate) -> tuple[float, float]:
        fraction = sum(block.size for block in kept(candidate)) / candidate.size
        return round(fraction, 1), max((block.used for block in candidate.blocks), default=0.0)

    victim = min(candidates, key=rank)
    return victim.id, [block.name for block in kept(victim)]


def _fitting(blocks: Sequence[Held], room: int) -> list[Held]:
    chosen: list[Held] = []
    for block in blocks:
        if block.size <= room:
            chosen.append(block)
            room -= block.size
    return chosen
