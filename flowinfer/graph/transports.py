"""The transports of KV by name, and which of them fits the two ends of an edge. Pure; imports none of them.

What a transport has to do, `flowinfer.transfer.transport` says.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal, NamedTuple

Reach = Literal["worker", "host", "network"]
AUTO = "auto"


@dataclass(frozen=True)
class Transport:
    """One way of KV. module: holds its two halves; "": the taker reads where it lies, and nothing moves.

    reach: how far apart the ends may be.  device: what both ends must run on, "" for any.  by_name: `auto` never takes
    it.  needs: a module that must be installed, and `extra`, what of FlowInfer brings it.
    """

    name: str
    module: str = ""
    reach: Reach = "network"
    device: Literal["", "cpu", "cuda"] = ""
    by_name: bool = False
    needs: str = ""
    extra: str = ""

    @property
    def moves(self) -> bool:
        """Whether blocks are copied from pool to pool."""
        return bool(self.module)

    @property
    def is_there(self) -> bool:
        """Whether its module, and what that needs, are installed."""
        return all(importlib.util.find_spec(name) for name in (self.module, self.needs) if name)


# Best first: `auto` takes the first that fits.
TRANSPORTS: dict[str, Transport] = {
    transport.name: transport
    for transport in (
        Transport("local", reach="worker"),
        Transport("shm", reach="host", device="cpu"),
        Transport("cuda_ipc", "flowinfer.transfer.cuda_ipc", reach="host", device="cuda"),
        Transport("nixl", "flowinfer.transfer.nixl", by_name=True, needs="nixl", extra="nixl"),
        Transport("tcp", "flowinfer.transfer.tcp"),
    )
}


class End(NamedTuple):
    """One end of an edge that carries KV. device: as in a file, so `auto` where it isn't known before the start."""

    worker: str
    device: str
    host: str = ""


def fitting(owner: End, taker: End) -> list[str]:
    """What `auto` takes between two ends: one name, or several where it depends on what a device turns out to be."""
    found = [_best(a, b) for a in _settled(owner) for b in _settled(taker) if _may_be(owner, a, taker, b)]
    return list(dict.fromkeys(found))


def _settled(end: End) -> list[End]:
    """What the end may turn out to be."""
    return [end._replace(device=device) for device in ("cpu", "cuda")] if end.device == AUTO else [end]


def _may_be(owner: End, a: End, taker: End, b: End) -> bool:
    return owner.device != taker.device or a.device == b.device  # on one host, `auto` is the same for both


def _best(owner: End, taker: End) -> str:
    ways = (way for way in TRANSPORTS.values() if not way.by_name and way.is_there)
    return next(way.name for way in ways if not why_not(way.name, owner, taker))


def why_not(name: str, owner: End, taker: End) -> str:
    """Why this transport can't be between the two ends whatever `auto` turns out to be, "" if it can."""
    transport = TRANSPORTS[name]
    if transport.reach == "worker" and owner.worker != taker.worker:
        return f"`{owner.worker}` and `{taker.worker}` are two workers"
    if transport.reach == "host" and owner.host != taker.host:
        places = [f"`{end.worker}` runs on {end.host or 'this host'}" for end in (owner, taker)]
        return " and ".join(places)
    for end in (owner, taker):
        if transport.device and end.device != AUTO and end.device.partition(":")[0] != transport.device:
            return f"`{end.worker}` runs on {end.device}, and {name} needs {_DEVICES[transport.device]} at both ends"
    return ""


_DEVICES = {"cpu": "a CPU", "cuda": "an NVIDIA GPU"}
