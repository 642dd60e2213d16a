"""Commands that change a running service: apply, rollback, set, swap, scale, drain."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flowinfer.cli.plan import render
from flowinfer.errors import FlowInferError

if TYPE_CHECKING:
    from flowinfer.graph.plan import Plan
    from flowinfer.runtime.rewire.protocol import Manner, Reply, Request, Source

Decorated = Callable[..., Any]


def _options(*decorators: Decorated) -> Callable[[Decorated], Decorated]:
    def decorate(command: Decorated) -> Decorated:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


_overlays = click.option("-o", "--overlay", "overlays", multiple=True, metavar="FILE", help="Lay this file over FILE.")
_sets = click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Set one value of FILE.")
_allow_local = click.option("--allow-local", is_flag=True, help="Let `use: ./file.py:Class` run code of local files.")
_service = click.option("--service", default="", metavar="NAME", help="Of several running services, this one.")
_yes = click.option("-y", "--yes", is_flag=True, help="Don't ask.")
_drain = click.option(
    "--drain",
    default="",
    metavar="MODES",
    help="How what is replaced ends, as in finish:30s,handoff:10s,replay:10s,abort; default: serve.drain of the file.",
)
_probation = click.option(
    "--probation", default="2s", metavar="TIME", help="How long a breach takes the change back.", show_default=True
)
_max_errors = click.option(
    "--max-errors", default="5%", metavar="SHARE", help="By how much the share of failed requests may rise meanwhile."
)
_max_latency = click.option(
    "--max-latency", default="3x", metavar="FACTOR", help="By which factor median latencies may rise meanwhile."
)


def _with_manner(command: Decorated) -> Decorated:
    """Gives the command one `manner` for the options that say how a change is made."""

    @functools.wraps(command)
    def wrapped(*args: Any, drain: str, probation: str, max_errors: str, max_latency: str, **rest: Any) -> Any:
        return command(*args, manner=manner_of(drain, probation, max_errors, max_latency), **rest)

    return _options(_drain, _probation, _max_errors, _max_latency)(wrapped)


def manner_of(drain: str, probation: str = "2s", max_errors: str = "5%", max_latency: str = "3x") -> Manner:
    """Reads the options of a change. Raises FlowInferError naming the one that can't be read."""
    from flowinfer.runtime.rewire.protocol import Manner
    from flowinfer.spec.drain import parse_drain
    from flowinfer.units import parse_duration, parse_share

    parse_drain(drain)
    try:
        return Manner(
            drain=drain,
            probation_s=parse_duration(probation),
            max_errors=parse_share(max_errors),
            max_latency=float(max_latency.removesuffix("x")),
        )
    except ValueError as error:
        raise FlowInferError(f"An option of the change can't be read: {error}.") from error


_asked = _options(_service, _yes, _with_manner)


@click.command()
@click.argument("file", type=click.Path())
@_options(_overlays, _sets, _allow_local, _asked)
def apply(file: str, overlays: Any, sets: Any, allow_local: bool, service: str, yes: bool, manner: Manner) -> None:
    """Make the running service run FILE."""
    source = source_of(file, overlays, sets, allow_local)
    change(find_service(service, file), load_source(source), source, f"apply {file}", yes=yes, manner=manner)


@click.command("set")
@click.argument("values", nargs=-1, required=True, metavar="PATH=VALUE...")
@_asked
def set_values(values: tuple[str, ...], service: str, yes: bool, manner: Manner) -> None:
    """Set values of the running service, as in `flowinfer set stages.prefill.with.step_budget=30ms`."""
    _set(values, f"set {' '.join(values)}", service, yes, manner)


@click.command()
@click.argument("stage")
@click.argument("kind", required=False)
@click.option("--with", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of the new stage.")
@_asked
def swap(stage: str, kind: str | None, settings: tuple[str, ...], service: str, yes: bool, manner: Manner) -> None:
    """Replace STAGE by one of KIND; without KIND, by a fresh one of its own kind, with its code as it is now."""
    if kind is None:
        _renew(stage, f"swap {stage}", service, manner)
    else:
        values = (f"stages.{stage}.use={kind}", *(f"stages.{stage}.with.{setting}" for setting in settings))
        _set(values, f"swap {stage} {kind}", service, yes, manner)


@click.command()
@click.argument("stage")
@click.argument("replicas", type=click.IntRange(1))
@_asked
def scale(stage: str, replicas: int, service: str, yes: bool, manner: Manner) -> None:
    """Run as many replicas of STAGE's worker."""
    running = current(service)
    workers = {name: found.worker for name, found in _plan_of(running).stages.items()}
    worker = workers.get(stage, stage if stage in _plan_of(running).workers else "")
    if not worker:
        raise FlowInferError(f"There is no stage {stage!r}.", help=f"Stages: {', '.join(workers)}.")
    _set((f"workers.{worker}.replicas={replicas}",), f"scale {stage} {replicas}", service, yes, manner)


@click.command()
@click.argument("stage")
@_asked
def drain(stage: str, service: str, yes: bool, manner: Manner) -> None:
    """Let STAGE end what it has and go, with a fresh one in its place from now on."""
    _renew(stage, f"drain {stage}", service, manner)


@click.command()
@_asked
def rollback(service: str, yes: bool, manner: Manner) -> None:
    """Go back to what ran before the last change."""
    from flowinfer.runtime.rewire.protocol import Request

    ask_service(find_service(service), Request(do="rollback", manner=manner))
    click.echo("Done.")


# ------------------------------------------------------------------------------------------------------------ the parts


def change(
    folder: Path, plan: Plan, source: Source, note: str, *, yes: bool = False, manner: Manner | None = None
) -> None:
    """Shows what a plan changes in a service and, once that is wanted, changes it. Raises FlowInferError if refused."""
    from flowinfer.runtime.rewire.protocol import Manner, Request

    reply = ask_service(folder, Request(do="plan", plan=plan))
    click.echo(render(reply))
    if not reply.changes or any(found.kind == "refused" for found in reply.changes):
        click.get_current_context().exit(1 if reply.changes else 0)
    if all(found.kind == "live" for found in reply.changes) or yes or _wants():
        request = Request(do="apply", plan=plan, source=source, note=note, manner=manner or Manner())
        done = ask_service(folder, request)
        click.echo(f"Done: epoch {done.plan.epoch}." if done.plan else "Done.")


def _wants() -> bool:
    import sys

    if sys.stdin.isatty():
        return click.confirm("Change the service?", default=True)
    raise FlowInferError("This isn't only live, and there is nobody to ask.", help="Add --yes.")


def _set(values: Iterable[str], note: str, service: str, yes: bool, manner: Manner) -> None:
    """Adds values to what the service was started from."""
    from msgspec.structs import replace

    running = current(service)
    source = _source_of(running)
    if load_source(source).digest != _plan_of(running).digest:
        help = f"See `flowinfer plan {source.file}`, and apply that first."
        raise FlowInferError(f"{source.file} was edited since the service took it.", help=help)
    source = replace(source, sets=(*source.sets, *values))
    change(find_service(service), load_source(source), source, note, yes=yes, manner=manner)


def _renew(stage: str, note: str, service: str, manner: Manner) -> None:
    from flowinfer.runtime.rewire.protocol import Request

    running, folder = current(service), find_service(service)
    request = Request(
        do="apply", plan=_plan_of(running), source=_source_of(running), renew=(stage,), note=note, manner=manner
    )
    ask_service(folder, request)
    click.echo("Done.")


def source_of(file: str, overlays: Iterable[str], sets: Iterable[str], allow_local: bool) -> Source:
    from flowinfer.runtime.rewire.protocol import Source

    paths = tuple(str(Path(overlay).resolve()) for overlay in overlays)
    return Source(file=str(Path(file).resolve()), overlays=paths, sets=tuple(sets), allow_local=allow_local)


def load_source(source: Source) -> Plan:
    from flowinfer.graph import load_plan

    return load_plan(source.file, source.overlays, source.sets, source.allow_local)


def find_service(service: str, file: str = "") -> Path:
    """The folder of the running service that is meant. Raises FlowInferError that lists those that run."""
    from flowinfer.runtime.rewire.control import find

    return find(file=str(Path(file).resolve()) if file else "", service=service)[1]


def current(service: str) -> Reply:
    """What the service runs."""
    from flowinfer.runtime.rewire.protocol import Request

    return ask_service(find_service(service), Request(do="status"))


def _plan_of(reply: Reply) -> Plan:
    assert reply.plan is not None, "a service tells its plan"
    return reply.plan


def _source_of(reply: Reply) -> Source:
    assert reply.source is not None, "a service tells its source"
    return reply.source


def ask_service(folder: Path, request: Request) -> Reply:
    """The last reply; the lines before it are printed as they come. Raises FlowInferError when it says no."""
    from flowinfer.runtime.rewire.control import ask

    for reply in ask(folder, request):
        if reply.last:
            if not reply.ok:
                raise FlowInferError(reply.text, help=reply.help)
            return reply
        click.echo(reply.text)
    raise FlowInferError("The service gave no answer.")
