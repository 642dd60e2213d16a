"""`flowinfer record` and `flowinfer replay`: what flowed, kept in a file, and put through a part of the graph again."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from flowinfer.errors import FlowInferError


@click.command()
@click.argument("file", type=click.Path())
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The recording to write.")
@click.option("--on", default="builtin", show_default=True, metavar="FILE", help="Requests: a file of JSON lines.")
@click.option("--overlay", "overlays", multiple=True, type=click.Path(), help="Lay this file over FILE.")
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Set one value of FILE.")
@click.option("--in-flight", type=click.IntRange(1), default=4, show_default=True, help="Requests at a time.")
@click.option("--allow-local", is_flag=True, help="Let FILE run code of local files.")
def record(
    file: str, out: Path, on: str, overlays: tuple[str, ...], sets: tuple[str, ...], in_flight: int, allow_local: bool
) -> None:
    """Answer requests with the pipeline of FILE in this process, and record every message on every edge."""
    from flowinfer.compare.arms import LocalArm
    from flowinfer.compare.asks import load_asks
    from flowinfer.flow.record import Recorder, header_of
    from flowinfer.graph import load_plan

    asks, plan = load_asks(on), load_plan(file, overlays, sets, allow_local)
    recorders: list[Recorder] = []
    header = header_of(plan, overlays, sets)
    arm = LocalArm(plan, opened=lambda service: recorders.append(Recorder(service, out, header)))
    try:
        failed = [
            answer.error
            for start in range(0, len(asks), in_flight)
            for answer in arm.answer(asks[start : start + in_flight], "")
            if answer.error
        ]
    finally:
        arm.close()
        recorders[0].close()
    click.echo(f"{out}: {len(asks)} requests, {recorders[0].num_messages} messages on {len(header.edges)} edges")
    for error in failed:
        click.echo(f"failed: {error}")


@click.command()
@click.argument("recording", type=click.Path(path_type=Path))
@click.option(
    "--from", "first", default="", metavar="STAGE", help="The first stage to run; default: all behind the api."
)
@click.option("--to", "last", default="", metavar="STAGE", help="The last stage to run.")
@click.option(
    "--speed",
    default="max",
    show_default=True,
    metavar="FACTOR|max",
    help="1: as it was recorded; 10: ten times faster.",
)
@click.option("--pipeline", type=click.Path(), help="Replay through this file instead of the recorded one.")
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Set a value for the replay.")
@click.option("--allow-local", is_flag=True, help="Let the pipeline run code of local files.")
def replay(
    recording: Path, first: str, last: str, speed: str, pipeline: str | None, sets: tuple[str, ...], allow_local: bool
) -> None:
    """Put what was recorded through a part of the graph, and hold what leaves it against the recording.

    Every replay of a recording does the same. Exit code 1 when an answer differs from the recorded one.
    """
    from flowinfer.flow.file import read, read_header
    from flowinfer.flow.replay import against, cut
    from flowinfer.flow.replay import replay as run
    from flowinfer.graph import load_plan

    pace = _speed(speed)
    header = read_header(recording)
    overlays = () if pipeline else header.overlays
    plan = load_plan(pipeline or header.file, overlays, (*(() if pipeline else header.sets), *sets), allow_local)
    part = cut(plan, first, last)
    if missing := [edge.name for edge in part.inward if edge.name not in header.edges]:
        raise FlowInferError(f"{recording} holds nothing of the edge {missing[0]}.", help="Cut at another stage.")
    found = read(recording, {edge.name for edge in (*part.inward, *part.outward)})
    if found.cut_off:
        click.echo(f"{recording} ends in the middle of a message; what stands before it is replayed.", err=True)
    click.echo(f"replaying through {', '.join(part.stages)}" + ("" if plan.digest == header.digest else " (changed)"))
    outcomes = against(found, run(found, part, pace), part)
    for outcome in outcomes:
        click.echo(f"{outcome.edge}: {outcome.num_same} requests the same, {len(outcome.differing)} differ")
        if outcome.first:
            click.echo(
                f"  request {outcome.differing[0]}\n  recorded {outcome.first[0]}\n  replayed {outcome.first[1]}"
            )
    sys.exit(1 if any(outcome.differing for outcome in outcomes) else 0)


def _speed(text: str) -> float:
    try:
        factor = float("inf") if text == "max" else float(text.removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not factor > 0:
        raise click.BadParameter(f"{text!r} is neither a factor above 0, as in 10, nor max.", param_hint="--speed")
    return factor
