"""Looks at what passes an edge, without a cost while nobody looks: an edge's `put` is wrapped, and unwrapped again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from flowinfer.message import Message

if TYPE_CHECKING:
    from flowinfer.runtime.group import Group
    from flowinfer.runtime.outbox import Outbox
    from flowinfer.runtime.stage_run import FusedEdge, StageRun

Look = Callable[[Message], None]


class _Watched:
    """A put that shows each message to those that look, before it is passed on: the next stage may write into it."""

    def __init__(self, put: Look) -> None:
        self.put = put
        self.looks: tuple[Look, ...] = ()

    def __call__(self, message: Message) -> None:
        for look in self.looks:
            look(message)
        self.put(message)


def watch(group: Group, name: str, look: Look) -> bool:
    """Shows `look` what is put on the edge of this name from now on; True if an edge of it begins here.

    Asking again is harmless, and finds edges that a change of the graph has made since.
    """
    found = False
    for run, edge in _edges(group):
        if edge.edge.name == name:
            found = True
            put = edge.put if isinstance(edge.put, _Watched) else _Watched(edge.put)
            if look not in put.looks:
                put.looks = (*put.looks, look)
            if edge.put is not put:
                setattr(edge, "put", put)  # noqa: B010 - one of two types, for one of which it's a method
                run.routes.clear()
    return found


def unwatch(group: Group, look: Look) -> None:
    """Shows it nothing any more."""
    for run, edge in _edges(group):
        put = edge.put
        if isinstance(put, _Watched) and look in put.looks:
            put.looks = tuple(other for other in put.looks if other != look)
            if not put.looks:
                setattr(edge, "put", put.put)  # noqa: B010
                run.routes.clear()


def _edges(group: Group) -> Iterable[tuple[StageRun, FusedEdge | Outbox]]:
    for run in group.runs:
        for outputs in (run.outputs, *(before for _, before in run.layers)):
            for edges in outputs.values():
                for edge in edges:
                    yield run, edge
