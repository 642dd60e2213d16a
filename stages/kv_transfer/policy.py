"""Decides by which transports a sequence may come, and whether both ends mean the same by a block. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowinfer.graph.transports import AUTO, TRANSPORTS


def ways_of(wanted: str, offered: Sequence[str]) -> list[str]:
    """Of the ways that the owner offers, best first, those that the setting `transport` allows; [] for none."""
    if wanted != AUTO:
        return [wanted] if wanted in offered else []
    return [name for name in offered if name in TRANSPORTS and not TRANSPORTS[name].by_name]


def early_way(wanted: str, device: str) -> str:
    """The transport that both ends had better make ready before the first request, "" for none.

    device: of the taker, `cpu` or `cuda`, which `auto` takes the owner's to be too.
    """
    if wanted == AUTO:
        return "cuda_ipc" if device == "cuda" else ""
    return wanted if TRANSPORTS[wanted].by_name or TRANSPORTS[wanted].device == "cuda" else ""


def disagreement(owner: str, theirs: Mapping[str, str], taker: str, mine: Mapping[str, str]) -> str:
    """How the layouts of two workers differ, naming both ends."""
    names = [name for name in dict.fromkeys([*mine, *theirs]) if theirs.get(name) != mine.get(name)]
    here = ", ".join(f"{name} {mine.get(name, '?')}" for name in names)
    there = ", ".join(f"{name} {theirs.get(name, '?')}" for name in names)
    return f"{owner} computes keys and values with {there or 'another layout'}, and {taker} reads them with {here}."
