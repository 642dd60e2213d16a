"""`flowinfer run`: starts the service of a pipeline file and stays with it. Loads no model itself."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import click

from flowinfer.errors import FlowInferError

if TYPE_CHECKING:
    from flowinfer.runtime.kept import Kept

ASK_TIMEOUT_S = 600.0


@click.command()
@click.argument("file", type=click.Path())
@click.option("-o", "--overlay", "overlays", multiple=True, help="A file that is laid over FILE; may be repeated.")
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="A value, as in stages.verify.with.tokens=3.")
@click.option("--ask", metavar="TEXT", help="Send one chat once the service is ready, print the answer, keep running.")
@click.option("--allow-local", is_flag=True, help="Run stages from local files (`use: ./my_stage.py:MyStage`).")
@click.option("--watch", "watching", is_flag=True, help="When a file is saved, show what it changes and ask.")
def run(
    file: str, overlays: tuple[str, ...], sets: tuple[str, ...], ask: str | None, allow_local: bool, watching: bool
) -> None:
    """Start the service that FILE describes. Ctrl-C drains it, a second Ctrl-C stops it at once."""
    from flowinfer.cli import print_error
    from flowinfer.runtime.keeper import keep

    def serve(keeper: Kept | None) -> int:
        try:
            return _serve(keeper, file, overlays, sets, ask, allow_local=allow_local, watching=watching)
        except FlowInferError as error:
            print_error(error)
        except OSError as error:
            print_error(FlowInferError(f"{error.strerror}{f': {error.filename}' if error.filename else ''}"))
        return 1

    sys.exit(keep(serve))


def _serve(
    keeper: Kept | None,
    file: str,
    overlays: tuple[str, ...],
    sets: tuple[str, ...],
    ask: str | None,
    *,
    allow_local: bool,
    watching: bool,
) -> int:
    """The supervisor's process: starts the service, or takes over what a dead supervisor left. Gives the exit code."""
    from rich.console import Console

    from flowinfer.cli.rewire import load_source, source_of
    from flowinfer.cli.watch import watch
    from flowinfer.graph.devices import refuse_missing
    from flowinfer.runtime.models import fetch_models
    from flowinfer.runtime.state import left_to
    from flowinfer.runtime.supervisor import StartError, Supervisor

    console = Console(stderr=True)
    left = left_to(keeper)
    source = left.source if left else source_of(file, overlays, sets, allow_local)
    plan = left.plan if left else load_source(source)
    if left is None:
        refuse_missing(plan)
        fetch_models(plan)

    def ready(address: str) -> None:
        if watching:
            watch(source)
        if left is not None:
            return
        click.echo(f"{plan.name} is ready at {address}" if address else f"{plan.name} is ready")
        if ask is not None:
            # In a thread: the supervisor's loop has to go on meanwhile.
            threading.Thread(target=_ask, args=(address, ask), daemon=True, name="ask").start()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    supervisor = Supervisor(plan, say=say, ready=ready, source=source, keeper=keeper, left=left)
    try:
        supervisor.run()
    except StartError as error:
        console.print(f"worker {error.worker} couldn't start: {error.message}", style="red", markup=False)
        if error.help:
            console.print(error.help, markup=False)
        if error.trace:
            console.print(error.trace, style="dim", markup=False, highlight=False)
        return 1
    return 0


def _ask(address: str, text: str) -> None:
    from http.client import HTTPException  # here: this module is the keeper's as well, which stays small

    try:
        click.echo(ask_chat(address, text))
    except (OSError, HTTPException, FlowInferError, ValueError) as error:
        click.echo(f"The chat failed: {error}", err=True)


def ask_chat(address: str, text: str, *, max_tokens: int = 256) -> str:
    """The answer of a service to one chat message. Raises FlowInferError with the service's own words."""
    import http.client
    import json
    from urllib.parse import urlsplit

    url = urlsplit(address)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(url.hostname or "", url.hostname or "")
    connection = http.client.HTTPConnection(host, url.port, timeout=ASK_TIMEOUT_S)
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0}
    try:
        connection.request("GET", "/v1/models")
        models = json.loads(connection.getresponse().read()).get("data")
        chat["model"] = models[0]["id"] if models else "default"
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(chat), headers)
        reply = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if "choices" not in reply:
        raise FlowInferError(str(reply.get("error", {}).get("message", reply)))
    return str(reply["choices"][0]["message"]["content"])
