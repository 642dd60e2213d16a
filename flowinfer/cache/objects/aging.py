"""Decides which objects go: what has expired, then what exceeds the limits. Pure: sizes and times are arguments.

An object's age counts from its last writing, and a hit writes it anew only once half its retention is over (a write
costs money, and the bytes again). So that it stays for all of its retention after its last use nevertheless, it is
deleted at one and a half of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flowinfer.cache.disk.retention import fair_share
from flowinfer.cache.objects.naming import Named


class Stored(NamedTuple):
    """An object of ours. modified: seconds since 1970, when it was written, by the store's clock."""

    named: Named
    size: int
    modified: float


@dataclass(frozen=True)
class ObjectLimits:
    """Bytes in all, by class, and of any one tenant; None: no limit."""

    total: int | None = None
    classes: Mapping[str, int] = field(default_factory=dict)
    tenant: int | None = None


def needs_renewal(stored: Stored, now: float) -> bool:
    """Whether a use must write it anew."""
    return now - stored.modified > stored.named.keep / 2


def expired(stored: Stored, now: float) -> bool:
    """Whether its last use is longer ago than its retention."""
    return now - stored.modified > 1.5 * stored.named.keep


def victims(objects: Sequence[Stored], limits: ObjectLimits) -> list[Stored]:
    """What must go so that all limits hold: of what is too large, of the largest tenants, the oldest."""
    gone: dict[str, Stored] = {}

    def left(chosen: Iterable[Stored]) -> list[Stored]:
        return [stored for stored in chosen if stored.named.key not in gone]

    for cls, limit in limits.classes.items():
        _shrink([stored for stored in left(objects) if stored.named.cls == cls], limit, gone)
    if limits.tenant is not None:
        for tenant, owned in _by_tenant(left(objects)).items():
            if tenant:
                _shrink(owned, limits.tenant, gone)
    if limits.total is not None:
        _shrink(left(objects), limits.total, gone)
    return list(gone.values())


def _shrink(objects: Sequence[Stored], limit: int, gone: dict[str, Stored]) -> None:
    tenants = _by_tenant(objects)
    sizes = {tenant: sum(stored.size for stored in owned) for tenant, owned in tenants.items()}
    if sum(sizes.values()) <= limit:
        return
    share = fair_share(sizes, limit)
    for tenant, owned in tenants.items():
        excess = sizes[tenant] - share
        for stored in sorted(owned, key=_worth):
            if excess <= 0:
                break
            gone[stored.named.key] = stored
            excess -= stored.size


def _worth(stored: Stored) -> tuple[float, float]:
    """Oldest first; of what was written in one minute the last, since a sequence's tail needs its head."""
    return stored.modified // 60, -stored.modified


def _by_tenant(objects: Iterable[Stored]) -> dict[str, list[Stored]]:
    tenants: dict[str, list[Stored]] = defaultdict(list)
    for stored in objects:
        tenants[stored.named.tenant].append(stored)
    return tenants
