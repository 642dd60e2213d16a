"""Whether the counters of what a change replaces agree: sent = received = ended, edge by edge. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from flowinfer.runtime.events import Counted


def imbalances(counted: Mapping[str, Counted], leaving: Collection[str]) -> list[str]:
    """A line for each edge to or from a leaving worker whose counters differ, and for each request it still has.

    Edges between workers that both stay are in use and so never agree; of a worker that died there is nothing to ask.
    """
    lines = [
        f"edge {edge}: {producer} sent {sent}, {consumer} received {received}"
        for edge, producer, consumer, sent, received in _pairs(counted, leaving)
        if sent != received
    ]
    for name in leaving:
        if name in counted:
            lines += [f"edge {e}: {name} still has {n} of {p} not ended" for e, p, _, n in counted[name].received if n]
            if counted[name].open:
                lines.append(f"{name} still has {counted[name].open} open requests")
    for name, found in counted.items():
        if found.left:
            lines.append(f"the old stages of {name} still have {found.left} of {found.layered} requests")
    return lines


def summary(counted: Mapping[str, Counted], leaving: Collection[str]) -> str:
    """One line for when all agree."""
    pairs = list(_pairs(counted, leaving))
    layered = max((found.layered for found in counted.values()), default=0)
    parts = [f"{layered} requests of the old stages have ended"] if layered or not leaving else []
    if leaving:
        parts.append(f"{sum(sent for *_, sent, _ in pairs)} messages to and from the old workers arrived")
    return ", ".join(parts) + ", and nothing of them is left"


def _pairs(counted: Mapping[str, Counted], leaving: Collection[str]) -> Iterator[tuple[str, str, str, int, int]]:
    """Edge, producer, consumer, sent, received: of every pair of live workers one of which leaves."""
    received = {
        (edge, producer, consumer): number
        for consumer, found in counted.items()
        for edge, producer, number, _ in found.received
    }
    for producer, found in counted.items():
        for edge, consumer, sent in found.sent:
            if consumer in counted and (producer in leaving or consumer in leaving):
                yield edge, producer, consumer, sent, received.get((edge, producer, consumer), 0)
