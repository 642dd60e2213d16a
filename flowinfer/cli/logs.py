"""`flowinfer logs [STAGE]`: what a running service has logged, by stage and level, from its run directory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from flowinfer.errors import FlowInferError
from flowinfer.units import parse_duration

if TYPE_CHECKING:
    from flowinfer.graph.plan import Plan
    from flowinfer.observe.logs import Line

LOOK_S = 0.2
COLORS = {"DEBUG": "bright_black", "WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}


@click.command()
@click.argument("stage", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is logged from now on, until Ctrl-C.")
@click.option("--since", metavar="TIME", help="Only the last TIME, as in 10min.")
@click.option(
    "--level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="debug",
    help="Only from this level on.",
)
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each.")
@click.option("--service", default="", metavar="NAME", help="Of several running services, this one.")
def logs(stage: str | None, follow: bool, since: str | None, level: str, as_json: bool, service: str) -> None:
    """Show what STAGE of the running service has logged, with what its worker says; without STAGE, everything.

    Lines of workers that have died are kept: 4 MiB an instance, 200 lines a second. What was dropped is counted.
    """
    from flowinfer.cli.tap import plan_of
    from flowinfer.observe.logs import Follower, read
    from flowinfer.runtime.rewire.control import find

    _, folder = find(service=service)
    shown = _Filter(plan_of(folder) if stage else None, stage, level, since)
    follower = Follower(folder)
    if follow:
        follower.skip()
    for line in read(folder):
        if shown.takes(line):
            click.echo(_json(line) if as_json else render(line))
    try:
        while follow and folder.exists():
            for line in follower.take():
                if shown.takes(line):
                    click.echo(_json(line) if as_json else render(line))
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        return


class _Filter:
    """Which lines are asked for."""

    def __init__(self, plan: Plan | None, stage: str | None, level: str, since: str | None) -> None:
        from flowinfer.observe.logs import LEVELS

        self.stage = stage
        self.levels = {*LEVELS[LEVELS.index(level.upper()) :], "CRITICAL"}
        self.since = time.time() - _seconds(since) if since else 0.0
        self.worker = _worker_of(plan, stage) if plan and stage else ""

    def takes(self, line: Line) -> bool:
        if line.level not in self.levels or line.at < self.since:
            return False
        if not self.stage:
            return True
        return line.stage == self.stage or (not line.stage and line.worker.rpartition(".")[0] == self.worker)


def _worker_of(plan: Plan, stage: str) -> str:
    from flowinfer.spec.hints import did_you_mean

    if stage in plan.workers:
        return stage
    if stage not in plan.stages:
        raise FlowInferError(f"There is no stage {stage!r}.", help=did_you_mean(stage, [*plan.stages, *plan.workers]))
    return plan.stages[stage].worker


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--since") from error


def _json(line: Line) -> str:
    import msgspec

    return msgspec.json.encode(line).decode()


def render(line: Line) -> str:
    """A line as people read it: time, level, worker, stage, text; the trace below it."""
    clock = time.strftime("%H:%M:%S", time.localtime(line.at)) + f".{int(line.at * 1e3) % 1000:03d}"
    level = click.style(f"{line.level:<7}", fg=COLORS.get(line.level))
    where = line.worker + (f" {line.stage}" if line.stage else "")
    lost = click.style(f"({line.dropped} lines were dropped before this one) ", fg="yellow") if line.dropped else ""
    trace = "".join(f"\n    {part}" for part in line.trace.splitlines())
    return f"{clock} {level} {where}: {lost}{line.text}{trace}"
