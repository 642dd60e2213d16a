"""`flowinfer run`: starts the service of a pipeline file and stays with it. Loads no model itself."""

from __future__ import annotations

import http.client
import json
import sys
import threading
from urllib.parse import urlsplit

import click
from rich.console import Console

from flowinfer.errors import FlowInferError

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
    from flowinfer.cli.rewire import source_of
    from flowinfer.cli.watch import watch
    from flowinfer.graph import load_plan
    from flowinfer.runtime.models import fetch_models
    from flowinfer.runtime.supervisor import StartError, Supervisor

    console = Console(stderr=True)
    plan = load_plan(file, overlays, sets, allow_local)
    fetch_models(plan)
    source = source_of(file, overlays, sets, allow_local)

    def ready(address: str) -> None:
        click.echo(f"{plan.name} is ready at {address}" if address else f"{plan.name} is ready")
        if watching:
            watch(source)
        if ask is not None:
            # In a thread: the supervisor's loop has to go on meanwhile.
            threading.Thread(target=_ask, args=(address, ask), daemon=True, name="ask").start()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    supervisor = Supervisor(plan, say=say, ready=ready, source=source)
    try:
        supervisor.run()
    except StartError as error:
        console.print(f"worker {error.worker} couldn't start: {error.message}", style="red", markup=False)
        if error.help:
            console.print(error.help, markup=False)
        if error.trace:
            console.print(error.trace, style="dim", markup=False, highlight=False)
        sys.exit(1)


def _ask(address: str, text: str) -> None:
    try:
        click.echo(ask_chat(address, text))
    except (OSError, http.client.HTTPException, FlowInferError, ValueError) as error:
        click.echo(f"The chat failed: {error}", err=True)


def ask_chat(address: str, text: str, *, max_tokens: int = 64) -> str:
    """The answer of a service to one chat message. Raises FlowInferError with the service's own words."""
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
