"""`flowinfer tap EDGE`: messages of a running service's edge as they pass; tensors by their shape and range."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flowinfer.errors import FlowInferError

if TYPE_CHECKING:
    from flowinfer.graph.plan import EdgePlan, Plan

RENEW_S = 2.0  # a third of the workers' lease
BUFFER = 4 << 20  # bytes of messages that wait for this process; what comes on top is lost, and counted


@dataclass
class Counts:
    """What the workers said of a tap, by worker and generation; `shown` is counted here."""

    shown: int = 0
    told: dict[tuple[str, int], dict[str, int]] = field(default_factory=dict)

    def total(self, name: str) -> int:
        return sum(counts[name] for counts in self.told.values())

    def line(self) -> str:
        dropped = self.total("num_skipped") + self.total("num_lost")
        parts = [f"{self.shown} shown", f"{self.total('num_seen')} passed", f"{dropped} dropped"]
        return ", ".join(parts) + (" (the service gives a tap 1 % of its time)" if dropped else "")


@click.command()
@click.argument("edge")
@click.option("--where", default="", metavar="EXPR", help="As in: request == 'x' and num_tokens > 100.")
@click.option("--limit", type=click.IntRange(1), help="End after so many messages.")
@click.option("--sample", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="A share of the messages.")
@click.option("--for", "seconds", type=click.FloatRange(0, min_open=True), metavar="SECONDS", help="End after this.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each message.")
@click.option("--service", default="", metavar="NAME", help="Of several running services, this one.")
def tap(
    edge: str, where: str, limit: int | None, sample: float, seconds: float | None, as_json: bool, service: str
) -> None:
    """Show messages on EDGE ("route -> lookup") of the running service, until Ctrl-C.

    Fields in EXPR are those of the message, and request, num_tokens, type; with and, or, not, in, len() and arithmetic.
    Nothing waits for this command: what can't be shown in time is dropped and counted.
    """
    from flowinfer.observe.where import compile_where
    from flowinfer.runtime.rewire.control import find
    from flowinfer.runtime.rewire.protocol import Tap

    _, folder = find(service=service)
    found = edge_of(plan_of(folder), edge)
    compile_where(where, _kind(found))  # a mistake is told here
    counts = Counts()
    with _listening(folder) as (listener, path):
        ask = Tap(edge=found.name, to=str(path), where=where, limit=limit or 1_000_000_000, sample=sample)
        try:
            for worker, message in _messages(folder, listener, ask, seconds, counts):
                click.echo(_json(worker, message) if as_json else _line(worker, message))
                counts.shown += 1
                if counts.shown == limit:
                    break
        except KeyboardInterrupt:
            pass
        finally:
            _send(folder, Tap(edge=found.name, to=str(path), limit=0))
            _last_counts(listener, counts)
    click.echo(f"{found.name}: {counts.line()}", err=True)


def plan_of(folder: Path) -> Plan:
    from flowinfer.runtime.rewire.control import ask
    from flowinfer.runtime.rewire.protocol import Request

    (*_, reply) = ask(folder, Request(do="status"))
    if reply.plan is None:
        raise FlowInferError(f"The service doesn't tell its plan: {reply.text}")
    return reply.plan


def edge_of(plan: Plan, name: str) -> EdgePlan:
    """The edge of this name, however it is spaced; `a -> b` also finds the only `a.x -> b.y`."""
    from flowinfer.spec.hints import did_you_mean

    wanted = re.sub(r"\s*->\s*", " -> ", name.strip())
    for edge in plan.edges:
        if wanted in (edge.name, f"{edge.source} -> {edge.target}"):
            return edge
    names = [edge.name for edge in plan.edges]
    help = did_you_mean(wanted, names) or f"Edges: {', '.join(names)}."
    raise FlowInferError(f"There is no edge {name!r}.", help=help)


def _kind(edge: EdgePlan) -> Any:
    from flowinfer.message import type_registry

    return type_registry.get(edge.message)


@contextlib.contextmanager
def _listening(folder: Path) -> Iterator[tuple[socket.socket, Path]]:
    path = folder / f"tap-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        listener.bind(str(path))
        try:
            yield listener, path
        finally:
            path.unlink(missing_ok=True)


def _send(folder: Path, wanted: Any) -> None:
    from flowinfer.runtime.rewire.control import ask
    from flowinfer.runtime.rewire.protocol import Request

    for _ in ask(folder, Request(do="tap", tap=wanted)):
        pass


def _messages(
    folder: Path, listener: socket.socket, wanted: Any, seconds: float | None, counts: Counts
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the workers show, by worker. Asks again from time to time, which also reaches workers that start anew."""
    end = time.monotonic() + seconds if seconds else float("inf")
    renew_at = 0.0
    while (now := time.monotonic()) < end:
        if now >= renew_at:
            _send(folder, wanted)
            renew_at = now + RENEW_S
        listener.settimeout(max(0.001, min(renew_at, end) - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            yield from _take(listener.recv(1 << 20), counts)


def _take(data: bytes, counts: Counts) -> Iterator[tuple[str, dict[str, Any]]]:
    import msgspec

    told = msgspec.json.decode(data)
    counts.told[told["worker"], told["generation"]] = {
        name: told[name] for name in ("num_seen", "num_matched", "num_skipped", "num_lost")
    }
    for message in told["messages"]:
        yield told["worker"], message


def _last_counts(listener: socket.socket, counts: Counts) -> None:
    """The counts of the datagrams that are still there; their messages came too late."""
    listener.settimeout(0.1)
    with contextlib.suppress(OSError):
        while True:
            for _ in _take(listener.recv(1 << 20), counts):
                pass


def _json(worker: str, message: dict[str, Any]) -> str:
    import msgspec

    return msgspec.json.encode({"worker": worker, **message}).decode()


def _line(worker: str, message: dict[str, Any]) -> str:
    at = message.pop("at")
    clock = time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at * 1e3) % 1000:03d}"
    fields = " ".join(f"{name}={_value(value)}" for name, value in message.items() if name != "type")
    return f"{clock} {worker} {message['type']} {fields}"


def _value(value: Any) -> str:
    if isinstance(value, dict) and "shape" in value and "dtype" in value:
        shape = "×".join(map(str, value["shape"]))
        where = f" on {value['device']}" if "device" in value else ""
        values = f" {value['min']}..{value['max']} mean {value['mean']}" if "min" in value else ""
        return f"<{value['dtype']} {shape}{where}{values}>"
    if isinstance(value, dict):
        return "{" + " ".join(f"{name}={_value(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return repr(value)
