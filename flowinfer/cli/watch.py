"""`flowinfer run --watch`: shows what a saved file changes, and asks whether to change the service."""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flowinfer.cli.plan import render
from flowinfer.cli.rewire import ask_service, load_source
from flowinfer.errors import FlowInferError

if TYPE_CHECKING:
    from flowinfer.runtime.rewire.protocol import Source

LOOK_S = 0.5


def watch(source: Source) -> None:
    """Looks at the files from now on, in a thread of its own."""
    threading.Thread(target=_watch, args=(source,), daemon=True, name="watch").start()


def _watch(source: Source) -> None:
    seen = _times(source)
    while True:
        time.sleep(LOOK_S)
        now = _times(source)
        if now != seen:
            seen = now
            try:
                _offer(source)
            except FlowInferError as error:
                click.echo(f"{error}", err=True)


def _times(source: Source) -> dict[str, int]:
    """When each file that the pipeline is read from was written; what can't be read now is left out."""
    from flowinfer.spec import load

    try:
        files = load(source.file, source.overlays, source.sets, source.allow_local).sources
    except FlowInferError:
        files = dict.fromkeys((source.file, *source.overlays), "")
    return {file: Path(file).stat().st_mtime_ns for file in files if Path(file).exists()}


def _offer(source: Source) -> None:
    from flowinfer.runtime.rewire.control import running
    from flowinfer.runtime.rewire.protocol import Request

    folder = next(folder for service, folder in running() if service.controller == os.getpid())
    source = ask_service(folder, Request(do="status")).source or source  # with what was set since
    plan = load_source(source)
    reply = ask_service(folder, Request(do="plan", plan=plan))
    click.echo(render(reply))
    if not reply.changes or any(change.kind == "refused" for change in reply.changes):
        return
    if not sys.stdin.isatty():
        click.echo(f"`{_command(source)}` makes these changes.")
    elif click.confirm("Change the service?", default=True):
        ask_service(folder, Request(do="apply", plan=plan, source=source, note="saved"))
        click.echo("Done.")


def _command(source: Source) -> str:
    """How the same is asked for on the command line."""
    options = [part for overlay in source.overlays for part in ("-o", overlay)]
    options += [part for value in source.sets for part in ("--set", value)]
    options += ["--allow-local"] * source.allow_local
    return shlex.join(["flowinfer", "apply", source.file, *options])
