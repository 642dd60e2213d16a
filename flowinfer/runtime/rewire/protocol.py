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


class Manner(msgspec.Struct, frozen=True, kw_only=True):
    """How a change is made. drain: modes as flowinfer.spec.drain reads them; "": as the file's `serve.drain` says.

    probation_s: how long after the drain a breach leads back to what ran before.  max_errors: by how much the share of
    failed requests may rise meanwhile.  max_latency: by which factor the medians of first tokens and of tokens may.
    """

    drain: str = ""
    probation_s: float = 2.0
    max_errors: float = 0.05
    max_latency: float = 3.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the service is asked. plan: what it shall become.  renew: stages to build anew even if nothing differs.

    manner: how a change is made.
    """

    do: Literal["status", "plan", "apply", "rollback", "history", "tap"]
    plan: Plan | None = None
    source: Source = Source()
    renew: tuple[str, ...] = ()
    note: str = ""
    manner: Manner = Manner()
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
