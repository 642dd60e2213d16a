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

    @property
    def kinds(self) -> frozenset[str]:
        """What the end may turn out to run on."""
        return frozenset({"cpu", "cuda"}) if self.device == AUTO else frozenset({self.device.partition(":")[0]})


def fitting(owner: End, taker: End) -> list[str]:
    """Names of the transports between two ends that `auto` may take, best first; with a device left open, those of all
    that it may be."""
    found = []
    for transport in TRANSPORTS.values():
        if not transport.by_name and transport.is_there and not why_not(transport.name, owner, taker):
            found.append(transport.name)
            if transport.device == "" or owner.kinds == taker.kinds == {transport.device}:
                break  # it always fits, so nothing behind it is ever taken
    return found


def why_not(name: str, owner: End, taker: End) -> str:
    """Why this transport can't be between the two ends, "" if it can."""
    transport = TRANSPORTS[name]
    if transport.reach == "worker" and owner.worker != taker.worker:
        return "they are two workers"
    if transport.reach == "host" and owner.host != taker.host:
        return (
            f"`{owner.worker}` runs on {owner.host or 'this host'} and `{taker.worker}` on {taker.host or 'this host'}"
        )
    for end in (owner, taker):
        if transport.device and transport.device not in end.kinds:
            return f"`{end.worker}` runs on {end.device}, and {name} needs {_DEVICES[transport.device]} at both ends"
    return ""


_DEVICES = {"cpu": "a CPU", "cuda": "an NVIDIA GPU"}
