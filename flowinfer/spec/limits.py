"""Limits of an experiment's arm B as files write them: `errors: "> 1%"`, `ttft_p95: "> 1.5x"`. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from flowinfer.spec.hints import did_you_mean
from flowinfer.units import parse_duration, parse_share

NAMES = ("errors", *(f"{what}_p{rank}" for what in ("ttft", "itl", "latency") for rank in (50, 90, 95, 99)))
_LIMIT = re.compile(r"\s*>\s*(?P<bound>\S+(?: ?%)?)\s*")
_FACTOR = re.compile(r"([0-9]+(?:\.[0-9]+)?)x")


@dataclass(frozen=True)
class ArmLimit:
    """Arm B is over it where its figure `name` is above `bound`; with relative, above bound times that of arm A.

    bound: a share for errors, seconds for the others. rank: of the percentile.
    """

    name: str
    bound: float
    relative: bool
    text: str

    @property
    def rank(self) -> float:
        return float(self.name.rpartition("_p")[2]) / 100 if "_p" in self.name else 0.0


def parse_limits(written: Mapping[str, str]) -> list[ArmLimit]:
    """The limits of `stop_if`. Raises ValueError that names the one that can't be read."""
    return [_limit(name, text) for name, text in written.items()]


def _limit(name: str, text: str) -> ArmLimit:
    if name not in NAMES:
        hint = did_you_mean(name, NAMES) or f"Figures: {', '.join(NAMES)}."
        raise ValueError(f"stop_if knows no figure `{name}`. {hint}")
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise ValueError(f'stop_if.{name}: {text!r} isn\'t a limit such as "> 1.5x"')
    bound = match["bound"]
    if factor := _FACTOR.fullmatch(bound):
        return ArmLimit(name, float(factor[1]), True, f"{name} {text.strip()}")
    try:
        value = parse_share(bound) if name == "errors" else parse_duration(bound)
    except ValueError as error:
        raise ValueError(f"stop_if.{name}: {error}; or a factor of arm A's, such as 1.5x") from error
    return ArmLimit(name, value, False, f"{name} {text.strip()}")
