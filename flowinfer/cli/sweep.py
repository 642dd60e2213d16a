"""`flowinfer sweep FILE -x PATH=V1,V2`: one graph at many settings, and what each costs and gains."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flowinfer.cli.compare import Span
from flowinfer.cli.spec import file_options

if TYPE_CHECKING:
    from rich.table import Table

    from flowinfer.compare.sweep import Cell

SHOWN = ("ttft_p50", "itl_p50", "latency_p50", "tokens_per_s", "goodput", "hit_rate", "accepted")


@click.command()
@file_options
@click.option("-x", "axes", multiple=True, required=True, metavar="PATH=V1,V2", help="Values to try; may be repeated.")
@click.option(
    "--paired", is_flag=True, help="Try first values together, then second ones, instead of all combinations."
)
@click.option("--on", default="builtin", show_default=True, metavar="FILE", help="Requests: a file of JSON lines.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="How often each request is sent.")
@click.option("--in-flight", type=click.IntRange(1), default=4, show_default=True, help="Requests at a time.")
@click.option("--ttft-limit", type=Span(), default="1s", show_default=True, help="Goodput: first token within this.")
@click.option("--itl-limit", type=Span(), default="100ms", show_default=True, help="Goodput: time of a token.")
@click.option(
    "--out", type=click.Path(path_type=Path), default="sweep.jsonl", show_default=True, help="Finished cells."
)
@click.option("--html", "html_file", type=click.Path(path_type=Path), metavar="FILE", help="Write table and plot.")
def sweep(
    file: str,
    overlays: tuple[str, ...],
    sets: tuple[str, ...],
    allow_local: bool,
    axes: tuple[str, ...],
    paired: bool,
    on: str,
    rounds: int,
    in_flight: int,
    ttft_limit: float,
    itl_limit: float,
    out: Path,
    html_file: Path | None,
) -> None:
    """Run FILE at each of many settings over the same requests. Started again, it skips what it has finished."""
    from rich.console import Console

    from flowinfer.compare.arms import LocalArm
    from flowinfer.compare.asks import load_asks
    from flowinfer.compare.figures import Limit
    from flowinfer.compare.sweep import append_cell, cells, finished, key_of, parse_axis, read_cells, run_cell
    from flowinfer.graph import load_plan

    asks, limit, console = load_asks(on), Limit(ttft_limit, itl_limit), Console(stderr=True, highlight=False)
    wanted = cells([parse_axis(axis) for axis in axes], paired=paired)
    plans = [load_plan(file, overlays, [*sets, *map("=".join, cell.items())], allow_local) for cell in wanted]
    done = read_cells(out)
    found: list[Cell] = []
    for number, (choice, plan) in enumerate(zip(wanted, plans, strict=True), start=1):
        key = key_of(plan.digest, choice, asks, rounds, in_flight, limit)
        if key not in done:
            with console.status(f"{number} of {len(wanted)}: {', '.join(map('='.join, choice.items()))}"):
                arm = LocalArm(plan)
                try:
                    groups = run_cell(arm, asks, rounds, in_flight)
                finally:
                    arm.close()
            done[key] = finished(key, choice, groups, limit)
            append_cell(out, done[key])
        found.append(done[key])
    Console(highlight=False).print(_table(found))
    if html_file:
        html_file.write_text(_html(file, found), "utf-8")


def _titles() -> dict[str, str]:
    from flowinfer.compare.figures import figures_titles

    return figures_titles()


def _rows(found: list[Cell]) -> list[list[str]]:
    """Values of the axes, figures, and how many answers differ from the first cell's."""
    from flowinfer.compare.verdict import in_words

    rows = []
    for cell in found:
        figures = [in_words(name, cell.figures[name]) for name in SHOWN]
        rows.append([*cell.sets.values(), *figures, str(cell.num_differing(found[0])), str(len(cell.failed))])
    return rows


def _heads(found: list[Cell]) -> list[str]:
    titles = _titles()
    names = [path.removeprefix("stages.").replace(".with.", " ") for path in found[0].sets]
    return [*names, *(titles[name] for name in SHOWN), "answers unlike the first", "failed"]


def _table(found: list[Cell]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in _heads(found):
        table.add_column(head, justify="right")
    for row in _rows(found):
        table.add_row(*row)
    return table


def _html(file: str, found: list[Cell]) -> str:
    from flowinfer.compare.plots import scatter
    from flowinfer.compare.report import page

    head = "".join(f"<th class=n>{escape(name)}" for name in _heads(found))
    rows = "".join("<tr>" + "".join(f"<td class=n>{escape(value)}" for value in row) for row in _rows(found))
    measured = [cell for cell in found if cell.figures["latency_p50"] and cell.figures["tokens_per_s"]]
    points = [((cell.figures["latency_p50"] or 0) * 1e3, cell.figures["tokens_per_s"] or 0) for cell in measured]
    names = ", ".join(found[0].sets)
    title = f"Tokens a second against a whole answer's p50 in ms; labels: {names}"
    plot = scatter(title, "ms", points, [cell.name for cell in measured]) if points else ""
    body = f"<h1>{escape(file)} at {len(found)} settings</h1>{plot}<table><tr>{head}{rows}</table>"
    return page(f"Sweep of {file}", body)
