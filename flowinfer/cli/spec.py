"""Commands about a pipeline file that start nothing: check, show, graph, stages, schema, explain."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flowinfer.errors import Mark, SpecError

if TYPE_CHECKING:
    from flowinfer.graph.model import Graph

Decorated = Callable[..., Any]


def file_options(command: Decorated) -> Decorated:
    """FILE, -o, --set and --allow-local, as every command takes them that reads a pipeline file."""
    command = click.option("--allow-local", is_flag=True, help="Let `use: ./file.py:Class` run code of local files.")(
        command
    )
    command = click.option(
        "--set", "sets", multiple=True, metavar="PATH=VALUE", help="Set one value: stages.verify.with.tokens=3."
    )(command)
    command = click.option(
        "-o", "--overlay", "overlays", multiple=True, type=click.Path(), metavar="FILE", help="Lay this file over it."
    )(command)
    return click.argument("file", type=click.Path())(command)


@click.command()
@file_options
@click.option("--json", "as_json", is_flag=True, help="Print the problems, or the plan, as JSON.")
def check(file: str, overlays: tuple[str, ...], sets: tuple[str, ...], allow_local: bool, as_json: bool) -> None:
    """Find every mistake in a pipeline file at once. Loads no model and starts nothing.

    Exit codes: 0 the file is right, 1 it has mistakes, 2 the command line has one.
    """
    from flowinfer.cli.report import wants_color
    from flowinfer.cli.summary import summary
    from flowinfer.graph.checker import check as check_graph
    from flowinfer.spec import load

    try:
        document = load(file, overlays, sets, allow_local)
    except SpecError as error:
        return _fail(error, {}, as_json)
    graph = check_graph(document)
    if graph.problems:
        return _fail(SpecError(graph.problems), document.sources, as_json)
    click.echo(_plan_json(graph) if as_json else summary(graph, color=wants_color(sys.stdout)))
    if not as_json:
        _note_devices(graph)
        _note_gpus(graph)
    return None


def _note_devices(graph: Graph) -> None:
    """The file may be meant for another machine, so that what this one lacks is no mistake in it."""
    from flowinfer.graph.devices import missing_devices
    from flowinfer.graph.planner import plan_of

    for problem in missing_devices(plan_of(graph)):
        note = f"note {problem.code}: {problem.message} `flowinfer run` refuses it here."
        click.echo(click.style(note, fg="yellow") if sys.stderr.isatty() else note, err=True)


def _note_gpus(graph: Graph) -> None:
    """What settings cost on a GPU, and what becomes of weights that it can't multiply as they are."""
    from flowinfer.graph.planner import plan_of
    from flowinfer.graph.weights import notes

    for text in notes(graph):
        click.echo(click.style(f"note: {text}", fg="yellow") if sys.stderr.isatty() else f"note: {text}", err=True)
    workers = plan_of(graph).workers
    for stage in graph.stages.values():
        worker = workers.get(stage.worker or "")
        if stage.contract and stage.contract.on_gpu and worker and worker.device.startswith("cuda"):
            note = f"note: `{stage.name}` on {worker.device}: {stage.contract.on_gpu}"
            click.echo(click.style(note, fg="yellow") if sys.stderr.isatty() else note, err=True)


def _fail(error: SpecError, sources: Any, as_json: bool) -> None:
    from flowinfer.cli.report import render, wants_color

    if as_json:
        click.echo(json.dumps({"problems": [_problem_json(problem) for problem in error.problems]}, indent=2))
    else:
        click.echo(render(error.problems, sources, color=wants_color(sys.stderr)), err=True)
    click.get_current_context().exit(1)


def _problem_json(problem: Any) -> dict[str, Any]:
    notes = [{**_mark_json(mark), "message": text} for mark, text in problem.notes]
    return {
        "code": problem.code,
        "message": problem.message,
        **_mark_json(problem.mark),
        "help": problem.help,
        "notes": notes,
    }


def _mark_json(mark: Mark | None) -> dict[str, Any]:
    return mark._asdict() if mark else {}


def _plan_json(graph: Any) -> str:
    import msgspec

    from flowinfer.graph.planner import plan_of

    return msgspec.json.format(msgspec.json.encode({"problems": [], "plan": plan_of(graph)}), indent=2).decode()


@click.command()
@file_options
@click.option("--origin", is_flag=True, help="Print beside each value the file and line that it came from.")
def show(file: str, overlays: tuple[str, ...], sets: tuple[str, ...], allow_local: bool, origin: bool) -> None:
    """Print the resolved file: overlays merged, variables and inherited models filled in."""
    from flowinfer.graph.build import build_graph
    from flowinfer.graph.inherit import filled_root
    from flowinfer.spec import load
    from flowinfer.spec.show import to_yaml

    document = load(file, overlays, sets, allow_local)
    click.echo(to_yaml(filled_root(build_graph(document)), origin=origin), nl=False)
    if document.problems:
        raise SpecError(document.problems)


@click.command()
@file_options
@click.option(
    "-f", "--format", "form", type=click.Choice(["svg", "mermaid", "dot"]), default="mermaid", show_default=True
)
@click.option("--out", type=click.Path(dir_okay=False), help="Write it here instead of to the terminal.")
def graph(
    file: str, overlays: tuple[str, ...], sets: tuple[str, ...], allow_local: bool, form: str, out: str | None
) -> None:
    """Draw the graph: workers as boxes, edges with their message types, loops dashed."""
    from flowinfer.graph.checker import check as check_graph
    from flowinfer.graph.drawing import draw
    from flowinfer.spec import load

    checked = check_graph(load(file, overlays, sets, allow_local))
    if checked.problems:
        raise SpecError(checked.problems)
    text = draw(checked, form)
    if out:
        Path(out).write_text(text, encoding="utf-8")
    else:
        click.echo(text, nl=False)


@click.command()
@click.argument("name", required=False)
@click.option("--allow-local", is_flag=True, help="Let NAME be ./file.py:Class.")
def stages(name: str | None, allow_local: bool) -> None:
    """List the stages, or show one with its ports, facets and settings."""
    from flowinfer.cli.stages import list_stages, show_stage

    if name:
        show_stage(name, allow_local)
    else:
        list_stages()


@click.command()
@click.option("--tests", is_flag=True, help="Of the tests beside them (*_test.yaml).")
def schema(tests: bool) -> None:
    """Print the JSON Schema of pipeline files.

    In VS Code, for one: flowinfer schema > flowinfer.schema.json, then in a pipeline file
    `# yaml-language-server: $schema=flowinfer.schema.json`.
    """
    if tests:
        from flowinfer.testing.schema import json_schema
    else:
        from flowinfer.spec.schema import json_schema
    click.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


@click.command()
@click.argument("code", required=False)
def explain(code: str | None) -> None:
    """Explain an error code, or list all."""
    from flowinfer.cli.explain import explain_code, list_codes

    click.echo(explain_code(code) if code else list_codes(), nl=False)
