"""`flowinfer trace ID`: one request's way through a running service, with waiting and working time of each stage."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from flowinfer.cli.service_url import url_option
from flowinfer.errors import FlowInferError

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 40
KEY_VARIABLE = "FLOWINFER_API_KEY"  # of a client, for a service with keys
TIMEOUT_S = 600.0
SETTLE_S = 0.2  # the last piece reaches the client a little before the steps around it are over


@dataclass(frozen=True)
class Bar:
    """A stage's part in a request, in seconds since the request's first step.

    queue: from the end of the step before to this stage's first step. work: time spent in steps that had the request.
    """

    worker: str
    stage: str
    start: float
    end: float
    queue: float
    work: float
    steps: int


@click.command()
@click.argument("id", required=False)
@click.option("--ask", metavar="TEXT", help="Send this chat, and trace it.")
@url_option("A service on this host")
@click.option("--json", "as_json", is_flag=True, help="Print every step as JSON.")
def trace(id: str | None, ask: str | None, url: str, as_json: bool) -> None:
    """Show where a request spent its time, stage by stage. ID is that of the response, as in chatcmpl-….

    Tracing is off until it's first asked for: the first call turns it on, later requests are in it. A service with keys
    wants one in the environment variable FLOWINFER_API_KEY.
    """
    from rich.console import Console

    if (id is None) == (ask is None):
        raise click.UsageError("Give either the id of a request or --ask TEXT.")
    where = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
    if ask is not None:
        _fetch(f"{where}/admin/trace/-")  # turns tracing on
        id = _ask(where, ask)
        time.sleep(SETTLE_S)
    answer = _fetch(f"{where}/admin/trace/{id}")
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    bars = waterfall(answer)
    if not bars:
        help = "Tracing is on from now: send the request again, or use --ask."
        raise FlowInferError(f"Nothing is known of {id}.", help=help)
    Console(highlight=False).print(_table(bars))


def waterfall(answer: dict[str, Any]) -> list[Bar]:
    """A bar for each stage, in the order in which the request met them."""
    steps: dict[tuple[str, str], list[dict[str, Any]]] = {}
    own = [step for worker in answer["workers"] for step in worker["steps"] if not step["shared"]]
    if not own:
        return []
    first, last = min(step["started"] for step in own), max(step["ended"] for step in own)
    for worker in answer["workers"]:
        for step in worker["steps"]:
            if step["started"] <= last:  # steps of the batch after the request's end are others'
                steps.setdefault((worker["worker"], step["stage"]), []).append(step)
    rows = sorted(steps.items(), key=lambda row: min(step["started"] for step in row[1]))
    bars: list[Bar] = []
    before = first
    for (worker, stage), taken in rows:
        start, end = min(step["started"] for step in taken), max(step["ended"] for step in taken)
        work = sum(step["ended"] - step["started"] for step in taken)
        bars.append(Bar(worker, stage, start - first, end - first, max(0.0, start - before), work, len(taken)))
        before = max(before, min(step["ended"] for step in taken))
    return bars


def _table(bars: list[Bar]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table("worker", "stage", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("waited", "worked", "steps"):
        table.add_column(name, justify="right", no_wrap=True)
    total = max(bar.end for bar in bars)
    table.add_column(f"0 to {total * 1e3:.0f} ms", no_wrap=True)
    for bar in bars:
        left = round(bar.start / total * WIDTH)
        width = max(1, round((bar.end - bar.start) / total * WIDTH))
        line = " " * min(left, WIDTH - 1) + "█" * min(width, WIDTH - min(left, WIDTH - 1))
        cells = (f"{bar.queue * 1e3:.2f} ms", f"{bar.work * 1e3:.2f} ms", str(bar.steps), line)
        table.add_row(bar.worker, bar.stage, *cells)
    return table


def _ask(where: str, text: str) -> str:
    models = _fetch(f"{where}/v1/models")["data"]
    body = {"model": models[0]["id"] if models else "default", "messages": [{"role": "user", "content": text}]}
    answer = _fetch(f"{where}/v1/chat/completions", {**body, "max_tokens": 64, "temperature": 0})
    return str(answer["id"])


def _fetch(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    if key := os.environ.get(KEY_VARIABLE):
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        raise FlowInferError(f"{url}: {error.read().decode(errors='replace')[:300]}") from error
    except (OSError, ValueError) as error:
        help = "Start one with `flowinfer run FILE`, or name it: --url http://127.0.0.1:8000."
        raise FlowInferError(f"No service answers at {url}: {error}.", help=help) from error
