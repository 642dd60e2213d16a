"""`flowinfer history`: the journal of changes, a block for each, with what became of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from flowinfer.runtime.rewire.protocol import Step

COLORS = {"done": "green", "refused": "red", "failed": "red", "abandoned": "yellow", "rollback": "yellow"}
COLORS |= {"takeover": "magenta", "resume": "magenta"}


@click.command()
@click.option("--service", default="", metavar="NAME", help="Of several running services, this one.")
@click.option("--name", default="", help="Of a service that doesn't run any more.")
@click.option("--last", type=click.IntRange(1), metavar="N", help="Only the last N changes.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each step.")
def history(service: str, name: str, last: int | None, as_json: bool) -> None:
    """Show the journal of changes, the newest last: each with its steps, and how it ended."""
    from flowinfer.cli.rewire import ask_service, find_service
    from flowinfer.runtime.rewire.journal import Journal
    from flowinfer.runtime.rewire.protocol import Request

    steps = Journal(name).read() if name else ask_service(find_service(service), Request(do="history")).steps
    blocks = grouped(steps)
    for block in blocks[-last:] if last else blocks:
        for line in map(_json, block) if as_json else render(block):
            click.echo(line)
    if not blocks and not as_json:
        click.echo("Nothing was changed yet.")


def _json(step: Step) -> str:
    import msgspec

    return msgspec.json.encode(step).decode()


def grouped(steps: Sequence[Step]) -> list[list[Step]]:
    """The steps by change; a start of the service, and a takeover between changes, stand alone."""
    blocks: list[list[Step]] = []
    is_open = False
    for step in steps:
        if step.step in ("begin", "start") or not is_open:
            blocks.append([])
            is_open = step.step == "begin"
        blocks[-1].append(step)
        if step.step in _over():
            is_open = False
    return blocks


def _over() -> tuple[str, ...]:
    from flowinfer.runtime.rewire.journal import OVER

    return OVER


def render(block: Sequence[Step]) -> Iterator[str]:
    """A line that says what it was and what became of it, and one for each step with the seconds since it began."""
    first, end = block[0], block[-1]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first.at))
    if first.step != "begin":
        yield f"{when}  {_word(first.step)} {first.text}".rstrip()
        return
    outcome = _word(end.step, 0) if end.step in _over() else click.style("not over", fg="yellow")
    took = f" after {end.at - first.at:.1f} s" if end.step in _over() else ""
    yield f"{when}  change {first.change}  {click.style(first.text, bold=True)}: {outcome}{took}"
    for step in block[1:]:
        yield f"{step.at - first.at:17.1f} s  {_word(step.step)} epoch {step.epoch:<3} {step.text}".rstrip()


def _word(step: str, width: int = 10) -> str:
    return click.style(step.ljust(width), fg=COLORS.get(step))
