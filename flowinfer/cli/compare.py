"""`flowinfer compare A B`: both graphs over the same requests, and what a person should conclude."""

from __future__ import annotations

import contextlib
import difflib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flowinfer.cli.requests import Requests, request_options
from flowinfer.errors import FlowInferError
from flowinfer.units import parse_duration

if TYPE_CHECKING:
    from rich.console import Console

    from flowinfer.compare.arms import Arm
    from flowinfer.compare.comparison import Comparison
    from flowinfer.graph.plan import Plan

PRINTED_PAIRS = 3


@dataclass(frozen=True)
class Variant:
    """A file with what is laid over it, as the commands take it."""

    file: str
    overlays: tuple[str, ...]
    sets: tuple[str, ...]
    allow_local: bool

    @property
    def name(self) -> str:
        return " ".join(
            [self.file, *(f"-o {name}" for name in self.overlays), *(f"--set {text}" for text in self.sets)]
        )

    def plan(self) -> Plan:
        from flowinfer.graph import load_plan

        return load_plan(self.file, self.overlays, self.sets, self.allow_local)

    def yaml(self) -> str:
        """The resolved file."""
        from flowinfer.graph.build import build_graph
        from flowinfer.graph.inherit import filled_root
        from flowinfer.spec import load
        from flowinfer.spec.show import to_yaml

        return to_yaml(filled_root(build_graph(load(self.file, self.overlays, self.sets, self.allow_local))))

    def arguments(self) -> list[str]:
        """Of `flowinfer run`."""
        pairs = [("-o", name) for name in self.overlays] + [("--set", text) for text in self.sets]
        return [self.file, *(part for pair in pairs for part in pair), *["--allow-local"] * self.allow_local]


class Span(click.ParamType[float]):
    """A duration such as 500ms, in seconds."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return value if isinstance(value, float) else parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path(), required=False)
@click.option(
    "-o", "--overlay", "overlays", multiple=True, type=click.Path(), help="B is A with this file laid over it."
)
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Set a value of B.")
@click.option("--both", multiple=True, metavar="PATH=VALUE", help="Set a value of A and of B.")
@request_options
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="How often each request is sent.")
@click.option("--in-flight", type=click.IntRange(1), default=4, show_default=True, help="Requests at a time.")
@click.option("--ttft-limit", type=Span(), default="1s", show_default=True, help="Goodput: first token within this.")
@click.option("--itl-limit", type=Span(), default="100ms", show_default=True, help="Goodput: time of a token.")
@click.option("--real", is_flag=True, help="Run both as services, in processes of their own, over HTTP.")
@click.option("--require", "required", multiple=True, metavar="TEXT", help='As "ttft_p50 <= 1.05x, answers == same".')
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write everything as JSON.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), metavar="FILE", help="Write a report.")
@click.option("--allow-local", is_flag=True, help="Let the files run code of local files.")
def compare(
    a: str,
    b: str | None,
    overlays: tuple[str, ...],
    sets: tuple[str, ...],
    both: tuple[str, ...],
    requests: Requests,
    rounds: int,
    in_flight: int,
    ttft_limit: float,
    itl_limit: float,
    real: bool,
    required: tuple[str, ...],
    json_file: Path | None,
    html_file: Path | None,
    allow_local: bool,
) -> None:
    """Run A and B over the same requests and tell which is better, by how much, and whether their answers differ.

    B is a file of its own, or A with overlays (-o) and values (--set). Exit code 1 when --require isn't met.
    """
    from rich.console import Console

    from flowinfer.compare import require
    from flowinfer.compare.comparison import Setup, compared, machine
    from flowinfer.compare.figures import Limit
    from flowinfer.compare.rounds import run_rounds

    clauses = [clause for text in required for clause in require.parse(text)]
    left, right = Variant(a, (), both, allow_local), Variant(b or a, overlays, both + sets, allow_local)
    if left == right:
        raise FlowInferError("A and B are the same.", help="Name a second file, or change B by -o or --set.")
    asks, console = requests.load(), Console(stderr=True, highlight=False)
    setup = Setup(
        a=left.name,
        b=right.name,
        changes=_changes(left, right),
        requests=requests.on,
        num_requests=len(asks),
        rounds=rounds,
        in_flight=in_flight,
        limit=Limit(ttft_limit, itl_limit),
        real=real,
        machine=machine(),
        when=time.strftime("%Y-%m-%d %H:%M"),
    )
    with arms(left, right, real, console) as sides, _progress(console, len(asks) * rounds) as progress:
        groups = run_rounds(*sides, asks, rounds=rounds, in_flight=in_flight, progress=progress)
        comparison = compared(groups, setup)
    write(comparison, json_file, html_file)
    show(comparison, Console(highlight=False))
    problems = [problem for clause in clauses if (problem := clause.problem(comparison.figures, comparison.answers))]
    for problem in problems:
        console.print(f"not met: {problem}", style="red", markup=False)
    sys.exit(1 if problems else 0)


@contextlib.contextmanager
def arms(first: Variant, second: Variant, real: bool, console: Console) -> Iterator[tuple[Arm, Arm]]:
    """Both sides, loaded and running."""
    from flowinfer.compare.arms import LocalArm, ServiceArm

    plans = [first.plan(), second.plan()]  # mistakes in either are told before anything loads
    with contextlib.ExitStack() as stack:
        sides: list[Arm] = []
        for variant, plan in zip((first, second), plans, strict=True):
            with console.status(f"Loading {variant.name}"):
                side: Arm = ServiceArm(variant.arguments()) if real else LocalArm(plan)
            stack.callback(side.close)
            sides.append(side)
        yield sides[0], sides[1]


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("Asking both"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)


def _changes(first: Variant, second: Variant) -> str:
    lines = difflib.unified_diff(first.yaml().splitlines(), second.yaml().splitlines(), "A", "B", n=1, lineterm="")
    return "\n".join(lines)


def write(comparison: Comparison, json_file: Path | None, html_file: Path | None) -> None:
    """The files that were asked for."""
    import msgspec

    from flowinfer.compare.report import html

    if json_file:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(comparison), indent=2))
    if html_file:
        html_file.write_text(html(comparison), "utf-8")


def show(comparison: Comparison, console: Console) -> None:
    """The headline, the table, and the first pairs of answers that differ."""
    from rich import box
    from rich.table import Table

    from flowinfer.compare.verdict import change, sentence, value

    table = Table("figure", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("A", "B", "change \\[95 %]"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    colours = {"A": "yellow", "B": "green", "": "dim"}
    for f in comparison.figures:
        verdict = f"[{colours[f.better]}]{sentence(f)}[/]"
        table.add_row(f.title, value(f, f.a), value(f, f.b), change(f).replace("[", "\\["), verdict)
    setup = comparison.setup
    console.print(f"A  {setup.a}\nB  {setup.b}\n" + (f"{setup.note}\n" if setup.note else ""), markup=False)
    console.print(comparison.headline, style="bold", markup=False)
    console.print(table)
    readable = [pair for pair in comparison.answers.differences if pair.a or pair.b]
    for pair in readable[:PRINTED_PAIRS]:
        console.print(f"request {pair.request}, first at {pair.unit} {pair.at}", style="dim", markup=False)
        console.print(f"  A  {pair.a!r}\n  B  {pair.b!r}", markup=False)
