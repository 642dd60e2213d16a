"""`flowinfer experiment`: how the experiment of a running service stands, its report, and its end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flowinfer.cli.compare import Span
from flowinfer.errors import FlowInferError
from flowinfer.units import format_share

if TYPE_CHECKING:
    from flowinfer.experiment.outcome import Outcome
    from flowinfer.experiment.record import Recorded

_limits = (
    click.option(
        "--ttft-limit", type=Span(), default="1s", show_default=True, help="Goodput: first token within this."
    ),
    click.option("--itl-limit", type=Span(), default="100ms", show_default=True, help="Goodput: time of a token."),
)


@click.group()
def experiment() -> None:
    """Look at experiments: traffic that a running service splits or mirrors to an arm B of its graph.

    One begins with `flowinfer apply FILE`, or `run`, where FILE has a section `experiment`.
    """


@experiment.command()
@click.option("--service", default="", metavar="NAME", help="Of several running services, this one.")
def status(service: str) -> None:
    """Show what runs, and how many requests each arm has answered."""
    from flowinfer.cli.rewire import current

    plan = current(service).plan
    if plan is None or plan.experiment is None:
        raise FlowInferError("The service runs no experiment.", help="`flowinfer experiment list` shows ended ones.")
    running = plan.experiment
    own = ", ".join(name for name, stage in plan.stages.items() if stage.arm == "b") or "edges"
    click.echo(f"{running.name}: {running.mode} {format_share(running.share)} of sessions; arm B has {own} of its own")
    recorded = _read(plan.name, running.name, None)
    for arm in "ab":
        outcomes = _outcomes(recorded, arm)
        failed = sum(o.failed for o in outcomes)
        click.echo(f"  arm {arm.upper()}  {len(outcomes)} requests, {failed} failed")


@experiment.command("list")
def list_records() -> None:
    """List the records of experiments, the newest last."""
    from flowinfer.experiment.record import read, records

    for path in records():
        found = read(path)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.run.at))
        count = len(found.outcomes) + 2 * len(found.pairs)
        end = f"ended: {found.end.reason}" if found.end else "no end"
        click.echo(f"{when}  {found.run.service}  {found.run.name}  {found.run.mode}  {count} requests  {end}")
        click.echo(f"    {path}")


@experiment.command()
@click.argument("name", required=False)
@click.option("--service", default="", metavar="NAME", help="Name of the service, running or not.")
@click.option("--record", type=click.Path(path_type=Path), metavar="FILE", help="This record, instead of the newest.")
@_limits[0]
@_limits[1]
@click.option("--require", "required", multiple=True, metavar="TEXT", help='As "ttft_p50 <= 1.05x, errors <= 1%".')
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write everything as JSON.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), metavar="FILE", help="Write a report.")
def report(
    name: str | None,
    service: str,
    record: Path | None,
    ttft_limit: float,
    itl_limit: float,
    required: tuple[str, ...],
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Report on the newest experiment, or on that of NAME, as `compare` does. It may still be running.

    Exit codes: 0 what is required is met, 1 it isn't.
    """
    from rich.console import Console

    from flowinfer.cli.compare import show, write
    from flowinfer.compare import require
    from flowinfer.compare.experiment import report_of
    from flowinfer.compare.figures import Limit

    clauses = [clause for text in required for clause in require.parse(text)]
    recorded = _read(service, name or "", record)
    comparison = report_of(recorded, Limit(ttft_limit, itl_limit))
    write(comparison, json_file, html_file)
    show(comparison, Console(highlight=False))
    problems = [problem for clause in clauses if (problem := clause.problem(comparison.figures, comparison.answers))]
    for problem in problems:
        click.echo(f"not met: {problem}", err=True)
    click.get_current_context().exit(1 if problems else 0)


@experiment.command()
@click.option("--service", default="", metavar="NAME", help="Of several running services, this one.")
@click.option("-y", "--yes", is_flag=True, help="Don't ask.")
@click.option("--drain", default="", metavar="MODES", help="How arm B ends its requests, as in finish:30s,abort.")
@click.option(
    "--probation", default="2s", metavar="TIME", help="How long a breach brings arm B back.", show_default=True
)
def stop(service: str, yes: bool, drain: str, probation: str) -> None:
    """End the experiment: all requests go to arm A, and arm B is taken down."""
    from flowinfer.cli.rewire import change, current, find_service, manner_of
    from flowinfer.graph.join import without_experiment
    from flowinfer.runtime.rewire.experiment import stopped

    running = current(service)
    if running.plan is None or running.source is None or running.plan.experiment is None:
        raise FlowInferError("The service runs no experiment.")
    name = running.plan.experiment.name
    plan, source = without_experiment(running.plan), stopped(running.source)
    manner = manner_of(drain, probation)
    change(find_service(service), plan, source, f"experiment stop {name}", yes=yes, manner=manner)


def _read(service: str, name: str, record: Path | None) -> Recorded:
    from flowinfer.experiment.record import read, records

    if record is not None:
        return read(record)
    found = records(service, name)
    if not found:
        what = f"experiment {name!r}" if name else "any experiment"
        raise FlowInferError(f"There is no record of {what}.", help="A record begins when an experiment does.")
    return read(found[-1])


def _outcomes(recorded: Recorded, arm: str) -> list[Outcome]:
    pairs = [pair.a if arm == "a" else pair.b for pair in recorded.pairs]
    return [*(outcome for outcome in recorded.outcomes if outcome.arm == arm), *pairs]
