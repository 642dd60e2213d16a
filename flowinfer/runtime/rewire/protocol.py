"""What a running service and the command line say to each other: JSON lines on a Unix socket in the run directory."""

from __future__ import annotations

from typing import Literal

import msgspec

from flowinfer.graph.diff import Change
from flowinfer.graph.plan import Plan

SOCKET, SERVICE = "control", "service.json"  # names in the run directory


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan was read from: `flowinfer run FILE -o ... --set ...`."""

    file: str = ""
    overlays: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    allow_local: bool = False


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """A running service, as its folder tells. pid: of `flowinfer run`; controller: of its supervisor."""

    name: str
    pid: int
    controller: int = 0
    address: str = ""
    file: str = ""


class Tap(msgspec.Struct, frozen=True, kw_only=True):
    """A look at an edge: the fields of TapAsk."""

    edge: str
    to: str
    where: str = ""
    limit: int = 1_000_000_000
    sample: float = 1.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the service is asked. plan: what it shall become.  renew: stages to build anew even if nothing differs.

    drain_s: how long the old may end its requests before they are failed; None: as `serve.drain_timeout` says.
    probation_s: how long after the switch a stage that breaks leads back to the plan before.
    """

    do: Literal["status", "plan", "apply", "rollback", "history", "tap"]
    plan: Plan | None = None
    source: Source = Source()
    renew: tuple[str, ...] = ()
    note: str = ""
    drain_s: float | None = None
    probation_s: float = 2.0
    tap: Tap | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the journal. step: begin, prepare, verify, switch, drain, probation, retire, done, refused, ..."""

    at: float  # seconds since 1970
    change: int
    epoch: int
    step: str
    text: str = ""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an answer; the last one has `last`."""

    last: bool = False
    ok: bool = True
    text: str = ""
    help: str = ""
    changes: tuple[Change, ...] = ()
    kept: tuple[str, ...] = ()
    memory_bytes: int = 0  # more at the peak than now
    resident_bytes: int = 0  # of all processes now, where they run
    gap: str = ""
    plan: Plan | None = None
    source: Source | None = None
    steps: tuple[Step, ...] = ()
