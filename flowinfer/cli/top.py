"""`flowinfer top`: what flows in a running service, from its /metrics alone, so that looking costs next to nothing."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import click

from flowinfer.cli.service_url import url_option
from flowinfer.errors import FlowInferError
from flowinfer.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from flowinfer.observe.reading import Reading, Snapshot

TIMEOUT_S = 10.0


@click.command()
@url_option("The service")
@click.option(
    "--interval", type=click.FloatRange(0.2), default=2.0, show_default=True, help="Seconds between readings."
)
@click.option("--once", is_flag=True, help="Print one table and end, for scripts.")
@click.option("--json", "as_json", is_flag=True, help="With --once: as JSON.")
def top(url: str, interval: float, once: bool, as_json: bool) -> None:
    """Show a live table of a running service: edges, stages, workers. Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    from flowinfer.observe.reading import between

    if as_json and not once:
        raise click.UsageError("--json needs --once.")
    before = read(url)
    time.sleep(interval)
    after = read(url)
    console = Console(highlight=False)
    if once:
        _print_once(between(before, after), as_json, console)
        return
    try:
        with Live(
            view(between(before, after)), console=console, screen=console.is_terminal, auto_refresh=False
        ) as live:
            while True:
                time.sleep(interval)
                before, after = after, read(url)
                live.update(view(between(before, after)), refresh=True)
    except KeyboardInterrupt:
        return


def read(url: str) -> Reading:
    """The metrics of the service now. Raises FlowInferError when it can't be reached."""
    from flowinfer.observe.reading import parse

    where = url if "://" in url else f"http://{url}"
    try:
        with urllib.request.urlopen(f"{where.rstrip('/')}/metrics", timeout=TIMEOUT_S) as response:
            page = response.read().decode()
    except (OSError, ValueError, urllib.error.URLError) as error:
        help = "Start one with `flowinfer run FILE`, or name it: --url http://127.0.0.1:8000."
        raise FlowInferError(f"No service answers at {where}: {error}.", help=help) from error
    return parse(page, time.monotonic())


def _print_once(snapshot: Snapshot, as_json: bool, console: object) -> None:
    import msgspec
    from rich.console import Console

    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(snapshot), indent=2).decode())
    else:
        assert isinstance(console, Console)
        console.print(view(snapshot))


def view(snapshot: Snapshot) -> Group:
    """The whole picture."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(head(snapshot)), _edges(snapshot), _stages(snapshot), _workers(snapshot))


def head(snapshot: Snapshot) -> str:
    """The service in a line."""
    from flowinfer.observe.reading import busiest

    parts = [
        f"{snapshot.running:.0f} running, {snapshot.waiting:.0f} waiting",
        f"{snapshot.requests:.1f} requests/s",
        f"{snapshot.tokens:.1f} tokens/s",
        f"first token {_ms(snapshot.ttft_s)}",
        f"each token {_ms(snapshot.itl_s)}",
        f"cached {_percent(snapshot.cached)}",
        f"drafts accepted {_percent(snapshot.accepted)}",
    ]
    parts += [f"busiest expert {snapshot.experts:.1f}× the mean"] if snapshot.experts else []
    parts += [f"{snapshot.failed:.1f} failed/s"] if snapshot.failed else []
    parts += [f"busiest: {busiest(snapshot.stages)}"] if busiest(snapshot.stages) else []
    return " · ".join(parts)


def _edges(snapshot: Snapshot) -> Table:
    """Edges between workers first: inside one, an edge is a call, and waits only where its stage may not run."""
    table = _table("edge", "messages/s", "bytes/s", "queue", "credit", "wait p50", "p95", "blocked")
    for row in sorted(snapshot.edges, key=lambda row: row.credit is None):
        size = "call" if row.bytes_per_s is None else format_bytes(round(row.bytes_per_s))
        cells = [f"{row.rate:.1f}", size, f"{row.queue:.0f}", _count(row.credit)]
        table.add_row(row.edge, *cells, _ms(row.wait_p50_s), _ms(row.wait_p95_s), row.blocked)
    return table


def _stages(snapshot: Snapshot) -> Table:
    table = _table("stage", "busy", "messages/s", "tokens/s", "batch", "waiting", "memory", "failed/s")
    for row in snapshot.stages:
        memory = "-" if row.memory is None else format_bytes(round(row.memory / 2**20) * 2**20)
        cells = [_percent(row.busy), f"{row.rate:.1f}", _count(row.tokens), _count(row.batch), _count(row.waiting)]
        cells += [memory, f"{row.failed:.1f}"]
        table.add_row(row.stage + (f" ×{row.workers}" if row.workers > 1 else ""), *cells)
    return table


def _workers(snapshot: Snapshot) -> Table:
    table = _table("worker", "state", "restarts", "memory", "cores", "KV blocks in use")
    for row in snapshot.workers:
        used = "-"
        if row.kv_blocks is not None and row.kv_free is not None:
            used = f"{row.kv_blocks - row.kv_free:.0f} of {row.kv_blocks:.0f}"
        memory = format_bytes(round(row.memory / 2**20) * 2**20)
        table.add_row(row.worker, "up" if row.up else "down", f"{row.restarts:.0f}", memory, f"{row.cpu:.2f}", used)
    return table


def _table(*heads: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(heads[0], box=box.SIMPLE_HEAD, pad_edge=False)
    for name in heads[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.0f} %"


def _count(number: float | None) -> str:
    return "-" if number is None else f"{number:.0f}"
