"""Options of commands that send requests of their own: which, and how a trace is run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from flowinfer.compare.asks import Ask

_POSITIVE = click.FloatRange(0, min_open=True)


@dataclass(frozen=True)
class Requests:
    """What --on and its companions say."""

    on: str
    first: int
    scale: float
    speed: float
    block_tokens: int

    def load(self) -> list[Ask]:
        """The requests. Raises FlowInferError with the line at fault."""
        from flowinfer.compare.asks import load_asks
        from flowinfer.compare.traffic import TraceOptions

        return load_asks(self.on, TraceOptions(self.first, self.scale, self.speed, self.block_tokens))


def request_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--on and how a trace is run; the command gets them as `requests`."""

    @functools.wraps(command)
    def wrapped(
        *args: Any,
        on: str,
        first: int | None,
        trace_scale: float,
        trace_speed: float,
        trace_block: int,
        **more: Any,
    ) -> Any:
        requests = Requests(on, first or 0, trace_scale, trace_speed, trace_block)
        return command(*args, requests=requests, **more)

    found: Callable[..., Any] = wrapped
    for option in reversed(_OPTIONS):
        found = option(found)
    return found


_OPTIONS = (
    click.option("--on", default="builtin", show_default=True, metavar="FILE", help="Requests or a trace: JSON lines."),
    click.option("--first", type=click.IntRange(1), metavar="N", help="Of a trace, the first N requests."),
    click.option("--trace-scale", type=_POSITIVE, default=1.0, metavar="X", help="Makes a trace's lengths X times."),
    click.option(
        "--trace-speed",
        type=_POSITIVE,
        default=1.0,
        metavar="X",
        help="Its windows of --in-flight requests X times as fast.",
    ),
    click.option("--trace-block", type=click.IntRange(1), default=512, metavar="N", help="Tokens of a trace's block."),
)
