"""`flowinfer sweep FILE -x PATH=V1,V2`: one graph at many settings, and what each costs and gains."""

from __future__ import annotations

import contextlib
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flowinfer.cli.compare import Span, Variant
from flowinfer.cli.requests import Requests, request_options
from flowinfer.cli.spec import file_options

if TYPE_CHECKING:
    from rich.table import Table

    from flowinfer.compare.arms import LocalArm, ServiceArm
    from flowinfer.compare.sweep import Cell
    from flowinfer.graph.plan import Plan

SHOWN = {  # figures and what heads them; times are medians
    "ttft_p50": "first token",
    "itl_p50": "each token",
    "latency_p50": "answer",
    "tokens_per_s": "tokens",
    "goodput": "goodput",
    "hit_rate": "reused",
    "accepted": "drafts",
    "memory": "memory",
}


@click.command()
@file_options
@click.option("-x", "axes", multiple=True, required=True, metavar="PATH=V1,V2", help="Values to try; may be repeated.")
@click.option(
    "--paired", is_flag=True, help="Try first values together, then second ones, instead of all combinations."
)
@request_options
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="How often each request is sent.")
@click.option("--in-flight", type=click.IntRange(1), default=4, show_default=True, help="Requests at a time.")
@click.option("--ttft-limit", type=Span(), default="1s", show_default=True, help="Goodput: first token within this.")
@click.option("--itl-limit", type=Span(), default="100ms", show_default=True, help="Goodput: time of a token.")
@click.option(
    "--out", type=click.Path(path_type=Path), default="sweep.jsonl", show_default=True, help="Finished cells."
)
@click.option("--real", is_flag=True, help="Run it as a service, in processes of its own, over HTTP.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), metavar="FILE", help="Write table and plot.")
def sweep(
    file: str,
    overlays: tuple[str, ...],
    sets: tuple[str, ...],
    allow_local: bool,
    axes: tuple[str, ...],
    paired: bool,
    requests: Requests,
    rounds: int,
    in_flight: int,
    ttft_limit: float,
    itl_limit: float,
    out: Path,
    real: bool,
    html_file: Path | None,
) -> None:
    """Run FILE at each of many settings over the same requests. Started again, it skips what it has finished.

    Settings that a running graph takes (see `flowinfer plan`) are changed in place; for others it is started anew.
    """
    from rich.console import Console

    from flowinfer.compare.figures import Limit
    from flowinfer.compare.sweep import append_cell, cells, finished, key_of, order, parse_axis, read_cells, run_cell
    from flowinfer.runtime.loading import LoadStage

    asks, limit, console = requests.load(), Limit(ttft_limit, itl_limit), Console(stderr=True, highlight=False)
    wanted = cells([parse_axis(axis) for axis in axes], paired=paired)
    fixed = (*sets, "serve.port=0") if real else sets
    variants = [Variant(file, overlays, (*fixed, *map("=".join, cell.items())), allow_local) for cell in wanted]
    plans = [variant.plan() for variant in variants]  # a mistake in the last one is told before the first runs
    keys = [
        key_of(plan.digest, choice, asks, rounds, in_flight, limit, real)
        for choice, plan in zip(wanted, plans, strict=True)
    ]
    done = read_cells(out)
    left = [number for number, key in enumerate(keys) if key not in done]
    load = LoadStage(Path(file).resolve().parent, allow_local)
    with contextlib.closing(_Bench(real)) as bench:
        for count, place in enumerate(order([plans[number] for number in left], load), start=1):
            number = left[place]
            name = ", ".join(map("=".join, wanted[number].items()))
            with console.status(f"{count} of {len(left)}: {name}"):
                how = bench.prepare(variants[number], plans[number])
                groups = run_cell(bench.arm, asks, rounds, in_flight, salt=keys[number])
            done[keys[number]] = finished(keys[number], wanted[number], groups, limit, how)
            append_cell(out, done[keys[number]])
    found = [done[key] for key in keys]
    Console(highlight=False).print(_table(found))
    if html_file:
        html_file.write_text(_html(file, found), "utf-8")


class _Bench:
    """The graph that runs: changed in place for the next cell where that can be done, else started anew."""

    def __init__(self, real: bool) -> None:
        self._real = real
        self._arm: LocalArm | ServiceArm | None = None

    @property
    def arm(self) -> LocalArm | ServiceArm:
        """What runs."""
        assert self._arm is not None, "prepared"
        return self._arm

    def prepare(self, variant: Variant, plan: Plan) -> str:
        """Makes a cell run; says whether by a "live" or "warm" change, or by a "start"."""
        from flowinfer.compare.arms import LocalArm, ServiceArm

        if self._arm is not None and (how := self._arm.take(plan)):
            return how
        self.close()
        self._arm = ServiceArm(variant.arguments()) if self._real else LocalArm(plan, alone=True)
        return "start"

    def close(self) -> None:
        if self._arm is not None:
            self._arm.close()
        self._arm = None


def _rows(found: list[Cell]) -> list[list[str]]:
    """Values of the axes, figures, how many answers differ from the first cell's, and whether the cell makes sense."""
    from flowinfer.compare.sweep import front
    from flowinfer.compare.verdict import in_words

    rows, best = [], front(found)
    for cell in found:
        figures = [in_words(name, cell.figures.get(name)) for name in SHOWN]
        counts = [str(cell.num_differing(found[0])), str(len(cell.failed))]
        rows.append([*cell.sets.values(), *figures, *counts, cell.how, "yes" if cell in best else ""])
    return rows


def _heads(found: list[Cell]) -> list[str]:
    names = [path.removeprefix("stages.").replace(".with.", " ") for path in found[0].sets]
    return [*names, *SHOWN.values(), "unlike first", "failed", "by", "front"]


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
    from flowinfer.compare.sweep import front

    head = "".join(f"<th class=n>{escape(name)}" for name in _heads(found))
    rows = "".join("<tr>" + "".join(f"<td class=n>{escape(value)}" for value in row) for row in _rows(found))
    measured = [cell for cell in found if cell.figures["latency_p50"] and cell.figures["tokens_per_s"]]
    points = [((cell.figures["latency_p50"] or 0) * 1e3, cell.figures["tokens_per_s"] or 0) for cell in measured]
    names = ", ".join(found[0].sets)
    title = f"Tokens a second against a whole answer's p50 in ms; labels: {names}; the line: none beats these in both"
    line = [points[measured.index(cell)] for cell in front(measured)]
    plot = scatter(title, "ms", points, [cell.name for cell in measured], line) if points else ""
    body = f"<h1>{escape(file)} at {len(found)} settings</h1>{plot}<table><tr>{head}{rows}</table>"
    return page(f"Sweep of {file}", body)
