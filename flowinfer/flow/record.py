"""Records what flows in a local service: every message on every edge, and what ends requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from flowinfer.codec import schema_of
from flowinfer.flow.file import EVENTS, Header, Writer, fields_of
from flowinfer.graph.plan import Plan
from flowinfer.message import Cancel, Ended, Event, Message, type_registry
from flowinfer.runtime.local import LocalService
from flowinfer.runtime.watch import watch

ENDS = (Cancel, Ended)  # the only events that come from outside of the stages


def header_of(plan: Plan, overlays: Sequence[str], sets: Sequence[str]) -> Header:
    """The header of a recording of this plan."""
    kept = [edge for edge in plan.edges if not type_registry[edge.message].local]
    names = {edge.message for edge in kept} | {kind.__name__ for kind in ENDS}
    return Header(
        file=plan.file,
        overlays=tuple(str(Path(name).resolve()) for name in overlays),
        sets=tuple(sets),
        digest=plan.digest,
        types={name: schema_of(type_registry[name]) for name in sorted(names)},
        edges=tuple(edge.name for edge in kept),
        skipped=tuple(edge.name for edge in plan.edges if edge not in kept),
        wall=time.time(),
        fields={name: tuple(fields) for message in names for name, fields in fields_of(type_registry[message]).items()},
    )


class Recorder:
    """Writes what a service passes on, until `close`. Attach it before the first request."""

    def __init__(self, service: LocalService, path: Path, header: Header) -> None:
        self._writer = Writer(path, header)
        self._clock = service.group.clock
        self._began = self._clock.now()
        self.num_messages = 0
        for name in header.edges:
            watch(service.group, name, partial(self._add, name))
        service.group.watch = self._event

    def _event(self, event: Event) -> None:
        if isinstance(event, ENDS):
            self._add(EVENTS, event)

    def _add(self, edge: str, message: Message) -> None:
        self.num_messages += 1
        self._writer.add(self._clock.now() - self._began, edge, message)

    def close(self) -> None:
        self._writer.close()
