"""Launch parameters that a search found, by card and shape: a JSON file beside each kernel that has any.

tests/bench/bench_kernels.py --write finds and stores them; a card that isn't there gets the kernel's own defaults.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

NAME = "tuned.json"
Tiles = tuple[int, ...]


def file_of(op: str) -> Path:
    """Where the parameters of an op are kept."""
    return Path(__file__).parent / op / NAME


@lru_cache
def card() -> str:
    """The name of this process's GPU; empty without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


@lru_cache
def read(op: str, name: str) -> dict[str, Any]:
    """What the file says of this card, by shape."""
    file = file_of(op)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")).get(name, {}) if file.exists() else {}
    return found


def write(op: str, name: str, shapes: dict[str, Any]) -> None:
    """Enters these shapes of a card into the file; others stay."""
    file = file_of(op)
    cards = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    cards[name] = cards.get(name, {}) | shapes
    file.write_text("{\n" + ",\n".join(_card(*item) for item in cards.items()) + "\n}\n", encoding="utf-8")
    read.cache_clear()


def _card(name: str, shapes: dict[str, Any]) -> str:
    """A card's part of the file, a shape a line."""
    lines = [f"    {json.dumps(shape)}: {json.dumps(steps)}" for shape, steps in shapes.items()]
    return f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }"


def nearest(steps: Sequence[tuple[float, Tiles]], load: float) -> Tiles:
    """Of steps (load, tiles) by rising load, the tiles of the one nearest to `load`, by ratio."""
    return min(steps, key=lambda step: max(step[0], load) / max(1e-9, min(step[0], load)))[1]
