"""How what is old ends after a change: modes in order, each with a time after which the next one takes over. Pure.

As text: `finish:30s,handoff:10s,replay:10s,abort`. finish: requests end where they are.  handoff: running sequences
move with their KV to a worker that stays.  replay: they are prefilled again, from prompt and tokens so far.  abort:
they fail.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import AfterValidator

from flowinfer.errors import FlowInferError
from flowinfer.units import format_duration, parse_duration

Mode = Literal["finish", "handoff", "replay", "abort"]
MODES: tuple[Mode, ...] = get_args(Mode)
MOVE_S = 10.0  # of a handoff or a replay that names no time: a copy of KV takes milliseconds, a prefill seconds


class Phase(NamedTuple):
    """One mode, and how long it may take."""

    mode: Mode
    limit_s: float

    def __str__(self) -> str:
        return self.mode if self.mode == "abort" else f"{self.mode}:{format_duration(self.limit_s)}"


def parse_drain(text: str, finish_s: float = 30.0) -> tuple[Phase, ...]:
    """The phases of a text, which always end in abort; finish_s: of a finish that names no time, and where text is "".

    A bare time is that of `finish`, then what is left moves or is computed again. Raises FlowInferError.
    """
    if not text:
        return parse_drain(f"{finish_s:g}s")
    if ":" not in text and "," not in text and text not in MODES:
        text = f"finish:{text if not _is_number(text) else text + 's'},handoff,replay"
    phases = [_phase(part.strip(), finish_s) for part in text.split(",")]
    order = [MODES.index(phase.mode) for phase in phases]
    if order != sorted(set(order)):
        raise FlowInferError(
            f"Drain {text!r} names a mode twice, or in another order than {', '.join(MODES)}.", help=_HELP
        )
    return tuple(phases) if phases[-1].mode == "abort" else (*phases, Phase("abort", 0.0))


def total_s(phases: tuple[Phase, ...]) -> float:
    """How long a request may live at most."""
    return sum(phase.limit_s for phase in phases)


def _phase(part: str, finish_s: float) -> Phase:
    mode, colon, limit = part.partition(":")
    if mode not in MODES:
        raise FlowInferError(f"There is no drain mode {mode!r}.", help=_HELP)
    if mode == "abort":
        if colon:
            raise FlowInferError("abort takes no time: it's at once.", help=_HELP)
        return Phase("abort", 0.0)
    if not colon:
        return Phase(mode, finish_s if mode == "finish" else MOVE_S)
    try:
        return Phase(mode, parse_duration(f"{limit}s" if _is_number(limit) else limit))
    except ValueError as error:
        raise FlowInferError(f"{limit!r} of {mode} is no time: {error}.", help=_HELP) from error


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _checked(text: str) -> str:
    try:
        parse_drain(text)
    except FlowInferError as error:
        raise ValueError(f"{error.message} {error.help}") from error
    return text


DrainText = Annotated[str, AfterValidator(_checked)]
_HELP = "As in finish:30s,handoff:10s,replay:10s,abort; each time falls to the next mode."
